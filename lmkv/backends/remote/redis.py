"""`RedisBackend`: chunks as values of Redis or Valkey, one server or a cluster.

redis-py connects, authenticates, routes and retries. The bytes of a value bypass its parser: they go from the caller's
memory to the socket and from the socket into the caller's memory.
"""

from __future__ import annotations

import os
import re
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, TypeVar, cast
from urllib.parse import parse_qs

from lmkv.backends.remote.base import MIN_BYTES_PER_SECOND, RemoteBackend, batches, split_url
from lmkv.backends.remote.options import DEFAULTS, RemoteOptions
from lmkv.chunks.codec import FormatError
from lmkv.chunks.hashing import KEY_BYTES
from lmkv.errors import ConfigError, outside, short_repr
from lmkv.outcomes import PRESENT, STORED, Written
from lmkv.protocols import Chunk, ChunkKey, Listed

try:
    from redis import Redis, RedisCluster, exceptions
    from redis.backoff import ExponentialWithJitterBackoff
    from redis.cluster import ClusterNode
    from redis.retry import Retry

    from lmkv.backends.remote.redis_answers import Answers, Cluster, within
except ImportError as error:
    raise ConfigError("Redis and Valkey need redis-py: pip install 'lmkv[redis]'") from error

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
_FILES = {"ssl_ca_certs", "ssl_certfile", "ssl_keyfile"}
_FIXED = {"protocol", "decode_responses", "encoding"}
"""Options of redis-py that would change names or answers."""
_BATCH_NAMES = 1000
"""Names in one round trip."""
_PIECE = 1 << 20
"""Bytes that are sent before the time is looked at again."""
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
        given = parse_qs(parts.query)
        if fixed := _FIXED & given.keys():
            raise ConfigError(f"{self._safe_url}: {', '.join(sorted(fixed))} cannot be chosen")
        for name in _FILES & given.keys():
            if any(os.path.exists(path) and not os.path.isfile(path) for path in given[name]):
                raise ConfigError(f"{self._safe_url}: {name} names no file")
        self._is_cluster = parts.scheme.endswith("cluster")
        self._expiry = [b"EX", str(options.ttl).encode()] if options.ttl else []
        backoff = ExponentialWithJitterBackoff(base=0.01, cap=0.1)
        self._retry = Retry(backoff, 1, supported_errors=(exceptions.ConnectionError,))
        self._client_options: dict[str, Any] = {
            "socket_timeout": options.timeout,
            "socket_connect_timeout": options.timeout,
            "retry": self._retry,
            "protocol": 2,
            "parser_class": Answers,
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
        return self._listing(self._list())

    def _list(self) -> Iterator[list[Listed]]:
        # The store may have other names below this prefix.
        of_chunk = re.compile(rf"{re.escape(self._root)}/[0-9a-f]{{{2 * KEY_BYTES}}}")
        for found in self._scan():
            names = [name for each in found if of_chunk.fullmatch(name := each.decode("utf-8", "replace"))]
            for batch in batches(names, _BATCH_NAMES) if names else [()]:
                yield self._sized(batch)

    def _scan(self) -> Iterator[list[bytes]]:
        client: Any = self._connected()
        pattern = f"{_escaped(self._root)}/*"
        for node in client.get_primaries() if self._is_cluster else [None]:
            target = {} if node is None else {"target_nodes": node}
            cursor: Any = 0
            seen = set()
            while True:
                with within(self.options.timeout):
                    cursor, found = client.scan(cursor, pattern, _BATCH_NAMES, **target)
                yield found
                if node is not None:
                    (cursor,) = cursor.values()
                if not cursor:
                    break
                if cursor in seen:
                    raise exceptions.InvalidResponse("a listing that comes to the same place again")
                seen.add(cursor)

    def _sized(self, names: Sequence[str]) -> list[Listed]:
        sizes = self._for_each(names, lambda pipeline, name: pipeline.strlen(name))
        # SCAN may give a name twice; a value that is no string gives an error instead of a length.
        known = {name: size for name, size in zip(names, sizes, strict=True) if isinstance(size, int) and size}
        return [Listed(bytes.fromhex(name[-2 * KEY_BYTES :]), size) for name, size in known.items()]

    # -- requests to the store --------------------------------------------------------------------------------

    def _exist(self, names: Sequence[str]) -> list[bool]:
        answers = self._for_each(names, lambda pipeline, name: pipeline.exists(name))
        return [_number(answer) > 0 for answer in answers]

    def _remove(self, names: Sequence[str]) -> None:
        for answer in self._for_each(names, lambda pipeline, name: pipeline.unlink(name)):
            _number(answer)

    def _for_each(self, names: Sequence[str], command: Callable[[Any, str], object]) -> list[Any]:
        """The answer or error of one command for each name."""
        answers: list[Any] = []
        for batch in batches(names, _BATCH_NAMES):
            client: Any = self._connected()
            pipeline = client.pipeline() if self._is_cluster else client.pipeline(transaction=False)
            with within(self.options.timeout), pipeline:
                for name in batch:
                    command(pipeline, name)
                answers += pipeline.execute(raise_on_error=False)
        return answers

    def _get(self, key: ChunkKey, name: str, into: memoryview) -> bool:
        slow = len(into) / MIN_BYTES_PER_SECOND

        def get(connection: Any) -> bool:
            connection.send_command("GET", name)
            answers: Answers = connection._parser
            nbytes = answers.length()
            if nbytes is not None:
                with within(self.options.timeout + slow):
                    self.codec.receive(key, nbytes, answers.fill, into)
                    answers.end()
            return nbytes is not None

        def routed() -> bool:
            try:
                return self._routed(name, get)
            except exceptions.ResponseError as error:
                if str(error).startswith("WRONGTYPE"):
                    raise FormatError(str(error)) from error
                raise

        found: bool = self._retry.call_with_retry(routed, lambda error: None)
        return found

    def _put(self, name: str, chunk: Chunk) -> Written:
        seconds = self.options.timeout + len(chunk.payload) / MIN_BYTES_PER_SECOND

        def exists(connection: Any) -> bool:
            connection.send_command("EXISTS", name)
            return _number(connection.read_response()) > 0

        def put(connection: Any) -> Written:
            connection.send_packed_command(_in_time(command, time.monotonic() + seconds))
            with within(self.options.timeout):
                return STORED if connection.read_response() else PRESENT

        try:
            # Look it up first, so that an existing value is not sent.
            if self._routed(name, exists):
                return PRESENT
            command = self._set_command(name.encode(), self.codec.header_of(chunk), chunk.payload)
            return self._routed(name, put)
        except exceptions.OutOfMemoryError as error:
            return Written.rejected(outside(str(error)))

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
                self._client = Cluster.from_url(self._url, **self._client_options)
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
                with within(self.options.timeout):
                    return self._with_connection(pool, work, asking)
            except exceptions.AskError as error:
                if not self._is_cluster:
                    raise
                # MovedError derives from AskError.
                asking = not isinstance(error, exceptions.MovedError)
                pool = self._redirected(cast(RedisCluster, client), error)
            except (exceptions.ConnectionError, exceptions.TimeoutError):
                if isinstance(client, RedisCluster):
                    # A replica may have replaced the node.
                    pool.disconnect(inuse_connections=False)
                    with within(self.options.timeout):
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


def _number(answer: Any) -> int:
    """An answer that must be a number. Raises the error that it is, and InvalidResponse."""
    if isinstance(answer, Exception):
        raise answer
    if not isinstance(answer, int):
        raise exceptions.InvalidResponse(f"{short_repr(answer)} is no number")
    return answer


def _in_time(pieces: Iterable[bytes | memoryview], deadline: float) -> Iterator[bytes | memoryview]:
    for piece in pieces:
        if time.monotonic() > deadline:
            raise exceptions.TimeoutError("the value is taken too slowly")
        yield piece


def _escaped(text: str) -> str:
    """A pattern of Redis that matches exactly this text."""
    return "".join(f"\\{char}" if char in "*?[]\\^-" else char for char in text)
