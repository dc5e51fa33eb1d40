"""The URLs of remote stores: `RemoteURL`, and the parser of settings with such URLs."""

from __future__ import annotations

import os
import re
from difflib import get_close_matches
from typing import Final
from urllib.parse import parse_qs, urlsplit

from attrs import field, frozen

from lmkv import plugins
from lmkv.config.parsers import check_template, is_nothing
from lmkv.errors import ConfigError, mask_secrets

SCHEMES: Final = {
    **dict.fromkeys(("redis", "rediss", "unix", "valkey", "valkeys"), "redis"),
    **dict.fromkeys(("redis+cluster", "rediss+cluster", "redis-cluster", "valkey+cluster", "valkeys+cluster"), "redis"),
    **dict.fromkeys(("redis-sentinel", "redis+sentinel", "rediss+sentinel"), "redis"),
    **dict.fromkeys(("valkey+sentinel", "valkeys+sentinel"), "redis"),
    **dict.fromkeys(("s3", "gs", "az", "file"), "objects"),
    **dict.fromkeys(("mooncake", "mooncakestore"), "mooncake"),
    "infinistore": "infinistore",
}
"""For each scheme of a URL, the module of `lmkv.backends.remote` with the class that opens the URL."""
_SERVICE_VARIABLE: Final = "REDIS_SERVICE_NAME"
"""The variable in which LMCache has the name of the service that Redis Sentinel watches. LMCache's URLs do not have
this name.
"""


def split_urls(text: str) -> list[str]:
    """Split a text into URLs at blanks and commas.

    Commas between the hosts of one URL (of a cluster or of Redis Sentinel) do not split this URL.
    """
    found: list[str] = []
    for piece in filter(None, re.split(r"[\s,]+", text)):
        if found and "://" not in piece and RemoteURL(found[-1]).may_have_hosts:
            found[-1] += f",{piece}"
        else:
            found.append(piece)
    return found


def schemes() -> list[str]:
    """Return the allowed schemes of URLs: those of lmkv's backends, and those of backends in installed packages."""
    return [*SCHEMES, *(name for name in plugins.installed(plugins.BACKENDS) if name not in SCHEMES)]


@frozen
class RemoteURL:
    """The URL of a remote store. `str` and `repr` hide passwords. `text`: the complete URL, with passwords.

    >>> print(RemoteURL("redis://cache:secret@host"))
    redis://cache:***@host
    """

    text: str = field(repr=lambda text: repr(mask_secrets(text)))

    def __str__(self) -> str:
        return mask_secrets(self.text)

    @property
    def scheme(self) -> str:
        """The part before `://`. It is a scheme in lower case, or names a class as `package.module:Class`."""
        scheme = self.text.partition("://")[0]
        return scheme if plugins.is_place(scheme) else scheme.lower()

    @property
    def may_have_hosts(self) -> bool:
        """Whether the URL may name several hosts."""
        return self.scheme.endswith(("cluster", "sentinel"))

    def check_place(self) -> None:
        """Raise ValueError if the URL's host, port, options or Redis database number are invalid."""
        rest = self.text.partition("://")[2]
        place = re.split("[/?#]", rest, maxsplit=1)[0]
        after = re.split("[?&][a-z_]+=", rest.removeprefix(place), maxsplit=1)[0]
        path = re.split("[?#]", after, maxsplit=1)[0]
        if "@" in after and self.store_kind == "redis" and self.scheme != "unix":
            raise ValueError("has /, ? or # in its password: write / as %2F, ? as %3F and # as %23")
        if self.scheme == "s3" and re.search(r":[0-9]+$|^localhost$|amazonaws\.com", place):
            raise ValueError("names a server, not a bucket: write s3://BUCKET?endpoint=https://HOST:PORT&region=REGION")
        try:
            hosts = [f"//{host}" for host in place.rpartition("@")[2].split(",")]
            for text in hosts if self.may_have_hosts else [self.text]:
                _ = urlsplit(text).port
        except ValueError:  # it may quote a part of a password
            raise ValueError("needs a valid host and port") from None
        options = parse_qs(urlsplit(self.text).query)
        endpoints = [*options.get("endpoint", ()), *options.get("endpoint_url", ())]
        if self.scheme == "s3" and not all(re.match("https?://", each, re.IGNORECASE) for each in endpoints):
            raise ValueError("must have a whole endpoint, such as endpoint=http://HOST:PORT")
        if self.scheme in ("s3", "gs", "az") and "&" in self.text.partition("?")[0]:
            raise ValueError(f"has & where its options begin: write {self.scheme}://NAME?endpoint=URL&region=REGION")
        is_redis = self.store_kind == "redis" and self.scheme != "unix" and not self.scheme.endswith("sentinel")
        if is_redis and not re.fullmatch("/?[0-9]*/?", path):
            raise ValueError("must have a number as the database, such as /0; use remote_prefix for a name")

    @property
    def warning(self) -> str:
        """Why the URL, although valid, will probably not work, and how to write it; empty if nothing looks wrong."""
        parts = urlsplit(self.text)
        named = parts.path.strip("/") or "service_name=" in self.text or os.environ.get(_SERVICE_VARIABLE)
        if self.scheme.endswith("sentinel") and not named:
            return f"names no service: write /SERVICE after the URL's hosts, or set {_SERVICE_VARIABLE} for the server"
        endpoints = parse_qs(parts.query).get("endpoint", []) if self.scheme == "s3" else []
        if any(urlsplit(each).path.strip("/") == parts.netloc for each in endpoints):
            return "has the bucket in the endpoint, too: remove the path of the endpoint"
        if self.scheme == "s3" and "." in parts.netloc and "endpoint" not in parts.query:
            return "names a bucket with a dot: if it is a server, write s3://BUCKET?endpoint=https://HOST&region=REGION"
        return ""

    @property
    def store_kind(self) -> str:
        """The kind of store, such as `redis` or `objects`, which is its name in logs and statistics."""
        return SCHEMES.get(self.scheme, self.scheme.rpartition(":")[2].lower())

    @property
    def place(self) -> str:
        """The function or class that opens the URL. The form is `package.module:name`.

        Raises ConfigError for an unknown scheme.
        """
        if self.scheme in SCHEMES:
            return f"lmkv.backends.remote.{self.store_kind}:open_url"
        if plugins.is_place(self.scheme):
            return self.scheme
        found = plugins.installed(plugins.BACKENDS).get(self.scheme)
        if found is None:
            raise ConfigError(f"{self}: unknown scheme; known are: {', '.join(schemes())}")
        return found


def urls(value: object) -> tuple[RemoteURL, ...]:
    """Return the URLs in a value: a list of URLs, or a text of URLs with blanks or commas between them."""
    check_template(value)
    texts = () if is_nothing(value) else split_urls(value) if isinstance(value, str) else value
    if not isinstance(texts, list | tuple) or not all(isinstance(text, str | RemoteURL) for text in texts):
        raise ValueError("must be a URL, or a list of them")
    found = [text if isinstance(text, RemoteURL) else RemoteURL(text) for text in texts if text]
    for url in found:
        check_template(url.text)
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
