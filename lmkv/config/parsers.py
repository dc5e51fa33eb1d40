"""Parsers of settings, which convert a value as users write it, and raise ValueError with the reason if it is invalid.

Values come from YAML, the environment, JSON and Python, so a number or a boolean may be text. A `Reading` says what
lmkv makes of one setting; commands and the server report it with the same words.
"""

from __future__ import annotations

import math
import os
import re
from collections.abc import Callable, Iterable
from difflib import get_close_matches
from ipaddress import ip_address
from numbers import Integral, Real
from pathlib import Path
from typing import Any, Final, Literal
from urllib.parse import parse_qs, unquote, urlsplit

from attrs import field, frozen

from lmkv import plugins
from lmkv.chunks.namespace import salt_label
from lmkv.errors import ConfigError, mask_secrets

GIB: Final = 1 << 30
"""Bytes in a GiB, the unit of sizes."""
SCHEMES: Final = {
    **dict.fromkeys(("redis", "rediss", "unix", "valkey", "valkeys"), "redis"),
    **dict.fromkeys(("redis+cluster", "rediss+cluster", "redis-cluster", "valkey+cluster", "valkeys+cluster"), "redis"),
    **dict.fromkeys(("redis-sentinel", "redis+sentinel", "rediss+sentinel"), "redis"),
    **dict.fromkeys(("valkey+sentinel", "valkeys+sentinel"), "redis"),
    **dict.fromkeys(("s3", "gs", "az", "file"), "objects"),
    **dict.fromkeys(("mooncake", "mooncakestore"), "mooncake"),
    "infinistore": "infinistore",
}
"""For each scheme of a URL, the module of `lmkv.backends.remote` that opens it."""


_NO_PLACE: Final = "needs a valid host and port; in a password write / as %2F, ? as %3F, # as %23"
SERVICE_VARIABLE: Final = "REDIS_SERVICE_NAME"
"""Where LMCache has the name of the service that sentinels watch, which its URLs do not have."""


def split_urls(text: str) -> list[str]:
    """Split URLs at blanks and commas. A URL of a cluster or of sentinels may have commas between its hosts."""
    found: list[str] = []
    for piece in filter(None, re.split(r"[\s,]+", text)):
        if found and "://" not in piece and RemoteURL(found[-1]).may_have_hosts:
            found[-1] += f",{piece}"
        else:
            found.append(piece)
    return found


def schemes() -> list[str]:
    """Return the schemes that a URL may have: lmkv's own, and those of installed packages."""
    return [*SCHEMES, *(name for name in plugins.installed(plugins.BACKENDS) if name not in SCHEMES)]


@frozen(repr=False)
class Secret:
    """A secret text, which `repr` does not show. `value` has the text.

    >>> Secret("letmein")
    '***'
    """

    value: str

    def __repr__(self) -> str:
        return "'***'"

    def __str__(self) -> str:
        return "***"


@frozen
class RemoteURL:
    """The URL of a remote store. `str` and `repr` hide passwords; `text` is the whole URL.

    >>> print(RemoteURL("redis://cache:secret@host"))
    redis://cache:***@host
    """

    text: str = field(repr=lambda text: repr(mask_secrets(text)))

    def __str__(self) -> str:
        return mask_secrets(self.text)

    @property
    def scheme(self) -> str:
        """The part before `://`: a scheme in small letters, or `package.module:Class`."""
        scheme = self.text.partition("://")[0]
        return scheme if plugins.is_place(scheme) else scheme.lower()

    @property
    def may_have_hosts(self) -> bool:
        """Whether it may name several hosts."""
        return self.scheme.endswith(("cluster", "sentinel"))

    def check_place(self) -> None:
        """Raise ValueError for an invalid host or port, or a Redis database that is no number."""
        rest = self.text.partition("://")[2]
        place = re.split("[/?#]", rest, maxsplit=1)[0]
        path = re.split("[?#]", rest.removeprefix(place), maxsplit=1)[0]
        try:
            hosts = [f"//{host}" for host in place.rpartition("@")[2].split(",")]
            for text in hosts if self.may_have_hosts else [self.text]:
                _ = urlsplit(text).port
        except ValueError:  # it may quote a part of a password
            raise ValueError(_NO_PLACE) from None
        options = parse_qs(urlsplit(self.text).query)
        endpoints = [*options.get("endpoint", ()), *options.get("endpoint_url", ())]
        if self.scheme == "s3" and not all(re.match("https?://", each, re.IGNORECASE) for each in endpoints):
            raise ValueError("must have a whole endpoint, such as endpoint=http://HOST:PORT")
        is_redis = self.store_kind == "redis" and self.scheme != "unix" and not self.scheme.endswith("sentinel")
        if is_redis and "@" in path:
            raise ValueError(_NO_PLACE)
        if is_redis and not re.fullmatch("/?[0-9]*/?", path):
            raise ValueError("must have a number as the database, such as /0; use remote_prefix for a name")

    @property
    def lacks_service(self) -> bool:
        """Whether its sentinels watch a service that neither the URL nor this process's environment names."""
        named = urlsplit(self.text).path.strip("/") or "service_name=" in self.text or os.environ.get(SERVICE_VARIABLE)
        return self.scheme.endswith("sentinel") and not named

    @property
    def store_kind(self) -> str:
        """Name of stores of this scheme in logs and statistics."""
        return SCHEMES.get(self.scheme, self.scheme.rpartition(":")[2].lower())

    @property
    def place(self) -> str:
        """The class that opens the URL, as `package.module:Class`. Raises ConfigError for an unknown scheme."""
        if self.scheme in SCHEMES:
            return f"lmkv.backends.remote.{self.store_kind}:open_url"
        if plugins.is_place(self.scheme):
            return self.scheme
        found = plugins.installed(plugins.BACKENDS).get(self.scheme)
        if found is None:
            raise ConfigError(f"{self}: unknown scheme; known are: {', '.join(schemes())}")
        return found


Parse = Callable[[object], Any]

_FILE_URL: Final = re.compile(r"(?i:file):(//(localhost)?(?=/))?(?P<path>/(?!/).*)")
_OTHER_URL: Final = re.compile(r"(?i)file:|[a-z][a-z0-9+.-]*://")

NOTHING: Final = frozenset({"", "none", "null", "false", "no", "off"})
"""Words for an option that is not set."""

BOOLEANS: Final = {
    **dict.fromkeys(("true", "1", "yes", "on"), True),
    **dict.fromkeys(("false", "0", "no", "off"), False),
}
_WHOLE_NUMBER: Final = re.compile(r"\s*[-+]?[0-9]+\s*")
"""Matches a whole number without underscores, which Python would accept, but other readers would not."""


def boolean(value: object) -> bool:
    word = str(value).strip().lower() if isinstance(value, bool | int | str) else ""
    if word not in BOOLEANS:
        raise ValueError(f"must be one of {'/'.join(BOOLEANS)}")
    return BOOLEANS[word]


def is_nothing(value: object) -> bool:
    """Return whether this value leaves an optional setting unset: none, null, false, no, off, or empty."""
    return value is None or value is False or (isinstance(value, str) and value.lower() in NOTHING)


def integer(minimum: int, maximum: int = 1 << 40) -> Parse:
    def parse(value: object) -> int:
        if isinstance(value, bool) or not isinstance(value, Integral | str):
            raise ValueError("must be a whole number")
        if isinstance(value, str) and not _WHOLE_NUMBER.fullmatch(value):
            raise ValueError("must be a whole number, with digits only")
        try:
            found = int(value)
        except ValueError:
            raise ValueError("must be a whole number") from None
        if not minimum <= found <= maximum:
            raise ValueError(f"must be {f'at least {minimum}' if found < minimum else f'at most {maximum}'}")
        return found

    return parse


def number(minimum: float, maximum: float = 1e9, *, above: bool = False) -> Parse:
    """Return a parser of finite numbers from `minimum` to `maximum`. `above`: whether `minimum` itself is invalid."""

    def parse(value: object) -> float:
        if isinstance(value, bool) or not isinstance(value, Real | str) or "_" in str(value)[:400]:
            raise ValueError("must be a number")
        try:
            found = float(value)
        except (ValueError, OverflowError):
            raise ValueError("must be a number") from None
        if not math.isfinite(found):
            raise ValueError("must be finite")
        if found > maximum:
            raise ValueError(f"must be at most {maximum:g}")
        if found < minimum or (above and found == minimum):
            raise ValueError(f"must be {'above' if above else 'at least'} {minimum:g}")
        return found

    return parse


def _named(value: object, names: Iterable[str]) -> str | None:
    # YAML reads a bare on or off as a boolean.
    text = ("on" if value else "off") if isinstance(value, bool) else value
    return next((name for name in names if isinstance(text, str) and name.lower() == text.strip().lower()), None)


def one_of(*names: str) -> Parse:
    def parse(value: object) -> str:
        if (found := _named(value, names)) is None:
            raise ValueError(f"must be one of {', '.join(names)}")
        return found

    return parse


def plugin_name(names: Callable[[], Iterable[str]], *, numbered: str = "") -> Parse:
    """Return a parser of names: one of `names()` at that time, or `package.module:Class`.

    `numbered`: a name that must be followed by a number, such as `:5`.
    """

    def parse(value: object) -> str:
        if isinstance(value, str) and (
            plugins.is_place(value.strip()) or (numbered and re.fullmatch(rf"{numbered}:[1-9]\d*", value.strip()))
        ):
            return value.strip()
        # The names of installed packages are the last: to find them takes 10 ms.
        if (found := _named(value, names())) is None:
            choices = ", ".join((*names(), *([f"{numbered}:8192"] if numbered else [])))
            raise ValueError(f"must be one of {choices}, or package.module:Class")
        return found

    return parse


def path(value: object) -> str | None:
    """Return the plain path of a folder that is given as a path or a file URL, or None if the setting is unset."""
    if is_nothing(value):
        return None
    if not isinstance(value, str | os.PathLike) or re.search(r",\s*/", str(value)):
        raise ValueError("must be a single path or file:///path")
    text = os.fspath(value)
    if isinstance(text, str) and _NO_PATH.fullmatch(text):
        raise ValueError("must be a path or file:///path, not a switch or a number: write ./NAME for a folder NAME")
    _check_template(text)
    if isinstance(text, str) and text != text.strip():
        raise ValueError("must not begin or end with a blank")
    if isinstance(text, str) and (url := _FILE_URL.fullmatch(text)):
        if set("?#") & set(url["path"]):
            raise ValueError("has a ? or # in its URL: write %3F or %23, or give a plain path")
        text = unquote(url["path"])
    elif isinstance(text, bytes) or _OTHER_URL.match(text):
        raise ValueError("must be a path or file:///path; write the address of a store as remote_url")
    path = os.path.normpath(os.path.expanduser(text))
    if "\0" in text or path.strip("/") == "":
        raise ValueError("must be a path or file:///path, and not /")
    # Keep ./none as a folder, so that it is not read as unset later.
    return os.path.join(os.curdir, path) if is_nothing(path) else path


_NO_PATH: Final = re.compile(r"(?i)true|yes|on|[0-9.]*[0-9]\s*([kmgt]i?b?)?")
_VARIABLE: Final = re.compile(
    r"<[A-Za-z][\w .-]*>|\{\{.*?\}\}|\$?\{[A-Za-z_][^{}]*\}|\$\{[^}]*\}|\$\([^)]*\)"
    r"|(?:^|(?<=[/@]))\$[A-Z_][A-Z0-9_]*(?=[/:]|$)"
)


def _check_template(text: object) -> None:
    """Raise ValueError if the text has a variable that a shell or a template should have replaced."""
    if isinstance(text, str) and (found := _VARIABLE.search(text)):
        raise ValueError(f"has a placeholder that nothing replaces: write the value of {found[0]}")
    if isinstance(text, str) and len(text) > 1 and text[0] == text[-1] and text[0] in "'\"":
        raise ValueError("has quotes inside the value: leave out these quotes")


def urls(value: object) -> tuple[RemoteURL, ...]:
    """Parse one URL, several URLs with blanks or commas between them, or a list of URLs."""
    _check_template(value)
    texts = () if is_nothing(value) else split_urls(value) if isinstance(value, str) else value
    if not isinstance(texts, list | tuple) or not all(isinstance(text, str | RemoteURL) for text in texts):
        raise ValueError("must be a URL, or a list of them")
    found = [text if isinstance(text, RemoteURL) else RemoteURL(text) for text in texts if text]
    for url in found:
        _check_template(url.text)
    for before, url in zip([None, *found], found, strict=False):
        _check_scheme(url, before)
    if not all(url.text.isprintable() and " " not in url.text for url in found):
        raise ValueError("must have only printable characters, and no blanks")
    for url in found:
        url.check_place()
    return tuple(found)


def _check_scheme(url: RemoteURL, before: RemoteURL | None) -> None:
    known, text = schemes(), url.text
    name = re.split("[:/]", url.scheme)[0][:100]
    if url.scheme in known or (plugins.is_place(url.scheme) and name not in known):
        return
    if name in ("http", "https"):
        raise ValueError(f"is not a store's URL: for S3 write s3://BUCKET?endpoint={name}://HOST:PORT&region=REGION")
    if "://" not in text and before is not None and before.store_kind == "redis":
        raise ValueError("names several hosts: for the nodes of a cluster write redis+cluster://HOST:PORT,HOST:PORT")
    if text.startswith(("/", "./", "~")):
        raise ValueError("has no scheme: write file:///FOLDER for a folder that other machines share")
    if re.fullmatch(r"(\[[0-9a-f:]+\]|[\w.-]+)(:[0-9]+)?(/[0-9]*)?", text):
        raise ValueError("has no scheme: write redis://HOST:PORT for Redis, or s3://BUCKET for S3")
    if close := [name] if name in known else get_close_matches(name, known, n=1):
        raise ValueError(f"has an unknown scheme: did you mean {close[0]}://?")
    plain = ", ".join(f"{each}://" for each in known if each.isalnum())
    raise ValueError(f"must begin with one of {plain}, or with package.module:Class")


_SHOWN = re.compile(r"[^:]+:.*|salt-[0-9a-f]{16}")
"""Matches tenants that may be shown: tags and labels. A salt is a secret, so only its label is kept and shown."""


@frozen
class Quota:
    """The quota of a tenant, in percent of each tier. `tenant`: a tag as `name:value`, or the label of a salt."""

    tenant: str
    percent: float

    def __str__(self) -> str:
        return f"{self.tenant}={self.percent:g}"


def quotas(value: object) -> tuple[Quota, ...]:
    """Parse quotas from a mapping of names to percents, or from `name=percent` with blanks or commas between."""
    if is_nothing(value):
        return ()
    if isinstance(value, list | tuple) and all(isinstance(each, Quota) for each in value):
        return tuple(value)
    if isinstance(value, str):
        value = dict(part.rpartition("=")[::2] for part in re.split(r"[\s,]+", value.strip()) if part)
    if not isinstance(value, dict) or not all(isinstance(name, str) and name for name in value):
        raise ValueError("must be name=percent, with blanks between several of them")
    percent = number(0, 100)
    plain = {name: share.removesuffix("%") if isinstance(share, str) else share for name, share in value.items()}
    found = tuple(
        Quota(name if _SHOWN.fullmatch(name) else salt_label(name), percent(share)) for name, share in plain.items()
    )
    if sum(share.percent for share in found) > 100:
        raise ValueError("must add up to 100 percent at most")
    return found


def secret(value: object) -> Secret | None:
    if isinstance(value, Secret):
        return value
    if value is None or (isinstance(value, str) and is_nothing(value)):
        return None
    if not isinstance(value, str):
        # YAML has read yes or no as a boolean.
        raise ValueError("must be text: put it in quotes in YAML")
    try:
        value.encode()
    except UnicodeEncodeError:
        raise ValueError("must be text in UTF-8") from None
    return Secret(value)


def optional_text(value: object) -> str | None:
    return None if is_nothing(value) else text(value)


def agent_address(value: object) -> str | None:
    """Parse the address of the agent API: the path of a socket, or a port of this machine's loopback."""
    address = optional_text(value)
    host, _, port = (address or "").rpartition(":")
    try:
        local = host.strip("[]") == "localhost" or ip_address(host.strip("[]")).is_loopback
    except ValueError:
        local = False
    if address is None or address.startswith("unix:/") or (local and port.isdecimal() and int(port) < 1 << 16):
        return address
    raise ValueError("must be unix:/path, or a loopback address such as 127.0.0.1:8377; use a proxy for other machines")


def text(value: object) -> str:
    if not isinstance(value, str | None):
        raise ValueError("must be a text")
    return value or ""


def readable(value: object) -> object:
    """Return a parsed value as text, without passwords."""
    if isinstance(value, tuple):
        return " ".join(map(str, value)) or None
    return str(value) if isinstance(value, Secret) else value


def in_words(value: object) -> str:
    """Return a value in the form of a YAML file."""
    return str(value).lower() if isinstance(value, bool | None) else str(value)


def are_nested(one: str, other: str) -> bool:
    """Return whether two paths lead to the same folder, or one into the other, also by links and mounts."""
    first, second = map(_identities, (one, other))
    return first[0] in second or second[0] in first


def _identities(path: str) -> list[object]:
    """Return the identities of a folder and of all folders above it."""
    real = Path(os.path.realpath(path))
    return [_identity(place) for place in (real, *real.parents)]


def _identity(path: Path) -> object:
    """Return the device and inode, or the path of a folder that does not exist."""
    try:
        status = path.stat()
    except OSError:
        return path
    return status.st_dev, status.st_ino


Kind = Literal["used", "without effect", "refused", "unknown"]


@frozen
class Reading:
    """The meaning of one given setting in lmkv. `here`: lmkv's setting and value. `why`: the reason, or what to write.

    >>> print(Reading("lookup_timeout_ms", "file kv.yaml", "without effect", why="lookups time out by themselves"))
    file kv.yaml: lookup_timeout_ms has no effect: lookups time out by themselves
    """

    key: str
    source: str
    kind: Kind
    here: str = ""
    why: str = ""

    def __str__(self) -> str:
        return f"{self.source}: {self.in_words}"

    @property
    def in_words(self) -> str:
        """Return the text of the reading without the source."""
        verb = {"used": f"is used: {self.here}", "without effect": "has no effect", "refused": "cannot be used"}
        return f"{self.key} {verb.get(self.kind, 'is unknown')}{f': {self.why}' if self.why else ''}"
