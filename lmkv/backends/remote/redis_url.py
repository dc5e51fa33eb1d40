"""`RedisURL`: what a URL of Redis or Valkey says, checked at the start, and the client that it means."""

from __future__ import annotations

import os
import re
import socket
import sys
from typing import Any, NoReturn
from urllib.parse import parse_qs, unquote, urlsplit

from redis import ConnectionPool, Redis, RedisCluster, UsernamePasswordCredentialProvider, exceptions
from redis.backoff import ExponentialWithJitterBackoff
from redis.cluster import REDIS_ALLOWED_KEYS
from redis.connection import parse_url
from redis.retry import Retry
from redis.sentinel import Sentinel, SentinelConnectionPool

from lmkv.backends.remote.base import split_url
from lmkv.backends.remote.options import RemoteOptions
from lmkv.backends.remote.redis_answers import Answers, Cluster, SentinelAnswers
from lmkv.errors import ConfigError, mask_secrets

_PLAIN = {"valkey": "redis", "valkeys": "rediss"}
_SENTINEL_PORT = 26379
_SERVICE_VARIABLE = "REDIS_SERVICE_NAME"
"""Where LMCache has the name of the service, which its URLs do not have."""
_FILES = ("ssl_ca_certs", "ssl_certfile", "ssl_keyfile")
_TLS = {*_FILES, "ssl_ca_data", "ssl_ca_path", "ssl_cert_reqs", "ssl_check_hostname", "ssl_ciphers", "ssl_min_version"}
_TLS |= {"ssl_password", "ssl_include_verify_flags", "ssl_exclude_verify_flags"}
_OPTIONS = {"client_name", "db", "health_check_interval", "max_connections", "password", "socket_connect_timeout"}
_OPTIONS |= {"socket_keepalive", "socket_read_size", "socket_timeout", "username", *_TLS}
_SENTINEL_OPTIONS = {"service_name", "sentinel_username", "sentinel_password"}
"""Options that may be chosen: others of redis-py fail only in use, as texts, or would change names or answers."""
_LONGEST = 1e6


class RedisURL:
    """The connections that a URL and the settings of a backend describe.

    Raises ConfigError for what cannot work, whatever the server says. `max_connections`: at a time.
    """

    def __init__(self, url: str, options: RemoteOptions) -> None:
        self._shown = mask_secrets(url)
        scheme, _, rest = url.partition("://")
        plain, _, kind = scheme.lower().replace("-", "+").partition("+")
        self.is_cluster, self._is_secure = kind == "cluster", plain in ("rediss", "valkeys")
        self._service, self._sentinels = "", list[tuple[str, int]]()
        self._clients: list[Redis] = []
        if kind == "sentinel":
            rest = self._read_sentinels(rest)
        read = f"{_PLAIN.get(plain, plain)}://{rest}"
        parts = split_url(read)
        self._node = f"{parts.scheme}://{parts.netloc.rpartition('@')[2]}"
        given = parse_qs(parts.query)
        allowed = _OPTIONS & {*REDIS_ALLOWED_KEYS} if self.is_cluster else _OPTIONS
        if refused := given.keys() - allowed - (_SENTINEL_OPTIONS if kind == "sentinel" else set()):
            self._refuse(f"{', '.join(sorted(refused))} cannot be chosen; there are {', '.join(sorted(allowed))}")
        for name in _FILES:
            if any(not os.path.isfile(path) for path in given.get(name, ())):
                self._refuse(f"{name} names no file")
        if any(not os.path.isdir(path) for path in given.get("ssl_ca_path", ())):
            # OpenSSL takes one that is not there.
            self._refuse("ssl_ca_path names no folder")
        if parts.scheme != "unix" and not re.fullmatch("/?[0-9]*", parts.path):
            self._refuse("its database must be a number")
        self.retry = Retry(ExponentialWithJitterBackoff(base=0.01, cap=0.1), 1, (exceptions.ConnectionError,))
        self._settings: dict[str, Any] = {
            "socket_timeout": options.timeout,
            "socket_connect_timeout": options.timeout,
            "retry": self.retry,
            "protocol": 2,
            "parser_class": Answers,
            **({"username": options.username} if options.username else {}),
            **({"password": options.password} if options.password else {}),
        }
        try:
            found = parse_url(read)
            self._of_sentinels = {name: found.pop(name, None) for name in _SENTINEL_OPTIONS}
            self._settings |= found
            self.max_connections = int(self._settings.pop("max_connections", sys.maxsize))
            self._check_values()
            if options.renew_password and "password" not in found:
                self._settings.pop("password", None)
                self._settings["credential_provider"] = _Renewed(options, self._settings.pop("username", None))
            # Connects to nothing, but checks all options; a cluster's client would not.
            pool = self._pool()
            connection: Any = pool.connection_class(**pool.connection_kwargs)
            if self._is_secure:
                with socket.socket() as unconnected:
                    connection._wrap_socket_with_ssl(unconnected).close()
        except (ValueError, TypeError, AttributeError, OSError, OverflowError, exceptions.RedisError) as error:
            self._refuse(str(error))
        if self.is_cluster and self._settings.get("db"):
            self._refuse("a cluster has database 0 only")

    def _refuse(self, reason: str) -> NoReturn:
        raise ConfigError(f"{self._shown}: {reason}") from None

    def _read_sentinels(self, rest: str) -> str:
        """Note the hosts and the service; the rest of a URL with the first host alone, and without the service."""
        place = re.split("[/?#]", rest, maxsplit=1)[0]
        user, at, hosts = place.rpartition("@")
        try:
            found = [urlsplit(f"//{host}") for host in hosts.split(",")]
            self._sentinels = [(each.hostname or "localhost", each.port or _SENTINEL_PORT) for each in found]
        except ValueError:
            self._refuse("one of its hosts or ports is invalid; in a password / is %2F, ? is %3F, # is %23")
        path, mark, query = rest[len(place) :].partition("?")
        service, _, database = path.strip("/").partition("/")
        named = [unquote(service), *parse_qs(query).get("service_name", []), os.environ.get(_SERVICE_VARIABLE, "")]
        self._service = next(filter(None, named), "")
        if not self._service:
            self._refuse(f"name the service of the sentinels: {self._shown.partition('?')[0].rstrip('/')}/mymaster")
        return f"{user}{at}{hosts.split(',')[0]}/{database}{mark}{query}"

    def _check_values(self) -> None:
        settings = self._settings
        for name in ("socket_timeout", "socket_connect_timeout"):
            if not 0 < settings[name] < _LONGEST:
                self._refuse(f"{name} must be above 0")
        if self.max_connections < 1:
            self._refuse("max_connections must be 1 at least")
        if settings.get("db", 0) < 0:
            self._refuse("its database must be a number")
        if not re.fullmatch("[!-~]*", settings.get("client_name", "")):
            self._refuse("client_name must be ASCII without blanks")
        if "ssl_keyfile" in settings or "ssl_certfile" in settings:
            # Without one OpenSSL asks the terminal for the password of an encrypted key.
            settings.setdefault("ssl_password", "")

    # -- clients ----------------------------------------------------------------------------------------------

    def client(self) -> Redis | RedisCluster:
        """A client; that of a cluster asks for the cluster's nodes, the others connect later."""
        if not self.is_cluster:
            return Redis.from_pool(self._pool())
        own = ("host", "port", "connection_class", "parser_class")
        settings = {name: value for name, value in self._settings.items() if name not in own}
        return Cluster.from_url(self._node, **settings)

    def _pool(self) -> ConnectionPool:
        if not self._service:
            return ConnectionPool(**self._settings)
        own = ("host", "port", "connection_class")
        settings = {name: value for name, value in self._settings.items() if name not in own}
        return SentinelConnectionPool(self._service, self._sentinel(), ssl=self._is_secure, **settings)

    def _sentinel(self) -> Sentinel:
        kept = {"retry", "protocol", "connection_class", "socket_keepalive", *_TLS}
        settings = {name: value for name, value in self._settings.items() if name in kept}
        # One that does not answer leaves time for the others.
        share = self._settings["socket_timeout"] / (len(self._sentinels) + 1)
        settings |= {"socket_timeout": share, "socket_connect_timeout": share, "parser_class": SentinelAnswers}
        user, password = (self._of_sentinels[f"sentinel_{name}"] for name in ("username", "password"))
        if password:
            # Not as settings, which the error of redis-py 7 shows.
            settings["credential_provider"] = UsernamePasswordCredentialProvider(user, password)
        sentinel = Sentinel([])
        pools = (ConnectionPool(host=host, port=port, **settings) for host, port in self._sentinels)
        self._clients = sentinel.sentinels = [Redis.from_pool(pool) for pool in pools]
        return sentinel

    def close(self) -> None:
        """Let go of the connections to sentinels."""
        for client in self._clients:
            client.close()


class _Renewed:
    """Gives redis-py the credentials, with the password that the file has now."""

    def __init__(self, options: RemoteOptions, username: str | None) -> None:
        self._options, self._username = options, username

    def get_credentials(self) -> tuple[str] | tuple[str, str]:
        password = self._options.password_now() or ""
        return (self._username, password) if self._username else (password,)
