"""`RedisBackend`: chunks as values of Redis or Valkey, one server or a cluster.

redis-py connects, authenticates, routes and retries. The bytes of a value bypass its parser: they go from the caller's
memory to the socket and from the socket into the caller's memory.
"""

from __future__ import annotations

import re
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING, Any, TypeVar, cast
from urllib.parse import parse_qs

from lmkv.backends.remote.base import MIN_BYTES_PER_SECOND, RemoteBackend, batches, split_url
from lmkv.backends.remote.options import DEFAULTS, RemoteOptions
from lmkv.chunks.codec import FormatError
from lmkv.chunks.hashing import KEY_BYTES
from lmkv.errors import ConfigError
from lmkv.outcomes import PRESENT, STORED, Written
from lmkv.protocols import Chunk, ChunkKey, Listed

try:
    from redis import Redis, RedisCluster, exceptions
    from redis.backoff import ExponentialWithJitterBackoff
    from redis.cluster import ClusterNode
    from redis.retry import Retry
except ImportError as error:
    raise ConfigError("Redis and Valkey need redis-py: pip install 'lmkv[redis]'") from error

if TYPE_CHECKING:
    import socket

T = TypeVar("T")

_SCHEMES = {
    "valkey": "redis",
    "valkeys": "rediss",
    "redis+cluster": "redis",
    "rediss+cluster": "rediss",
    "redis-cluster": "redis",
    "valkey+cluster": "redis",
    "valkeys+cluster": "rediss",
}
_FIXED = {"protocol", "decode_responses", "encoding"}
"""Options of redis-py that would change names or answers."""
_BATCH_NAMES = 1000
"""Names in one round trip."""
_MAX_LINE_BYTES = 1024
_PIECE = 1 << 20
"""Bytes that are sent with one deadline."""
_REDIRECTIONS = 4


class RedisBackend(RemoteBackend):
    """A Redis or Valkey server or cluster as a backend.

    Parameters
    ----------
    url
        `redis://[user[:password]@]host[:port][/db]`; `rediss://` with TLS; `unix:///path/to/socket`; `valkey://`
        and `valkeys://` alike; `redis+cluster://` and `rediss+cluster://` for a cluster, by any of its nodes;
        `valkey` in place of `redis`. Further options of redis-py in its query: `?ssl_ca_certs=/path/ca.pem`.
    namespace
        32 bytes: model, layout and versions whose KV is interchangeable.
    options
        The settings that all remote backends share. A command that is safe to repeat is repeated once.

    Raises
    ------
    ConfigError
        redis-py does not understand the URL or one of its options.

    Notes
    -----
    Nothing is connected before the first call. Any number of threads may call, each with a connection from redis-py's
    pool. A full server REJECTS a write unless it evicts: use the policy `allkeys-lru`. Passwords are in no repr and no
    message.

    Examples
    --------
    >>> RedisBackend("redis://cache:secret@localhost:6379/0", namespace=bytes(32))
    <RedisBackend 'redis': redis://cache:***@localhost:6379/0>
    """

    def __init__(self, url: str, namespace: bytes, options: RemoteOptions = DEFAULTS) -> None:
        super().__init__(url, namespace, options)
        parts = split_url(url)
        self._url = _SCHEMES.get(parts.scheme, parts.scheme) + url[len(parts.scheme) :]
        if fixed := _FIXED & parse_qs(parts.query).keys():
            raise ConfigError(f"{self._safe_url}: {', '.join(sorted(fixed))} cannot be chosen")
        self._is_cluster = parts.scheme.endswith("cluster")
        self._expiry = [b"EX", str(options.ttl).encode()] if options.ttl else []
        backoff = ExponentialWithJitterBackoff(base=0.01, cap=0.1)
        self._retry = Retry(backoff, 1, supported_errors=(exceptions.ConnectionError,))
        self._client_options: dict[str, Any] = {
            "socket_timeout": options.timeout,
            "socket_connect_timeout": options.timeout,
            "retry": self._retry,
            "protocol": 2,
            **({"username": options.username} if options.username and not parts.username else {}),
            **({"password": options.password} if options.password and not parts.password else {}),
        }
        self._connecting = threading.Lock()
        try:
            client = Redis.from_url(self._url, **self._client_options)
            pool = client.connection_pool
            # Connects to nothing, but checks all options; a cluster's client would not.
            pool.connection_class(**pool.connection_kwargs)
        except (ValueError, TypeError, AttributeError, exceptions.RedisError) as error:
            raise ConfigError(f"{self._safe_url}: {error}") from None
        if self._is_cluster and pool.connection_kwargs.get("db"):
            raise ConfigError(f"{self._safe_url}: a cluster has database 0 only")
        self._client: Redis | RedisCluster | None = None if self._is_cluster else client

    def list_keys(self) -> Iterator[list[Listed]]:
        """List the chunks of this namespace in batches, in no order."""
        self._check_open()
        try:
            yield from self._list()
        except Exception as error:
            raise self._translated(error, "list") from error

    def _list(self) -> Iterator[list[Listed]]:
        batch: list[str] = []
        # The store may have other names below this prefix.
        of_chunk = re.compile(rf"{re.escape(self._root)}/[0-9a-f]{{{2 * KEY_BYTES}}}")
        for found in self._connected().scan_iter(match=f"{_escaped(self._root)}/*", count=_BATCH_NAMES):
            if of_chunk.fullmatch(name := found.decode("utf-8", "replace")):
                batch.append(name)
            if len(batch) == _BATCH_NAMES:
                yield self._sized(batch)
                batch = []
        if batch:
            yield self._sized(batch)

    def _sized(self, names: Sequence[str]) -> list[Listed]:
        sizes = self._for_each(names, lambda pipeline, name: pipeline.strlen(name))
        # SCAN may give a name twice; a value that is no string gives an error instead of a length.
        known = {name: size for name, size in zip(names, sizes, strict=True) if isinstance(size, int) and size}
        return [Listed(bytes.fromhex(name[-2 * KEY_BYTES :]), size) for name, size in known.items()]

    # -- requests to the store --------------------------------------------------------------------------------

    def _exist(self, names: Sequence[str]) -> list[bool]:
        answers = self._for_each(names, lambda pipeline, name: pipeline.exists(name))
        for answer in answers:
            if isinstance(answer, Exception):
                raise answer
        return [bool(answer) for answer in answers]

    def _remove(self, names: Sequence[str]) -> None:
        for answer in self._for_each(names, lambda pipeline, name: pipeline.unlink(name)):
            if isinstance(answer, Exception):
                raise answer

    def _for_each(self, names: Sequence[str], command: Callable[[Any, str], object]) -> list[Any]:
        """The answer or error of one command for each name."""
        answers: list[Any] = []
        for batch in batches(names, _BATCH_NAMES):
            client: Any = self._connected()
            pipeline = client.pipeline() if self._is_cluster else client.pipeline(transaction=False)
            with pipeline:
                for name in batch:
                    command(pipeline, name)
                answers += pipeline.execute(raise_on_error=False)
        return answers

    def _get(self, key: ChunkKey, name: str, into: memoryview) -> bool:
        def get(connection: Any) -> bool:
            connection.send_command("GET", name)
            reply = _Reply(connection, self.options.timeout)
            nbytes = reply.length()
            if nbytes is not None:
                self.codec.receive(key, nbytes, reply.fill, into)
                reply.end()
            return nbytes is not None

        found: bool = self._retry.call_with_retry(lambda: self._routed(name, get), lambda error: None)
        return found

    def _put(self, name: str, chunk: Chunk) -> Written:
        def exists(connection: Any) -> bool:
            connection.send_command("EXISTS", name)
            return bool(connection.read_response())

        def put(connection: Any) -> Written:
            connection.send_packed_command(command)
            return STORED if connection.read_response() else PRESENT

        try:
            # Look it up first, so that an existing value is not sent.
            if self._routed(name, exists):
                return PRESENT
            command = self._set_command(name.encode(), self.codec.header_of(chunk), chunk.payload)
            return self._routed(name, put)
        except exceptions.OutOfMemoryError as error:
            return Written.rejected(str(error))

    def _set_command(self, name: bytes, header: memoryview, payload: memoryview) -> list[bytes | memoryview]:
        options = [b"NX", *self._expiry]
        start = b"*%d\r\n$3\r\nSET\r\n$%d\r\n%b\r\n$%d\r\n" % (
            3 + len(options),
            len(name),
            name,
            len(header) + len(payload),
        )
        end = b"\r\n" + b"".join(b"$%d\r\n%b\r\n" % (len(option), option) for option in options)
        pieces = (payload[at : at + _PIECE] for at in range(0, len(payload), _PIECE))
        return [start, header, *pieces, end]

    def _is_unavailable(self, error: Exception) -> bool:
        unreachable = (
            exceptions.ConnectionError,
            exceptions.TimeoutError,
            exceptions.ClusterDownError,
            exceptions.NoPermissionError,
            exceptions.ReadOnlyError,
            exceptions.RedisClusterException,
        )
        return isinstance(error, (*unreachable, OSError))

    # -- connections --------------------------------------------------------------------------------------

    def _connected(self) -> Redis | RedisCluster:
        # Made at the first call, because a cluster's client asks for its nodes when it is made.
        with self._connecting:
            if self._client is None:
                self._client = RedisCluster.from_url(self._url, **self._client_options)
            return self._client

    def _disconnect(self) -> None:
        with self._connecting:
            client, self._client = self._client, None
        if isinstance(client, RedisCluster):
            # Its own `close` leaves the connections to the garbage collector.
            for node in client.get_nodes():
                self._pool_at(client, node).disconnect()
        if client is not None:
            client.close()

    def _routed(self, name: str, work: Callable[[Any], T]) -> T:
        """Do `work` with a connection to the server that has the name; follows a cluster's redirections.

        `work` is one command, because ASKING holds for one only.
        """
        client = self._connected()
        pool, asking = self._pool_of(client, name), False
        for _ in range(_REDIRECTIONS):
            try:
                return self._with_connection(pool, work, asking)
            except exceptions.AskError as error:
                # MovedError derives from AskError.
                asking = not isinstance(error, exceptions.MovedError)
                pool = self._redirected(cast(RedisCluster, client), error)
            except (exceptions.ConnectionError, exceptions.TimeoutError):
                if isinstance(client, RedisCluster):
                    # A replica may have replaced the node.
                    pool.disconnect(inuse_connections=False)
                    client.nodes_manager.initialize()
                raise
        raise exceptions.ClusterDownError(f"{name} was redirected {_REDIRECTIONS} times")

    def _redirected(self, client: RedisCluster, error: Any) -> Any:
        manager: Any = client.nodes_manager
        if isinstance(error, exceptions.MovedError):
            # Older versions of redis-py have the second method.
            (getattr(manager, "move_slot", None) or manager.update_moved_exception)(error)
        # The target may be a node that the client does not know yet.
        node = ClusterNode(error.host, error.port)
        return self._pool_at(client, manager.nodes_cache.setdefault(node.name, node))

    def _pool_of(self, client: Redis | RedisCluster, name: str) -> Any:
        return self._pool_at(client, client.get_node_from_key(name) if isinstance(client, RedisCluster) else None)

    @staticmethod
    def _pool_at(client: Redis | RedisCluster, node: Any) -> Any:
        return (client.get_redis_connection(node) if isinstance(client, RedisCluster) else client).connection_pool

    @staticmethod
    def _with_connection(pool: Any, work: Callable[[Any], T], asking: bool) -> T:
        connection = pool.get_connection()
        try:
            if asking:
                connection.send_command("ASKING")
                connection.read_response()
            return work(connection)
        except exceptions.ResponseError:
            raise  # the answer was read to its end
        except BaseException:
            # The rest of an answer may still arrive on this connection.
            connection.disconnect()
            raise
        finally:
            pool.release(connection)


open_url = RedisBackend


class _Reply:
    """The answer to a GET, read directly from the socket: redis-py's parser buffers nothing between commands."""

    def __init__(self, connection: Any, timeout: float) -> None:
        self._connection = connection
        self._socket: socket.socket = connection._get_socket()
        self._deadline = time.monotonic() + timeout

    def length(self) -> int | None:
        """Length of the value; None when it does not exist. Raises the error that the server answers."""
        line = bytearray()
        while not line.endswith(b"\r\n"):
            # One byte at a time, because the bytes after the line belong to the value.
            byte = self._socket.recv(1)
            if not byte or len(line) > _MAX_LINE_BYTES:
                raise exceptions.ConnectionError("the connection was closed within an answer")
            line += byte
        kind, text = line[:1], line[1:-2].decode("utf-8", "replace")
        if kind == b"-":
            error = self._connection._parser.parse_error(text)
            raise FormatError(text) if text.startswith("WRONGTYPE") else error
        if kind != b"$":
            raise exceptions.InvalidResponse(f"{text!r} instead of a value")
        if text == "-1":
            return None
        self._deadline += int(text) / MIN_BYTES_PER_SECOND
        return int(text)

    def fill(self, view: memoryview) -> None:
        """Fill `view` with the next bytes."""
        while len(view):
            if time.monotonic() > self._deadline:
                raise exceptions.TimeoutError("the value took too long")
            received = self._socket.recv_into(view)
            if not received:
                raise exceptions.ConnectionError("the connection was closed within a value")
            view = view[received:]

    def end(self) -> None:
        """Read the line break after the value."""
        self.fill(memoryview(bytearray(2)))


def _escaped(text: str) -> str:
    """A pattern of Redis that matches exactly this text."""
    return "".join(f"\\{char}" if char in "*?[]\\^-" else char for char in text)
