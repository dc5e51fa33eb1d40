"""URLs and passwords of remote stores. No repr, log line or error message shows a password."""

from __future__ import annotations

import re
from typing import Final
from urllib.parse import urlsplit

from attrs import field, frozen

from lmkv import plugins
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
"""Scheme of a URL -> module of `lmkv.backends.remote` whose `open_url` takes it: lmkv's own."""


def split_urls(text: str) -> list[str]:
    """URLs with blanks or commas between them; that of sentinels may name several hosts, with commas, too."""
    found: list[str] = []
    for piece in filter(None, re.split(r"[\s,]+", text)):
        if found and "://" not in piece and RemoteURL(found[-1]).names_sentinels:
            found[-1] += f",{piece}"
        else:
            found.append(piece)
    return found


def schemes() -> list[str]:
    """Schemes that a URL may have: lmkv's own, and those of installed packages."""
    return [*SCHEMES, *(name for name in plugins.installed(plugins.BACKENDS) if name not in SCHEMES)]


@frozen
class Secret:
    """A password. `value` has it.

    >>> Secret("letmein")
    Secret(value='***')
    """

    value: str = field(repr=lambda value: "'***'")

    def __str__(self) -> str:
        return "***"


@frozen
class RemoteURL:
    """Where a remote store is. `text` has the whole URL, passwords included.

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
    def names_sentinels(self) -> bool:
        return self.scheme.endswith("sentinel")

    def check_hosts(self) -> None:
        """Raise ValueError for an invalid host or port; the error may quote a part of a password."""
        texts = [self.text]
        if self.names_sentinels:
            place = re.split("[/?#]", self.text.partition("://")[2], maxsplit=1)[0]
            texts = [f"//{host}" for host in place.rpartition("@")[2].split(",")]
        for text in texts:
            _ = urlsplit(text).port

    @property
    def store_kind(self) -> str:
        """Name of stores of this scheme in logs and statistics."""
        return SCHEMES.get(self.scheme, self.scheme.rpartition(":")[2].lower())

    @property
    def place(self) -> str:
        """The class that opens it, as `package.module:Class`. Raises ConfigError for an unknown scheme."""
        if self.scheme in SCHEMES:
            return f"lmkv.backends.remote.{self.store_kind}:open_url"
        if plugins.is_place(self.scheme):
            return self.scheme
        found = plugins.installed(plugins.BACKENDS).get(self.scheme)
        if found is None:
            raise ConfigError(f"{self}: unknown scheme; there are: {', '.join(schemes())}")
        return found
