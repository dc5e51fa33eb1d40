"""`RemoteOptions`: the settings that every remote backend takes besides its URL and its namespace."""

from __future__ import annotations

from collections.abc import Callable

from attrs import field, frozen


@frozen(kw_only=True)
class RemoteOptions:
    """Settings of a remote backend. A store that cannot honour one of them refuses it, or warns that it ignores it.

    Parameters
    ----------
    username, password
        Credentials for a URL that has none.
    renew_password
        Reads the password again from where it came, if that may change; a store that is refused asks `password_now`.
    prefix
        Every name in the store begins with it, as access rules may demand.
    ttl
        Seconds after which the store drops a value that was not written again; None: as it evicts.
    timeout
        Seconds to wait for a connection or an answer. A value has a second more for each 16 MiB.
    chunk_tokens
        Most token ids that a value records.
    name
        Name of the tier in logs and statistics; by default that of the backend's module.
    authentication_key
        32 random bytes or more. Only values that were written with the same key are served.

    Notes
    -----
    Immutable, so any number of threads may share it. The password and the key are not in its repr.

    Examples
    --------
    >>> RemoteOptions(password="secret", timeout=5.0).timeout
    5.0
    """

    username: str | None = None
    password: str | None = field(default=None, repr=False)
    renew_password: Callable[[], str | None] | None = field(default=None, repr=False)
    prefix: str = "lmkv:"
    ttl: int | None = None
    timeout: float = 1.0
    chunk_tokens: int = 512
    name: str = ""
    authentication_key: bytes | None = field(default=None, repr=False)

    def password_now(self) -> str | None:
        """The password, read again where it may have changed; the one of the start as long as that fails."""
        try:
            return self.renew_password() if self.renew_password else self.password
        except (OSError, ValueError):
            return self.password


DEFAULTS = RemoteOptions()
