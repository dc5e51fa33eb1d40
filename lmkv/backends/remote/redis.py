"""`RedisBackend`: stores chunks as values in Redis or Valkey, on one server or in a cluster.

The library redis-py connects, authenticates, routes and retries. The bytes of a value bypass redis-py's parser: they
are copied directly between the caller's memory and the socket.
"""

from __future__ import annotations

import re
import sys
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from typing import Any, TypeVar, cast

from lmkv.backends.remote.base import DEFAULTS, MIN_BYTES_PER_SECOND, RemoteBackend, RemoteOptions, batches
from lmkv.chunks.codec import FormatError
from lmkv.chunks.hashing import KEY_BYTES
from lmkv.errors import BackendError, ConfigError, how_to_install, outside, short_repr
from lmkv.protocols import PRESENT, STORED, Chunk, ChunkKey, Listed, Written

try:
    from redis import Redis, RedisCluster, exceptions
    from redis.cluster import ClusterNode

    from lmkv.backends.remote.redis_client import MAX_NODES, Answers, RedisURL, within
except ImportError as error:
    raise ConfigError(f"Redis and Valkey need redis-py: {how_to_install('redis')}") from error

T = TypeVar("T")

_BATCH_NAMES = 1000
"""Number of names in one round trip."""
_PIECE = 1 << 20
"""Number of bytes to send between two checks of the time."""
_REDIRECTIONS = 4
_NOT_YOU = (
    exceptions.ReadOnlyError,
    exceptions.MasterDownError,
    exceptions.BusyLoadingError,
    exceptions.AuthenticationError,
)
"""Errors after which the client connects again, because another server may have taken the address."""
_LAST_WORDS = 0.1
"""Seconds to wait for a server's last answer before it closed a connection."""
_TOO_LARGE = "invalid bulk length"
_REFUSED_SECONDS = 4.0
"""Seconds for which no value of a refused size is sent again. The limit may change, or another server may come."""


class RedisBackend(RemoteBackend):
    """Stores chunks on a Redis or Valkey server or cluster.

    Parameters
    ----------
    url
        `redis://[user[:password]@]host[:port][/db]`; `rediss://` for TLS; `unix:///path/to/socket`;
        `redis+cluster://host[:port][,host[:port]...]` or `rediss+cluster://` for a cluster, with the addresses of some
        nodes; or `redis+sentinel://host[:port][,host[:port]...]/service[/db]` for the master of a service that
        sentinels watch. `valkey` may replace `redis` in each of these forms. The query may have options of redis-py,
        such as `?ssl_ca_certs=/path/ca.pem`.
    namespace
        32 bytes: a digest of the model, layout and versions.
    options
        The settings of remote backends. redis-py repeats a failed command once if this is safe.

    Raises
    ------
    ConfigError
        redis-py does not understand the URL or one of its options.

    Notes
    -----
    Thread-safe: each call uses a connection from redis-py's pool. The backend connects at the first call. If a full
    server does not evict, a write returns REJECTED; set the server's policy `allkeys-lru`. No repr and no message shows
    a password.

    Examples
    --------
    >>> RedisBackend("redis://cache:secret@localhost:6379/0", namespace=bytes(32))
    <RedisBackend 'redis': redis://cache:***@localhost:6379/0>
    """

    def __init__(self, url: str, namespace: bytes, options: RemoteOptions = DEFAULTS) -> None:
        super().__init__(url, namespace, options)
        self._place = place = RedisURL(url, options)
        self._is_cluster, self._retry = place.is_cluster, place.retry
        self._expiry = [b"EX", str(options.ttl).encode()] if options.ttl else []
        self._connecting = threading.Lock()
        self._client: Redis | RedisCluster | None = None
        self._turns = _Turns(place.max_connections, options.timeout)
        self._sizes: dict[ChunkKey, int] = {}
        self._too_large, self._too_large_until = sys.maxsize, 0.0

    def list_keys(self) -> Iterator[list[Listed]]:
        """Yield the chunks of this namespace in batches, in no particular order. Raises `BackendError`."""
        return self._listing(self._list())

    def memory_policy(self) -> tuple[int, str]:
        """Return the server's memory limit in bytes (0: no limit), and the name of its eviction policy.

        Returns `(0, "")` for a cluster. Raises an error of redis-py.
        """
        client: Any = self._connected()
        with within(self.options.timeout):
            found = {} if self._is_cluster else client.info("memory")
        return int(found.get("maxmemory", 0)), str(found.get("maxmemory_policy", ""))

    def _list(self) -> Iterator[list[Listed]]:
        # The store may have other names below this prefix.
        of_chunk = re.compile(rf"{re.escape(self._root)}/[0-9a-f]{{{2 * KEY_BYTES}}}")
        before, self._sizes = self._sizes, {}
        try:
            for found in self._scan():
                names = [name for each in found if of_chunk.fullmatch(name := each.decode("utf-8", "replace"))]
                for batch in batches(names, _BATCH_NAMES) if names else [()]:
                    yield self._sized(batch, before)
            before = {}
        finally:
            # An interrupted listing has not seen all.
            self._sizes |= before

    def _scan(self) -> Iterator[list[bytes]]:
        client: Any = self._connected()
        pattern = re.sub(r"([*?\[\]\\^-])", r"\\\1", self._root) + "/*"
        for node in client.get_primaries() if self._is_cluster else [None]:
            target = {} if node is None else {"target_nodes": node}
            cursor: Any = 0
            seen = set()
            while True:
                with self._turns.turn(), within(self.options.timeout):
                    cursor, found = client.scan(cursor, pattern, _BATCH_NAMES, **target)
                yield found
                if node is not None:
                    (cursor,) = cursor.values()
                if not cursor:
                    break
                if cursor in seen:
                    raise exceptions.InvalidResponse("the server's listing (SCAN) repeats itself")
                seen.add(cursor)

    def _sized(self, names: Sequence[str], known: dict[ChunkKey, int]) -> list[Listed]:
        """Return the chunks of the values `names`, with the lengths of the values.

        Lengths in `known` are not requested, because a request counts as a use.
        """
        # SCAN may give a name twice.
        names_of = {bytes.fromhex(name[-2 * KEY_BYTES :]): name for name in names}
        sizes = {key: known.get(key) or self._sizes.get(key, 0) for key in names_of}
        new = [key for key, size in sizes.items() if not size]
        if new:
            # A value that is no string gives an error instead of a length.
            wanted = [names_of[key] for key in new]
            answers = self._for_each(wanted, lambda pipeline, name: pipeline.strlen(name), untouched=True)
            sizes |= {key: size if isinstance(size, int) else 0 for key, size in zip(new, answers, strict=True)}
        found = {key: size for key, size in sizes.items() if size}
        self._sizes |= found
        return [Listed(key, size) for key, size in found.items()]

    # -- requests to the store --------------------------------------------------------------------------------

    def _exist(self, names: Sequence[str]) -> list[bool]:
        answers = self._for_each(names, lambda pipeline, name: pipeline.exists(name))
        return [_number(answer) > 0 for answer in answers]

    def _remove(self, names: Sequence[str]) -> None:
        for answer in self._for_each(names, lambda pipeline, name: pipeline.unlink(name)):
            _number(answer)
        for name in names:
            self._sizes.pop(bytes.fromhex(name[-2 * KEY_BYTES :]), None)

    def _for_each(
        self, names: Sequence[str], command: Callable[[Any, str], object], *, untouched: bool = False
    ) -> list[Any]:
        """Send one command for each name, and return the answers, which may be errors.

        `untouched`: whether the commands should not count as uses of the values. Not every server supports this.
        """
        answers: list[Any] = []
        switches = untouched and not self._is_cluster
        for batch in batches(names, _BATCH_NAMES):
            client: Any = self._connected()
            pipeline = client.pipeline() if self._is_cluster else client.pipeline(transaction=False)
            with self._turns.turn(), within(self.options.timeout), pipeline:
                # Servers before Redis 7.2 answer with an error.
                if switches:
                    pipeline.execute_command("CLIENT NO-TOUCH", "ON")
                for name in batch:
                    command(pipeline, name)
                if switches:
                    pipeline.execute_command("CLIENT NO-TOUCH", "OFF")
                found = pipeline.execute(raise_on_error=False)
            answers += found[1:-1] if switches else found
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
                return self._routed(name, get, slow)
            except exceptions.ResponseError as error:
                if str(error).startswith("WRONGTYPE"):
                    raise FormatError(str(error)) from error
                raise

        found: bool = self._retry.call_with_retry(routed, lambda error: None)
        return found

    def _put(self, name: str, chunk: Chunk) -> Written:
        nbytes = self.stored_bytes(len(chunk.payload))
        slow = nbytes / MIN_BYTES_PER_SECOND
        if nbytes >= self._too_large and time.monotonic() < self._too_large_until:
            return self._refused("the server refused a value of this size before")

        def exists(connection: Any) -> bool:
            connection.send_command("EXISTS", name)
            return _number(connection.read_response()) > 0

        def put(connection: Any) -> Written:
            _send(connection, _in_time(command, time.monotonic() + self.options.timeout + slow))
            with within(self.options.timeout):
                return STORED if connection.read_response() else PRESENT

        try:
            # Look it up first, so that an existing value is not sent.
            if self._routed(name, exists):
                return PRESENT
            command = self._set_command(name.encode(), self.codec.header_of(chunk), chunk.payload)
            written = self._routed(name, put, slow)
        except exceptions.OutOfMemoryError as error:
            told = "the server is full: raise its maxmemory, or set its maxmemory-policy to allkeys-lru"
            return Written.rejected(f"{outside(str(error))} {told}")
        except exceptions.ResponseError as error:
            if _TOO_LARGE not in str(error):
                raise
            self._too_large, self._too_large_until = nbytes, time.monotonic() + _REFUSED_SECONDS
            return self._refused(str(error))
        self._sizes[chunk.key] = nbytes
        return written

    def _refused(self, reason: str) -> Written:
        what = f"lmkv sends no value of {self._too_large:,} bytes or more for {_REFUSED_SECONDS:.0f} s"
        text = f"{outside(reason)}: {what}; raise the server's proto-max-bulk-len"
        # No deletion helps.
        return Written.rejected(text, None)

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
                self._client = self._place.client()
            return self._client

    def _disconnect(self) -> None:
        with self._connecting:
            client, self._client = self._client, None
        if client is not None:
            client.close()
        self._place.close()

    def _translated(self, error: BaseException, action: str, key: ChunkKey = b"") -> BackendError:
        if isinstance(error, _NOT_YOU):
            for pool in self._pools(self._client):
                # So that the next call asks again where the address leads to.
                pool.disconnect(inuse_connections=False)
        return super()._translated(error, action, key)

    def _pools(self, client: Redis | RedisCluster | None) -> list[Any]:
        """Return the connection pools of a client, one for each server."""
        if isinstance(client, RedisCluster):
            return [self._pool_at(client, node) for node in client.get_nodes()]
        return [] if client is None else [client.connection_pool]

    def _routed(self, name: str, work: Callable[[Any], T], slow: float = 0.0) -> T:
        """Return the result of `work(connection)`, with a connection to the server that stores the value `name`.

        Follows redirections in a cluster. `work` sends one command, because a redirection by ASKING is valid for one
        command. `slow`: seconds that the transfer of the value may take in addition to the timeout.
        """
        with self._turns.turn(self.options.timeout + slow):
            return self._follow(self._connected(), name, work)

    def _follow(self, client: Redis | RedisCluster, name: str, work: Callable[[Any], T]) -> T:
        node = client.get_node_from_key(name) if isinstance(client, RedisCluster) else None
        pool, asking = self._pool_at(client, node), False
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
        raise exceptions.ClusterDownError(f"the cluster redirected the request for {name} {_REDIRECTIONS} times")

    def _redirected(self, client: RedisCluster, error: Any) -> Any:
        manager: Any = client.nodes_manager
        if len(manager.nodes_cache) > MAX_NODES:
            # The redirections are nonsense.
            manager.initialize()
        if isinstance(error, exceptions.MovedError):
            # Older versions of redis-py have the second method.
            (getattr(manager, "move_slot", None) or manager.update_moved_exception)(error)
        # The target may be a node that the client does not know yet.
        node = ClusterNode(error.host, error.port)
        return self._pool_at(client, manager.nodes_cache.setdefault(node.name, node))

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


class _Turns:
    """Limits the number of concurrent calls to `most`. A call that waits fails if no other call ends in `patience`
    seconds.
    """

    def __init__(self, most: int, patience: float) -> None:
        self._free, self._patience = most, patience
        self._changed = threading.Condition()

    @contextmanager
    def turn(self, seconds: float = 0.0) -> Iterator[None]:
        """Run a `with` block as one of the calls.

        `seconds`: how long the block may take. If this is longer than the patience, the patience of all calls becomes
        longer.
        """
        with self._changed:
            self._patience = max(self._patience, seconds)
            while not self._free:
                if not self._changed.wait(self._patience):
                    raise exceptions.TimeoutError(f"no connection became free within {self._patience:.1f} s")
            self._free -= 1
        try:
            yield
        finally:
            with self._changed:
                self._free += 1
                self._changed.notify_all()


def _send(connection: Any, pieces: Iterable[bytes | memoryview]) -> None:
    """Send a value in pieces. If the server closes the connection, the error that the server sent last is raised."""
    connection.check_health()
    try:
        for piece in pieces:
            connection._sock.sendall(piece)
    except OSError as error:
        answer = None if isinstance(error, TimeoutError) else _last_words(connection)
        connection.disconnect()
        raise answer or exceptions.ConnectionError(f"the connection failed while lmkv sent a value: {error}") from error


def _last_words(connection: Any) -> Exception | None:
    """Return the error that the server sent before it closed the connection, or None if the server sent no error."""
    with suppress(OSError, exceptions.RedisError), within(_LAST_WORDS):
        answer = connection._parser.read_response()
        return answer if isinstance(answer, exceptions.ResponseError) else None
    return None


def _number(answer: Any) -> int:
    """Return an answer that is a number. Raises an answer that is an error, and InvalidResponse for any other
    answer.
    """
    if isinstance(answer, Exception):
        raise answer
    if not isinstance(answer, int):
        raise exceptions.InvalidResponse(f"the server answered {short_repr(answer)} instead of a number")
    return answer


def _in_time(pieces: Iterable[bytes | memoryview], deadline: float) -> Iterator[bytes | memoryview]:
    for piece in pieces:
        if time.monotonic() > deadline:
            raise exceptions.TimeoutError("the server accepts the value too slowly")
        yield piece
