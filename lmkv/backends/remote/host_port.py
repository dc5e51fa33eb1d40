"""`HostPortBackend`: base of stores at a host and a port, without users, passwords and expiry."""

from __future__ import annotations

import logging
from abc import abstractmethod
from collections.abc import Mapping
from typing import Any, ClassVar
from urllib.parse import parse_qs

from lmkv.backends.remote.base import RemoteBackend, split_url
from lmkv.backends.remote.options import DEFAULTS, RemoteOptions
from lmkv.errors import ConfigError

logger = logging.getLogger(__name__)


class HostPortBackend(RemoteBackend):
    """A store at a host and a port. A subclass names the options of its URL and talks to the store."""

    known: ClassVar[Mapping[str, type[str] | type[int]]]
    """Options that the URL's query may have, with their types."""

    def __init__(self, url: str, namespace: bytes, options: RemoteOptions = DEFAULTS) -> None:
        super().__init__(url, namespace, options)
        self._set_up(self._parse_url(url))
        ignored = [name for name in ("username", "password", "ttl") if getattr(options, name)]
        if ignored:
            logger.warning("lmkv: %s ignores %s, which it does not support", self._safe_url, ", ".join(ignored))

    def _parse_url(self, url: str) -> dict[str, Any]:
        """Host, port and options of the query."""
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
        """Prepare for calls with the options of the URL, without connecting."""

    def _is_unavailable(self, error: Exception) -> bool:
        return isinstance(error, OSError)
