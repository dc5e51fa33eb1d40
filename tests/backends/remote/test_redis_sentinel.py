"""Sentinels over real servers: they say which server is the master, and it changes."""

from __future__ import annotations

import socket
import threading
import time
from collections.abc import Iterator
from contextlib import ExitStack, closing, contextmanager, suppress
from functools import partial
from pathlib import Path

import pytest

pytest.importorskip("redis")

from attrs import frozen
from redis import Redis
from redis.exceptions import ResponseError

from lmkv.backends.remote.base import RemoteOptions
from lmkv.backends.remote.redis import RedisBackend
from lmkv.errors import BackendUnavailable, ConfigError
from lmkv.protocols import Chunk, ReadStatus, WriteStatus
from lmkv.testing.backend_suite import chunk_of, listed, read_back, sizes_of, statuses
from tests.backends.remote.hostile import Endpoint, of_redis
from tests.kit import LIMIT, eventually
from tests.servers import PROGRAMS, RedisServer, Server, free_port, missing, redis_server

NAMESPACE = bytes(range(32))
SERVICE = "mymaster"
AGAIN = 5.0
"""Seconds from a promotion until chunks are written and read again, at most."""


@pytest.fixture(params=("valkey", "redis"))
def kind(request: pytest.FixtureRequest) -> str:
    if PROGRAMS[request.param]() is None:
        missing(request.param, "see tests/servers.py")
    return str(request.param)


@frozen
class Service:
    """A master, its replica, and those that watch them."""

    master: RedisServer
    replica: RedisServer
    sentinels: list[Server]

    @property
    def url(self) -> str:
        return f"redis+sentinel://{','.join(f'127.0.0.1:{each.port}' for each in self.sentinels)}/{SERVICE}"


@contextmanager
def service(kind: str, folder: Path, sentinels: int, *options: str) -> Iterator[Service]:
    with (
        redis_server(kind, folder) as master,
        redis_server(kind, folder, "--replicaof", "127.0.0.1", str(master.port)) as replica,
        ExitStack() as stack,
    ):
        quorum = sentinels // 2 + 1
        made = (sentinel(kind, folder, master, quorum, *options) for _ in range(sentinels))
        watching = [stack.enter_context(each) for each in made]
        for each in watching:
            with Redis(port=each.port) as client:
                eventually(partial(knows, client, sentinels - 1), "each knows the others and the replica")
        yield Service(master, replica, watching)


@contextmanager
def sentinel(kind: str, folder: Path, master: RedisServer, quorum: int, *options: str) -> Iterator[Server]:
    port = free_port()
    file = folder / f"sentinel-{port}.conf"
    lines = [
        f"port {port}",
        "bind 127.0.0.1",
        f"dir {folder}",
        f"sentinel monitor {SERVICE} 127.0.0.1 {master.port} {quorum}",
    ]
    lines += [f"sentinel down-after-milliseconds {SERVICE} 300", f"sentinel failover-timeout {SERVICE} 2000", *options]
    file.write_text("\n".join(lines))
    server = Server(folder, port, [str(PROGRAMS[kind]()), file, "--sentinel"])
    try:
        yield server
    finally:
        server.kill()


def knows(client: Redis, others: int) -> bool:
    """Whether a sentinel knows a replica, and as many other sentinels."""
    state = client.execute_command("SENTINEL MASTER", SERVICE)
    return bool(state["num-slaves"] == 1 and state["num-other-sentinels"] == others)


def promotes(client: Redis) -> bool:
    """Whether a sentinel has another master take over now."""
    with suppress(ResponseError):
        return bool(client.execute_command("SENTINEL FAILOVER", SERVICE))
    return False


def backend_of(url: str, timeout: float = LIMIT) -> RedisBackend:
    return RedisBackend(url, NAMESPACE, RemoteOptions(timeout=timeout))


def test_a_chunk_is_stored_and_found_at_the_master(kind: str, tmp_path: Path) -> None:
    with (
        redis_server(kind, tmp_path, "--requirepass", "s3cret") as master,
        Redis(port=master.port, password="s3cret", db=2) as client,
        sentinel(kind, tmp_path, master, 1, "requirepass sesame", f"sentinel auth-pass {SERVICE} s3cret") as watching,
    ):
        hosts = f"127.0.0.1:{free_port()},127.0.0.1:{watching.port}"
        query = "sentinel_password=sesame&client_name=lmkv-1&max_connections=2"
        for url in (
            f"redis+sentinel://:s3cret@{hosts}/{SERVICE}/2?{query}",
            f"redis-sentinel://:s3cret@{hosts}/?service_name={SERVICE}&db=2&{query}",
            f"valkey+sentinel://{hosts}/{SERVICE}?db=2&password=s3cret&{query}",
        ):
            client.flushall()
            with closing(backend_of(url)) as backend:
                chunks = [chunk_of(size) for size in (100, 3 << 20)]
                assert statuses(backend, chunks) == [WriteStatus.STORED] * 2
                assert [read_back(backend, chunk) for chunk in chunks] == [chunk.payload for chunk in chunks]
                assert listed(backend) == sizes_of(backend, chunks)
                assert client.exists(*(backend.name_of(chunk.key) for chunk in chunks)) == 2
        for url in (f"redis+sentinel://:s3cret@{hosts}/{SERVICE}", f"redis+sentinel://:s3cret@{hosts}/other?{query}"):
            with closing(backend_of(url, timeout=2.0)) as backend, pytest.raises(BackendUnavailable) as refused:
                backend.contains([chunks[0].key])
            assert "sesame" not in repr(refused.value)


def test_a_service_without_a_name_is_that_of_the_environment_or_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    for url in ("redis-sentinel://one:26379,two:26379", "redis+sentinel://one?client_name=a", "redis+sentinel://one/"):
        monkeypatch.delenv("REDIS_SERVICE_NAME", raising=False)
        with pytest.raises(ConfigError, match=r"add the name of the service: redis.sentinel://one.*/mymaster"):
            RedisBackend(url, NAMESPACE)
        monkeypatch.setenv("REDIS_SERVICE_NAME", "main")
        RedisBackend(url, NAMESPACE).close()


def test_sentinels_are_no_place_for_a_password_that_is_not_encoded() -> None:
    for url in ("redis+sentinel://:hun/ter2@one,two/main", "redis+sentinel://me:hun?ter2@one:1/main"):
        with pytest.raises(ConfigError, match="host or port is invalid") as refused:
            RedisBackend(url, NAMESPACE)
        assert "ter2" not in str(refused.value)


def test_a_sentinel_that_does_not_answer_leaves_time_for_the_others(kind: str, tmp_path: Path) -> None:
    with (
        redis_server(kind, tmp_path) as master,
        socket.create_server(("127.0.0.1", 0)) as deaf,
        sentinel(kind, tmp_path, master, 1) as watching,
    ):
        url = f"redis+sentinel://127.0.0.1:{deaf.getsockname()[1]},127.0.0.1:{watching.port}/{SERVICE}"
        with closing(backend_of(url, timeout=2.0)) as backend:
            chunk = chunk_of(100)
            assert backend.write(chunk).status is WriteStatus.STORED
            assert read_back(backend, chunk) == chunk.payload


@pytest.mark.parametrize(
    "answer",
    [
        b"-ERR unknown command 'SENTINEL'\r\n",
        b"-NOPERM no permissions\r\n",
        b"HTTP/1.1 400 Bad Request\r\n\r\n",
        b":1\r\n",
        b"*1\r\n*2\r\n$4\r\nname\r\n$8\r\nmymaster\r\n",
        b"*1\r\n*4\r\n$4\r\nname\r\n$8\r\nmymaster\r\n$5\r\nflags\r\n$6\r\nmaster\r\n",
    ],
)
def test_after_a_sentinel_that_is_none_the_next_one_is_asked(kind: str, tmp_path: Path, answer: bytes) -> None:
    with (
        redis_server(kind, tmp_path) as master,
        Endpoint(of_redis(answer)) as other,
        sentinel(kind, tmp_path, master, 1) as watching,
    ):
        url = f"redis+sentinel://127.0.0.1:{other.port},127.0.0.1:{watching.port}/{SERVICE}"
        with closing(backend_of(url)) as backend:
            chunk = chunk_of(100)
            assert backend.write(chunk).status is WriteStatus.STORED
            assert read_back(backend, chunk) == chunk.payload


def test_a_master_that_became_a_replica_is_left(kind: str, tmp_path: Path) -> None:
    with service(kind, tmp_path, 1) as found, closing(backend_of(found.url)) as backend:
        assert backend.write(chunk_of(100)).status is WriteStatus.STORED
        with Redis(port=found.sentinels[0].port) as watching, Redis(port=found.replica.port) as new:
            eventually(lambda: promotes(watching), "the replica is known to be good")
            eventually(lambda: new.role()[0] == b"master")
            with Redis(port=found.master.port) as old:
                # A sentinel tells it after some ten seconds; until then it takes writes.
                old.replicaof("127.0.0.1", found.replica.port)
            started, chunk = time.monotonic(), chunk_of(100)
            eventually(lambda: backend.write(chunk).status is WriteStatus.STORED)
            assert time.monotonic() - started < AGAIN
            assert new.exists(backend.name_of(chunk.key))


def is_read(backend: RedisBackend, chunk: Chunk, into: memoryview) -> bool:
    return backend.read(chunk.key, into).status is ReadStatus.HIT


@pytest.mark.nightly("remotes")
@pytest.mark.parametrize("sentinels", [1, 3])
def test_chunks_are_served_again_after_the_master_was_killed(kind: str, tmp_path: Path, sentinels: int) -> None:
    with (
        service(kind, tmp_path, sentinels) as found,
        closing(backend_of(found.url, timeout=1.0)) as backend,
        Redis(port=found.replica.port) as new,
    ):
        chunks = [chunk_of(1 << 20) for _ in range(4)]
        assert statuses(backend, chunks) == [WriteStatus.STORED] * 4
        eventually(lambda: new.exists(*(backend.name_of(chunk.key) for chunk in chunks)) == 4, "all is replicated")
        stop, wrong = threading.Event(), list[object]()

        def work(number: int) -> None:
            chunk = chunks[number]
            while not stop.is_set():
                into = memoryview(bytearray(len(chunk.payload)))
                read, written = backend.read(chunk.key, into), backend.write(chunk_of(1000))
                if read.status is ReadStatus.HIT and into != chunk.payload:
                    wrong.append(read)
                wrong.extend(
                    each for each in (read.error, written.error) if each and not isinstance(each, BackendUnavailable)
                )

        workers = [threading.Thread(target=work, args=(number,)) for number in range(4)]
        for worker in workers:
            worker.start()
        found.master.kill()
        eventually(lambda: new.role()[0] == b"master")
        started, chunk = time.monotonic(), chunk_of(100)
        eventually(lambda: backend.write(chunk).status in (WriteStatus.STORED, WriteStatus.PRESENT))
        into = memoryview(bytearray(1 << 20))
        for each in chunks:
            eventually(partial(is_read, backend, each, into))
            assert into == each.payload
        assert time.monotonic() - started < AGAIN
        stop.set()
        for worker in workers:
            worker.join()
        assert wrong == []
        assert set(listed(backend)) >= {each.key for each in chunks}
