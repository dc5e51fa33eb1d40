"""The client of Redis or Valkey: `RedisURL` checks a URL, and `Answers` parses answers with limits of time and bytes.

The limits protect lmkv if the program at the server's address is not Redis. redis-py's own parsers allocate any
announced size, and hiredis holds the GIL while it parses. `Answers` parses only the bytes that have arrived, and lets
other threads run in between.
"""

from __future__ import annotations

import os
import re
import socket
import sys
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from itertools import starmap
from ssl import SSLWantReadError
from typing import Any, NoReturn
from urllib.parse import parse_qs, unquote, urlsplit
from weakref import WeakSet

from attrs import define
from redis import ConnectionPool, Redis, RedisCluster, UsernamePasswordCredentialProvider, exceptions
from redis._parsers import _RESP2Parser
from redis.backoff import ExponentialWithJitterBackoff
from redis.cluster import REDIS_ALLOWED_KEYS, ClusterNode
from redis.connection import parse_url
from redis.retry import Retry
from redis.sentinel import Sentinel, SentinelConnectionPool

from lmkv.backends.remote.base import RemoteOptions, split_url
from lmkv.errors import ConfigError, mask_secrets

_MAX_LINE_BYTES = 4096
_MAX_BYTES = 16 << 20
_MAX_PARTS = 1 << 19
"""Largest number of bytes, and of items, in all answers to a call. The slots of a cluster need most."""
_MAX_DEPTH = 8
_READ_BYTES = 1 << 16
_LATE = "the server did not answer in time (remote_timeout)"
_SLOTS = 1 << 14
MAX_NODES = 1024
"""Largest number of nodes of a cluster. Redis advises against more than a thousand."""


@define
class _Budget:
    """Limits of the answers to one call: a deadline, and how many bytes and items may still arrive.

    Values that are read into the caller's memory do not count.
    """

    deadline: float
    nbytes: int = _MAX_BYTES
    parts: int = _MAX_PARTS

    def spend(self, nbytes: int, parts: int = 0) -> None:
        self.nbytes -= nbytes
        self.parts -= parts
        if self.nbytes < 0 or self.parts < 0:
            raise exceptions.InvalidResponse(f"the answer has more than {_MAX_BYTES:,} bytes or {_MAX_PARTS:,} items")


class _Limit(threading.local):
    budget: _Budget | None = None


_limit = _Limit()


@contextmanager
def within(seconds: float) -> Iterator[None]:
    """Limit the answers that this thread reads in a `with` block.

    All answers together must arrive within `seconds`, and must not have too many bytes or items.
    """
    before, _limit.budget = _limit.budget, _Budget(time.monotonic() + seconds)
    try:
        yield
    finally:
        _limit.budget = before


class Answers:
    """A parser for redis-py, which reads the answers on one connection. For one thread at a time."""

    EXCEPTION_CLASSES = _RESP2Parser.EXCEPTION_CLASSES
    parse_error = _RESP2Parser.parse_error

    def __init__(self, socket_read_size: int) -> None:
        self._buffer = None  # redis-py looks for its own
        self._sock: socket.socket | None = None
        self._host = ""
        self._ahead = bytearray()
        self._timeout = 0.0
        self._budget = _Budget(0.0)

    def on_connect(self, connection: Any) -> None:
        self._sock, self._timeout = connection._sock, connection.socket_timeout
        self._host = getattr(connection, "host", "")
        self._ahead.clear()

    def on_disconnect(self) -> None:
        self._sock = None
        self._ahead.clear()

    def can_read(self, timeout: float = 0) -> bool:
        """Return whether bytes have arrived that no request has asked for. Raises ConnectionError if the connection is
        closed.
        """
        if not self._ahead and self._sock is not None:
            self._sock.settimeout(timeout)
            try:
                with suppress(TimeoutError, BlockingIOError, SSLWantReadError):
                    self._ahead += self._sock.recv(_READ_BYTES) or _closed()
            finally:
                self._sock.settimeout(self._timeout)
        return bool(self._ahead)

    def read_response(self, disable_decoding: bool = False, **_: Any) -> Any:
        """Return the next answer: bytes, a number, None, an error, or a list of answers."""
        with self._bounded():
            return self._answer(_MAX_DEPTH)

    def _answer(self, depth: int) -> Any:
        kind, text = self._line()
        if kind == b"+":
            return text
        if kind == b"-":
            error = self._error(text)
            if isinstance(error, exceptions.ConnectionError):
                raise error
            return error
        number = _number(text)
        if kind == b":":
            return number
        if number == -1 and kind in (b"$", b"*"):
            return None
        if kind == b"$" and number >= 0:
            self._budget.spend(number)
            value = bytearray(number + 2)
            self._fill(memoryview(value))
            return bytes(value[:-2])
        if kind == b"*" and number >= 0 and depth:
            self._budget.spend(0, number)
            return [self._answer(depth - 1) for _ in range(number)]
        raise exceptions.InvalidResponse(f"the server does not answer as Redis does: {bytes(kind + text[:40])!r}")

    def _error(self, text: bytes) -> Any:
        error: Any = self.parse_error(text.decode("utf-8", "replace"))
        if isinstance(error, exceptions.AskError):
            # A redirection without a host is one to another port of this one.
            error.host = error.host or self._host
        return error

    def length(self) -> int | None:
        """Read the length of a value. Returns the length in bytes, or None if there is no value. `fill` then reads the
        value.

        If the server answers with an error, the error is raised.
        """
        with self._bounded():
            kind, text = self._line()
        if kind == b"-":
            raise self._error(text)
        number = _number(text)
        if kind != b"$" or number < -1:
            raise exceptions.InvalidResponse(f"the server answered {bytes(kind + text[:40])!r} instead of a value")
        return None if number == -1 else number

    def fill(self, view: memoryview) -> None:
        """Fill `view` with the next bytes of a value."""
        with self._bounded():
            self._fill(view)

    def end(self) -> None:
        """Read the line break after a value."""
        self.fill(memoryview(bytearray(2)))

    # -- bytes ------------------------------------------------------------------------------------------------

    def _line(self) -> tuple[bytes, bytes]:
        """Return the first character of the next line, and the rest of the line."""
        while (end := self._ahead.find(b"\r\n", 0, _MAX_LINE_BYTES)) < 0:
            if len(self._ahead) >= _MAX_LINE_BYTES:
                raise exceptions.InvalidResponse("the answer has no line end: the server may not be Redis")
            room = bytearray(_READ_BYTES)
            self._ahead += room[: self._receive(memoryview(room))]
        self._budget.spend(end + 2)
        line = bytes(self._ahead[:end])
        del self._ahead[: end + 2]
        return line[:1], line[1:]

    def _fill(self, view: memoryview) -> None:
        known = min(len(self._ahead), len(view))
        view[:known] = self._ahead[:known]
        del self._ahead[:known]
        view = view[known:]
        while len(view):
            view = view[self._receive(view) :]

    def _receive(self, view: memoryview) -> int:
        if self._sock is None:
            raise exceptions.ConnectionError("lmkv has closed this connection")
        if (left := self._budget.deadline - time.monotonic()) <= 0:
            raise exceptions.TimeoutError(_LATE)
        self._sock.settimeout(left)
        try:
            received = self._sock.recv_into(view)
        except TimeoutError:
            raise exceptions.TimeoutError(_LATE) from None
        return received or _closed()

    @contextmanager
    def _bounded(self) -> Iterator[None]:
        self._budget = _limit.budget or _Budget(time.monotonic() + self._timeout)
        try:
            yield
        finally:
            if self._sock is not None:
                self._sock.settimeout(self._timeout)


class SentinelAnswers(Answers):
    """A parser for the answers of a sentinel. The connection's timeout limits each answer."""

    def read_response(self, disable_decoding: bool = False, **_: Any) -> Any:
        with within(self._timeout):
            return super().read_response()


class OneSentinel(Redis):
    """A client of one sentinel, which raises each failure as ConnectionError. redis-py then asks the next sentinel."""

    def sentinel_masters(self) -> dict[str, dict[str, Any]]:
        try:
            masters: Any = super().sentinel_masters()
            return {name: state for name, state in masters.items() if state.keys() >= _ADDRESS}
        except Exception as error:
            raise exceptions.ConnectionError(f"{type(error).__name__}: {error}") from error


class NodeAnswers(Answers):
    """A parser for the answers of a cluster's node.

    The parser rejects impossible slot ranges and too many nodes, because redis-py creates a client for each node in an
    answer.
    """

    def read_response(self, disable_decoding: bool = False, **_: Any) -> Any:
        answer = super().read_response()
        if isinstance(answer, list):
            _check_slots(answer)
        return answer


def _check_slots(answer: Sequence[Any]) -> None:
    """Raise InvalidResponse if `answer` contains slot ranges that no cluster can have, or too many nodes."""
    slots, nodes = 0, set[str]()
    for each in answer:
        # As redis-py reads them: numbers may be texts. Other lists begin with other things.
        with suppress(ValueError, TypeError, IndexError):
            first, last = int(each[0]), int(each[1])
            nodes.update(str(node[:2]) for node in each[2:])
            slots += last - first + 1
            if not (0 <= first <= last < _SLOTS and slots <= _SLOTS and len(nodes) <= MAX_NODES):
                raise exceptions.InvalidResponse("the cluster's answer names impossible slots or too many nodes")


class Cluster(RedisCluster):
    """redis-py's client of a cluster, with lmkv's parser. `close` closes all connections.

    redis-py's own `close` leaves some connections open: those to former nodes, and those of a client that failed to
    start.
    """

    def __init__(self, **settings: Any) -> None:
        self._connections, self._noting = WeakSet[Any](), threading.Lock()
        try:
            super().__init__(**settings)
        except BaseException:
            self.close()
            raise

    def on_connect(self, connection: Any) -> None:
        with self._noting:
            self._connections.add(connection)
        connection.set_parser(NodeAnswers)
        super().on_connect(connection)

    def close(self) -> None:
        super().close()
        with self._noting:
            left = list(self._connections)
        for connection in left:
            connection.disconnect()


def _closed() -> NoReturn:
    raise exceptions.ConnectionError("the server closed the connection")


def _number(text: bytes) -> int:
    digits = text.removeprefix(b"-")
    if not (digits.isdigit() and len(digits) <= 19):
        raise exceptions.InvalidResponse(f"the server sent {text[:40]!r} instead of a number")
    return int(text)


# -- the URL ----------------------------------------------------------------------------------------------


_PLAIN = {"valkey": "redis", "valkeys": "rediss"}
_PORT, _SENTINEL_PORT = 6379, 26379
_ADDRESS = {"ip", "port"}
_SERVICE_VARIABLE = "REDIS_SERVICE_NAME"
"""The environment variable in which LMCache expects the name of the service, because LMCache's URLs do not contain the
name.
"""
_FILES = ("ssl_ca_certs", "ssl_certfile", "ssl_keyfile")
_TLS = {*_FILES, "ssl_ca_data", "ssl_ca_path", "ssl_cert_reqs", "ssl_check_hostname", "ssl_ciphers", "ssl_min_version"}
_TLS |= {"ssl_password", "ssl_include_verify_flags", "ssl_exclude_verify_flags"}
_OPTIONS = {"client_name", "db", "health_check_interval", "max_connections", "password", "socket_connect_timeout"}
_OPTIONS |= {"socket_keepalive", "socket_read_size", "socket_timeout", "username", *_TLS}
_SENTINEL_OPTIONS = {"service_name", "sentinel_username", "sentinel_password"}
"""The options of redis-py that a sentinel's URL may have in addition to those of other URLs."""
_LONGEST = 1e6
_NO_DATABASE = "the database must be a number, such as /0; use remote_prefix for a name"


class RedisURL:
    """A checked URL of a Redis server, cluster or sentinels, from which clients are created.

    Raises ConfigError for options that cannot work with any server. `max_connections`: largest number of connections.
    """

    def __init__(self, url: str, options: RemoteOptions) -> None:
        self._shown = mask_secrets(url)
        scheme, _, rest = url.partition("://")
        plain, _, kind = scheme.lower().replace("-", "+").partition("+")
        self.is_cluster, self._is_secure = kind == "cluster", plain in ("rediss", "valkeys")
        self._service, self._hosts = "", list[tuple[str, int]]()
        self._clients: list[Redis] = []
        if kind:
            rest = self._read_hosts(rest, _SENTINEL_PORT if kind == "sentinel" else _PORT)
        if kind == "sentinel":
            rest = self._read_service(rest)
        read = f"{_PLAIN.get(plain, plain)}://{rest}"
        parts = split_url(read)
        self._node = f"{parts.scheme}://{parts.netloc.rpartition('@')[2]}"
        given = parse_qs(parts.query)
        allowed = _OPTIONS & {*REDIS_ALLOWED_KEYS} if self.is_cluster else _OPTIONS
        if refused := given.keys() - allowed - (_SENTINEL_OPTIONS if kind == "sentinel" else set()):
            wrong, right = ", ".join(sorted(refused)), ", ".join(sorted(allowed))
            self._refuse(f"unsupported options: {wrong}; supported are {right}")
        for name in _FILES:
            if any(not os.path.isfile(path) for path in given.get(name, ())):
                self._refuse(f"{name} must be the path of a file")
        if any(not os.path.isdir(path) for path in given.get("ssl_ca_path", ())):
            # OpenSSL takes one that is not there.
            self._refuse("ssl_ca_path must be the path of a folder")
        if parts.scheme != "unix" and not re.fullmatch("/?[0-9]*", parts.path):
            self._refuse(_NO_DATABASE)
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
            self._refuse("a cluster has only database 0: leave out the database")

    def _refuse(self, reason: str) -> NoReturn:
        raise ConfigError(f"{self._shown}: {reason}") from None

    def _read_hosts(self, rest: str, port: int) -> str:
        """Store the hosts of a URL. Returns the rest of the URL with only the first host."""
        place = re.split("[/?#]", rest, maxsplit=1)[0]
        user, at, hosts = place.rpartition("@")
        try:
            found = [urlsplit(f"//{host}") for host in hosts.split(",")]
            self._hosts = [(each.hostname or "localhost", each.port or port) for each in found]
        except ValueError:
            self._refuse("a host or port is invalid; in a password write / as %2F, ? as %3F, # as %23")
        return f"{user}{at}{hosts.split(',')[0]}{rest[len(place) :]}"

    def _read_service(self, rest: str) -> str:
        """Store the name of the service that the sentinels watch. Returns the rest of the URL without this name."""
        place = re.split("[/?#]", rest, maxsplit=1)[0]
        path, mark, query = rest[len(place) :].partition("?")
        service, _, database = path.strip("/").partition("/")
        named = [unquote(service), *parse_qs(query).get("service_name", []), os.environ.get(_SERVICE_VARIABLE, "")]
        self._service = next(filter(None, named), "")
        if not self._service:
            self._refuse(f"add the name of the service: {self._shown.partition('?')[0].rstrip('/')}/mymaster")
        return f"{place}/{database}{mark}{query}"

    def _check_values(self) -> None:
        settings = self._settings
        for name in ("socket_timeout", "socket_connect_timeout"):
            if not 0 < settings[name] < _LONGEST:
                self._refuse(f"{name} must be more than 0 s and less than {_LONGEST:,.0f} s")
        if self.max_connections < 1:
            self._refuse("max_connections must be at least 1")
        if settings.get("db", 0) < 0:
            self._refuse(_NO_DATABASE)
        if not re.fullmatch("[!-~]*", settings.get("client_name", "")):
            self._refuse("client_name must be ASCII text without spaces")
        if "ssl_keyfile" in settings or "ssl_certfile" in settings:
            # Without one OpenSSL asks the terminal for the password of an encrypted key.
            settings.setdefault("ssl_password", "")

    # -- clients ----------------------------------------------------------------------------------------------

    def client(self) -> Redis | RedisCluster:
        """Return a new client. A cluster's client asks for the cluster's nodes now; other clients connect at the first
        call.
        """
        if not self.is_cluster:
            return Redis.from_pool(self._pool())
        own = ("host", "port", "db", "connection_class", "parser_class")
        settings = {name: value for name, value in self._settings.items() if name not in own}
        host = urlsplit(self._node).hostname or ""
        # One after the other is asked, within the time for all.
        settings["socket_connect_timeout"] /= len(self._hosts)
        # Nodes that name no host are at the one that was asked; redis-py would go to this machine.
        return Cluster.from_url(
            self._node,
            address_remap=lambda place: (place[0] or host, place[1]),
            startup_nodes=list(starmap(ClusterNode, self._hosts[1:])),
            **settings,
        )

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
        share = self._settings["socket_timeout"] / (len(self._hosts) + 1)
        settings |= {"socket_timeout": share, "socket_connect_timeout": share, "parser_class": SentinelAnswers}
        user, password = (self._of_sentinels[f"sentinel_{name}"] for name in ("username", "password"))
        if password:
            # Not as settings, which the error of redis-py 7 shows.
            settings["credential_provider"] = UsernamePasswordCredentialProvider(user, password)
        sentinel = Sentinel([])
        pools = (ConnectionPool(host=host, port=port, **settings) for host, port in self._hosts)
        self._clients = sentinel.sentinels = [OneSentinel.from_pool(pool) for pool in pools]
        return sentinel

    def close(self) -> None:
        """Close the connections to sentinels."""
        for client in self._clients:
            client.close()


class _Renewed:
    """A credential provider for redis-py, which reads the password from its file again for each new connection."""

    def __init__(self, options: RemoteOptions, username: str | None) -> None:
        self._options, self._username = options, username

    def get_credentials(self) -> tuple[str] | tuple[str, str]:
        password = self._options.password_now() or ""
        return (self._username, password) if self._username else (password,)
