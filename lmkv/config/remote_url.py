"""Where remote stores are, and the passwords to them, which no repr, log line or error message shows."""

from __future__ import annotations

from typing import Final

from attrs import field, frozen

from lmkv.errors import masked

SCHEMES: Final = {
    **dict.fromkeys(("redis", "rediss", "unix", "valkey", "valkeys"), "redis"),
    **dict.fromkeys(("redis+cluster", "rediss+cluster", "redis-cluster"), "redis"),
    **dict.fromkeys(("valkey+cluster", "valkeys+cluster"), "redis"),
    **dict.fromkeys(("s3", "gs", "az", "file"), "objects"),
    **dict.fromkeys(("mooncake", "mooncakestore"), "mooncake"),
    "infinistore": "infinistore",
}
"""Scheme of a URL -> module of `lmkv.backends.remote` whose `open_url` takes it."""


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

    text: str = field(repr=lambda text: repr(masked(text)))

    def __str__(self) -> str:
        return masked(self.text)

    @property
    def scheme(self) -> str:
        return self.text.partition("://")[0].lower()
