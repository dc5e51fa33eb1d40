"""Parsers of settings: functions that convert a value as users write it. They raise ValueError for an invalid value.

Values come from YAML, the environment, JSON and Python, so a number or a boolean may be text. A `Reading` says what one
setting means in lmkv.
"""

from __future__ import annotations

import math
import os
import re
from collections.abc import Callable, Iterable
from ipaddress import ip_address
from numbers import Integral, Real
from pathlib import Path
from typing import Any, Final, Literal
from urllib.parse import unquote

from attrs import frozen

from lmkv import plugins
from lmkv.chunks.namespace import salt_label

GIB: Final = 1 << 30
"""Number of bytes in a GiB, the unit of sizes."""


@frozen(repr=False)
class Secret:
    """A secret text, which only the attribute `value` shows. `str` and `repr` return asterisks.

    >>> Secret("letmein")
    '***'
    """

    value: str

    def __repr__(self) -> str:
        return "'***'"

    def __str__(self) -> str:
        return "***"


Parse = Callable[[object], Any]

_FILE_URL: Final = re.compile(r"(?i:file):(//(localhost)?(?=/))?(?P<path>/(?!/).*)")
_OTHER_URL: Final = re.compile(r"(?i)file:|[a-z][a-z0-9+.-]*://")

NOTHING: Final = frozenset({"", "none", "null", "false", "no", "off"})
"""Words that mean that an option is not set."""

BOOLEANS: Final = {
    **dict.fromkeys(("true", "1", "yes", "on"), True),
    **dict.fromkeys(("false", "0", "no", "off"), False),
}
_WHOLE_NUMBER: Final = re.compile(r"\s*[-+]?[0-9]+\s*")
"""Matches a whole number without underscores. Python would accept underscores, but other readers of the same file
would not.
"""


def boolean(value: object) -> bool:
    word = str(value).strip().lower() if isinstance(value, bool | int | str) else ""
    if word not in BOOLEANS:
        raise ValueError(f"must be one of {'/'.join(BOOLEANS)}")
    return BOOLEANS[word]


def is_nothing(value: object) -> bool:
    """Return whether a value means that an optional setting is unset: none, null, false, no, off, or an empty text."""
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
            raise ValueError(f"must be at most {maximum:.10g}")
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
    """Return a parser of names: one of `names()`, or `package.module:Class`.

    `names` is called at each parse. `numbered`: one more name, which needs a number after a colon, as in `NAME:5`.
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
    """Return the path of a folder, or None if the setting is unset. `value`: a path or a file URL."""
    if is_nothing(value):
        return None
    if not isinstance(value, str | os.PathLike) or re.search(r",\s*/", str(value)):
        raise ValueError("must be a single path or file:///path")
    text = os.fspath(value)
    if isinstance(text, str) and _NO_PATH.fullmatch(text):
        raise ValueError("must be a path or file:///path, not a switch or a number: write ./NAME for a folder NAME")
    check_template(text)
    if isinstance(text, str) and text != text.strip():
        raise ValueError("must not begin or end with a blank")
    if isinstance(text, str) and (url := _FILE_URL.fullmatch(text)):
        if set("?#") & set(url["path"]):
            raise ValueError("has a ? or # in its URL: write %3F or %23, or give a plain path")
        text = unquote(url["path"])
    elif isinstance(text, bytes) or _OTHER_URL.match(text):
        store = "" if text.lower().startswith("file:") else "; write the address of a store as remote_url"
        raise ValueError(f"must be a path or file:///path, with three slashes{store}")
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


def check_template(text: object) -> None:
    """Raise ValueError if a text still has a variable that a shell or a template should have replaced."""
    if isinstance(text, str) and (found := _VARIABLE.search(text)):
        if re.fullmatch(r"\$\([A-Z0-9_]+\)", found[0]):
            told = "replaces only if an earlier entry of the container's env defines the variable"
            raise ValueError(f"has {found[0]}, which Kubernetes {told}: add this entry, or write the value itself")
        raise ValueError(f"has a placeholder that nothing replaces: write the value of {found[0]}")
    if isinstance(text, str) and len(text) > 1 and text[0] == text[-1] and text[0] in "'\"":
        raise ValueError("has quotes inside the value: leave out these quotes")


_SHOWN = re.compile(r"[^:]+:.*|salt-[0-9a-f]{16}")
"""Matches names of tenants that may be shown: tags and labels of salts. A salt is a secret, so only its label is
kept and shown.
"""


@frozen
class Quota:
    """A tenant's quota, in percent of each tier. `tenant`: a tag `name:value`, or a `cache_salt`'s `salt_label`."""

    tenant: str
    percent: float

    def __str__(self) -> str:
        return f"{self.tenant}={self.percent:g}"


def quotas(value: object) -> tuple[Quota, ...]:
    """Return the quotas in a mapping `{name: percent}`, or in a text of `name=percent` items.

    The items in a text are separated by blanks or commas.
    """
    if is_nothing(value):
        return ()
    if isinstance(value, list | tuple) and all(isinstance(each, Quota) for each in value):
        return tuple(value)
    if isinstance(value, str):
        value = dict(part.rpartition("=")[::2] for part in re.split(r"[\s,]+", value.strip()) if part)
    if not isinstance(value, dict) or not all(isinstance(name, str) and name for name in value):
        raise ValueError("must be NAME=PERCENT, or several of these with blanks between them")
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
    if re.fullmatch(r"\$\([A-Z0-9_]+\)|\$\{?[A-Z_]{2,}\}?|\{\{.*\}\}", value):
        told = "write the secret, or name a file that has it"
        raise ValueError(f"is the name of a variable, which nothing has replaced by its value: {told}")
    try:
        value.encode()
    except UnicodeEncodeError:
        raise ValueError("must be text in UTF-8") from None
    return Secret(value)


def optional_text(value: object) -> str | None:
    return None if is_nothing(value) else text(value)


_LONGEST_SOCKET: Final = 107
"""Bytes of the path of a Unix socket on Linux, at most."""


def agent_address(value: object) -> str | None:
    """Return the address of the agent API: a unix socket's path, or a loopback address with a port. None if unset."""
    address = optional_text(value)
    host, _, port = (address or "").rpartition(":")
    try:
        local = host.strip("[]") == "localhost" or ip_address(host.strip("[]")).is_loopback
    except ValueError:
        local = False
    if (address or "").startswith("unix:/") and len(os.fsencode(address or "")) > len("unix:") + _LONGEST_SOCKET:
        raise ValueError(
            f"has a path of more than {_LONGEST_SOCKET} bytes, the limit of Unix sockets: shorten the path"
        )
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
    """Return a value as text, in the form of a YAML file."""
    return str(value).lower() if isinstance(value, bool | None) else str(value)


def are_nested(one: str, other: str) -> bool:
    """Return whether two paths are the same folder, or one contains the other. Links and mounts are followed."""
    first, second = map(_identities, (one, other))
    return first[0] in second or second[0] in first


def _identities(path: str) -> list[object]:
    """Return the identities of a folder and of all its parent folders."""
    real = Path(os.path.realpath(path))
    return [_identity(place) for place in (real, *real.parents)]


def _identity(path: Path) -> object:
    """Return the device and inode of a folder, or its path if it does not exist."""
    try:
        status = path.stat()
    except OSError:
        return path
    return status.st_dev, status.st_ino


Kind = Literal["used", "without effect", "refused", "unknown"]


@frozen
class Reading:
    """The meaning of one setting of the user in lmkv. `key`: the setting's name. `source`: where its value comes from.

    `kind`: whether lmkv uses the setting. `here`: lmkv's setting and value. `why`: the reason, or advice.

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
        """A sentence that says whether the setting is used, without its source."""
        verb = {"used": f"is used: {self.here}", "without effect": "has no effect", "refused": "cannot be used"}
        return f"{self.key} {verb.get(self.kind, 'is unknown')}{f': {self.why}' if self.why else ''}"
