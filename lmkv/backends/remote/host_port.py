"""`HostPortBackend`: a store at a host and a port, which has no users, no passwords and no expiry."""

from __future__ import annotations

import logging
from abc import abstractmethod
from collections.abc import Mapping
from typing import Any, ClassVar
from urllib.parse import parse_qs

from lmkv.backends.remote.base import RemoteBackend, split_url
from lmkv.errors import ConfigError, mask_secrets

logger = logging.getLogger(__name__)


class HostPortBackend(RemoteBackend):
    """A store by its host and port. A subclass says which options its URL may have, and speaks with it."""

    known: ClassVar[Mapping[str, type[str] | type[int]]]
    """Options in the URL's query."""

    def __init__(
        self,
        url: str,
        namespace: bytes,
        *,
        username: str | None = None,
        password: str | None = None,
        prefix: str = "lmkv:",
        ttl: int | None = None,
        timeout: float = 1.0,
        chunk_tokens: int = 512,
        name: str = "",
        authentication_key: bytes | None = None,
    ) -> None:
        super().__init__(
            namespace,
            prefix=prefix,
            chunk_tokens=chunk_tokens,
            name=name or type(self).__module__.rpartition(".")[2],
            authentication_key=authentication_key,
        )
        self._safe_url = mask_secrets(url)
        self._timeout = timeout
        self._set_up(self._options(url))
        ignored = [what for what, value in (("user", username), ("password", password), ("ttl", ttl)) if value]
        if ignored:
            logger.warning("lmkv: %s has no %s: what is given is not used", self._safe_url, ", ".join(ignored))

    def __repr__(self) -> str:
        return f"<{type(self).__name__} {self.name!r}: {self._safe_url}>"

    def _options(self, url: str) -> dict[str, Any]:
        """Host, port and what the query has."""
        parts = split_url(url)
        given = {key: values[-1] for key, values in parse_qs(parts.query, keep_blank_values=True).items()}
        if unknown := sorted(given.keys() - self.known.keys()):
            raise ConfigError(
                f"{self._safe_url}: unknown option {unknown[0]!r}; there are: {', '.join(sorted(self.known))}"
            )
        try:
            options: dict[str, Any] = {key: self.known[key](value) for key, value in given.items()}
        except ValueError as error:
            raise ConfigError(f"{self._safe_url}: {error}") from None
        if not (parts.hostname and parts.port):
            raise ConfigError(f"{self._safe_url} must have a host and a port: {parts.scheme}://host:port/")
        return {"host": parts.hostname, "port": parts.port, **options}

    @abstractmethod
    def _set_up(self, options: dict[str, Any]) -> None:
        """Make ready for calls, with the options of the URL. Nothing is connected."""

    def _is_unavailable(self, error: Exception) -> bool:
        return isinstance(error, OSError)
