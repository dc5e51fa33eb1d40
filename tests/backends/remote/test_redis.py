"""Redis and Valkey: the public suite over real servers, and what each can do to a chunk or to a connection."""

from __future__ import annotations

import logging
import subprocess
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, closing, contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("redis")

from redis import Redis

from lmkv.backends.remote.base import RemoteOptions
from lmkv.backends.remote.redis import RedisBackend
from lmkv.build import build_store
from lmkv.chunks.layout import KVLayout, LayerPages
from lmkv.chunks.namespace import Namespace
from lmkv.cli.stores import refusals, remedy
from lmkv.config import Config
from lmkv.errors import BackendUnavailable, ConfigError
from lmkv.protocols import Backend, Chunk, ReadStatus, WriteStatus
from lmkv.testing.backend_suite import (
    BackendSuite,
    chunk_of,
    in_threads,
    listed,
    new_key,
    read_back,
    sizes_of,
    statuses,
)
from tests.backends.remote.server_suite import (
    DAMAGES,
    assert_apart,
    assert_damage_fails,
    assert_fails_and_can_be_replaced,
    assert_unavailable,
)
from tests.kit import LIMIT, chain, eventually, every, get, lower, put, put_below, raised, small_store
from tests.servers import PROGRAMS, Proxy, RedisServer, any_kind, free_port, missing, redis_server

NAMESPACE = bytes(range(32))
KINDS = ("valkey", "redis")
FAIL_IN_USE = (
    *("credential_provider", "retry", "retry_on_error", "redis_connect_func", "driver_info", "command_packer"),
    *("event_dispatcher", "parser_class", "connection_class", "socket_type", "socket_keepalive_options", "host"),
    *("maint_notifications_config", "himport_registry", "cache", "cache_config", "ssl_ocsp_context"),
    "legacy_responses",
)
"""Options of redis-py that are no texts, or would change answers."""


@pytest.fixture(scope="module", params=KINDS)
def server(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[RedisServer]:
    with redis_server(request.param, tmp_path_factory.mktemp(request.param)) as server:
        yield server


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[list[RedisServer]]:
    with nodes_of_a_cluster(tmp_path_factory, 3) as servers:
        form_cluster(servers)
        yield servers


@contextmanager
def nodes_of_a_cluster(folders: pytest.TempPathFactory, count: int) -> Iterator[list[RedisServer]]:
    """Nodes that know nothing of each other yet."""
    with ExitStack() as stack:
        options = ("--cluster-enabled", "yes", "--cluster-node-timeout", f"{1000 * LIMIT:.0f}")
        yield [stack.enter_context(redis_server(any_kind(), folders.mktemp("cluster"), *options)) for _ in range(count)]


def form_cluster(servers: list[RedisServer]) -> None:
    nodes = [Redis(port=each.port) for each in servers]
    bounds = [0, 5461, 10922, 16384]
    for number, node in enumerate(nodes):
        node.execute_command("CLUSTER ADDSLOTSRANGE", bounds[number], bounds[number + 1] - 1)
        meet(node, servers[:number])
    for node in nodes:
        eventually(lambda node=node: "ok" in str(node.cluster("INFO")["cluster_state"]))  # type: ignore[misc]
        node.close()


def meet(node: Redis, others: list[RedisServer]) -> None:
    """Each of them: what a node hears only from another one it may hear half a minute later."""
    for other in others:
        node.execute_command("CLUSTER MEET", "127.0.0.1", other.port)


@contextmanager
def watching(look: Callable[[], int]) -> Iterator[list[int]]:
    """What was seen again and again meanwhile."""
    seen, stop = [look()], threading.Event()

    def watch() -> None:
        while not stop.is_set():
            seen.append(look())

    watcher = threading.Thread(target=watch)
    watcher.start()
    try:
        yield seen
    finally:
        stop.set()
        watcher.join()


def backend_of(url: str, **options: Any) -> RedisBackend:
    return RedisBackend(url, NAMESPACE, RemoteOptions(**{"timeout": LIMIT, **options}))


def emptied(url: str, **options: Any) -> RedisBackend:
    with Redis.from_url(url, **options) as client:
        client.flushall()
    return backend_of(url)


class TestRedisSuite(BackendSuite):
    @pytest.fixture(autouse=True)
    def _servers(self, server: RedisServer) -> None:
        self.server = server

    def make(self, folder: Path) -> Backend:
        if (folder / "used").exists():
            return backend_of(self.server.url)
        (folder / "used").touch()
        return emptied(self.server.url)


class TestUnixSocketSuite(TestRedisSuite):
    def make(self, folder: Path) -> Backend:
        super().make(folder).close()
        return backend_of(f"unix://{self.server.socket}")


class TestClusterSuite(BackendSuite):
    @pytest.fixture(autouse=True)
    def _servers(self, cluster: list[RedisServer]) -> None:
        self.cluster = cluster

    def make(self, folder: Path) -> Backend:
        if not (folder / "used").exists():
            (folder / "used").touch()
            for each in self.cluster:
                emptied(each.url).close()
        return backend_of(f"valkey+cluster://127.0.0.1:{self.cluster[0].port}")


# -- what is under a key ---------------------------------------------------------------------------------


@pytest.fixture
def backend(server: RedisServer) -> Iterator[RedisBackend]:
    backend = emptied(server.url)
    yield backend
    backend.close()


@pytest.fixture
def client(server: RedisServer) -> Iterator[Redis]:
    with Redis(port=server.port) as client:
        yield client


def test_a_value_that_is_not_the_chunk_fails_and_can_be_replaced(backend: RedisBackend, client: Redis) -> None:
    def get(chunk: Chunk) -> bytes:
        return bytes(client.get(backend.name_of(chunk.key)))  # type: ignore[arg-type]

    def put(chunk: Chunk, value: bytes) -> None:
        client.delete(backend.name_of(chunk.key))
        client.set(backend.name_of(chunk.key), value)

    assert_damage_fails(backend, get, put, DAMAGES)
    chunk, sound = chunk_of(9000), chunk_of(9000)
    assert statuses(backend, [chunk, sound]) == [WriteStatus.STORED] * 2
    client.delete(backend.name_of(chunk.key))
    client.rpush(backend.name_of(chunk.key), "one", "two")
    assert_fails_and_can_be_replaced(backend, chunk, sound)


def test_other_namespaces_and_prefixes_are_other_chunks(backend: RedisBackend, server: RedisServer) -> None:
    other_namespace = RedisBackend(server.url, bytes(32), RemoteOptions(timeout=LIMIT))
    prefixed, of_another_database = backend_of(server.url, prefix="team*[a]:"), backend_of(f"{server.url}/3")
    assert_apart(backend, [other_namespace, prefixed, of_another_database])


def test_names_that_are_not_of_a_chunk_are_not_listed(backend: RedisBackend, client: Redis) -> None:
    chunk = chunk_of(500)
    assert backend.write(chunk).status is WriteStatus.STORED
    blanks, digits = f"{'a' * 31} {'a' * 31} ", "\N{ARABIC-INDIC DIGIT ONE}" * 64
    for tail in ("z" * 64, blanks, "AB" * 32, "ab" * 33, f"{'ab' * 31}a\n", digits, "\udcff" * 64):
        name = backend.name_of(bytes(32))[:-64] + tail
        client.set(name.encode("utf-8", "surrogateescape"), b"somebody else's")
    assert listed(backend) == sizes_of(backend, [chunk])


def test_a_value_is_dropped_by_the_server_after_its_time(server: RedisServer, client: Redis) -> None:
    with closing(backend_of(server.url, ttl=1000)) as backend:
        chunk = chunk_of(100)
        backend.write(chunk)
        assert 990 <= int(client.ttl(backend.name_of(chunk.key))) <= 1000  # type: ignore[arg-type]


def test_what_is_there_is_not_sent_again(backend: RedisBackend, client: Redis) -> None:
    chunk = chunk_of(1 << 20)
    backend.write(chunk)
    before = client.info()["total_net_input_bytes"]  # type: ignore[index]
    assert backend.write(chunk).status is WriteStatus.PRESENT
    assert client.info()["total_net_input_bytes"] - before < 10_000  # type: ignore[index]


def test_a_full_server_rejects_and_one_that_evicts_takes_all(tmp_path: Path) -> None:
    for policy, last in (("noeviction", WriteStatus.REJECTED), ("allkeys-lru", WriteStatus.STORED)):
        full = ("--maxmemory", "10mb", "--maxmemory-policy", policy)
        with redis_server(any_kind(), tmp_path, *full) as server, closing(backend_of(server.url)) as backend:
            found = statuses(backend, [chunk_of(1 << 20) for _ in range(15)])
            assert (found[0], found[-1]) == (WriteStatus.STORED, last)


@pytest.mark.parametrize("policy", ["allkeys-lru", "allkeys-lfu"])
@pytest.mark.parametrize("kind", KINDS)
def test_engines_that_only_list_do_not_change_what_a_full_server_evicts(tmp_path: Path, kind: str, policy: str) -> None:
    exact = ("--maxmemory-policy", policy, "--maxmemory-samples", "64", "--lfu-log-factor", "0")
    with (
        redis_server(kind, tmp_path, *exact) as server,
        Redis(port=server.port) as client,
        closing(backend_of(server.url)) as user,
        ExitStack() as stack,
    ):
        idle = [stack.enter_context(closing(backend_of(server.url))) for _ in range(3)]
        chunks = [chunk_of(100_000) for _ in range(24)]
        statuses(user, chunks)
        client.set("clock", b"somebody else's")
        used = chunks[::4]

        rounds = 0
        while rounds < 100 if policy == "allkeys-lfu" else int(client.object("idletime", "clock")) < 3:
            rounds += 1
            for chunk in used:
                assert read_back(user, chunk) == chunk.payload
            for backend in idle:
                assert listed(backend) == sizes_of(user, chunks)
        room = used_memory = int(client.info()["used_memory"])
        while int(client.info()["evicted_keys"]) < 10:
            room -= 20_000
            assert room > used_memory // 4
            client.config_set("maxmemory", room)
        assert user.contains([chunk.key for chunk in used]) == [True] * 6


def test_a_new_engine_lists_chunks_without_using_them(tmp_path: Path) -> None:
    with redis_server("valkey", tmp_path) as server, Redis(port=server.port) as client:
        chunk = chunk_of(100)
        with closing(backend_of(server.url)) as backend:
            backend.write(chunk)
            name = backend.name_of(chunk.key)
        eventually(lambda: int(client.object("idletime", name)) >= 1)
        with closing(backend_of(server.url)) as new:
            assert listed(new) == sizes_of(new, [chunk])
            assert int(client.object("idletime", name)) >= 1
            assert read_back(new, chunk) == chunk.payload
            assert int(client.object("idletime", name)) == 0, "a read is a use"


def test_what_a_listing_says_is_what_is_there_now(backend: RedisBackend, client: Redis) -> None:
    """Lengths are remembered from one listing to the next, and no longer."""
    chunks = [chunk_of(1000) for _ in range(3)]
    statuses(backend, chunks)
    assert listed(backend) == sizes_of(backend, chunks)
    client.delete(backend.name_of(chunks[0].key))
    assert listed(backend) == sizes_of(backend, chunks[1:])
    client.set(backend.name_of(chunks[0].key), b"a short one")
    assert listed(backend)[chunks[0].key] == len(b"a short one")


@pytest.mark.parametrize("nbytes", [1 << 20, 3 << 20, 16 << 20])
def test_a_value_that_is_too_large_for_the_server_is_rejected_with_its_words(tmp_path: Path, nbytes: int) -> None:
    with redis_server(any_kind(), tmp_path, "--proto-max-bulk-len", "1mb") as server, Redis(port=server.port) as client:
        large, small = chunk_of(nbytes), chunk_of(500_000)
        for _ in range(5):
            with closing(backend_of(server.url)) as backend:
                written = backend.write(large)
                assert written.status is WriteStatus.REJECTED, written.error
                assert "invalid bulk length" in written.reason
                assert "proto-max-bulk-len" in written.reason
                before = client.info()["total_net_input_bytes"]
                again = [backend.write(chunk_of(nbytes)) for _ in range(10)]
                assert {each.status for each in again} == {WriteStatus.REJECTED}
                assert all("proto-max-bulk-len" in each.reason for each in again)
                assert client.info()["total_net_input_bytes"] - before < 1000, "nothing is sent"
                assert backend.write(small).status in (WriteStatus.STORED, WriteStatus.PRESENT)
                assert read_back(backend, small) == small.payload
        with closing(backend_of(server.url)) as backend:
            assert backend.write(large).status is WriteStatus.REJECTED
            client.config_set("proto-max-bulk-len", "512mb")
            eventually(lambda: backend.write(large).status is WriteStatus.STORED, "its limit may change")


@contextmanager
def behind_a_proxy(folder: Path) -> Iterator[tuple[RedisServer, Proxy, Callable[..., RedisBackend]]]:
    with redis_server(any_kind(), folder) as server, closing(Proxy(server.port)) as proxy:
        yield server, proxy, partial(backend_of, f"redis://127.0.0.1:{proxy.port}")


# -- connections -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("answer", ["READONLY", "MASTERDOWN"])
def test_connections_to_a_server_that_is_no_master_now_are_given_up(tmp_path: Path, answer: str) -> None:
    """Behind an address that leads to the new one, while the old one goes on."""
    stale = ("--replica-serve-stale-data", "no") if answer == "MASTERDOWN" else ()
    kind = any_kind()
    with redis_server(kind, tmp_path, *stale) as old, redis_server(kind, tmp_path) as new, Redis(port=old.port) as one:
        proxy = Proxy(old.port)
        with closing(backend_of(f"redis://127.0.0.1:{proxy.port}")) as backend:
            in_threads(4, lambda _: backend.write(chunk_of(1 << 20)))
            proxy.target = new.port
            one.replicaof("127.0.0.1", free_port() if answer == "MASTERDOWN" else new.port)
            failed = backend.write(chunk_of(100))
            assert isinstance(failed.error, BackendUnavailable)
            chunks = [chunk_of(100) for _ in range(8)]
            assert statuses(backend, chunks) == [WriteStatus.STORED] * 8
            with closing(backend_of(new.url)) as there:
                assert there.contains([chunk.key for chunk in chunks]) == [True] * 8
        proxy.close()


def test_calls_wait_for_a_connection_where_their_number_is_given(server: RedisServer, client: Redis) -> None:
    emptied(server.url).close()
    with closing(backend_of(f"{server.url}?max_connections=2&client_name=few")) as backend:
        chunks = [chunk_of(1 << 20) for _ in range(48)]

        def write(number: int) -> list[WriteStatus]:
            return statuses(backend, chunks[number::16])

        with watching(lambda: sum(each["name"] == "few" for each in client.client_list())) as seen:
            written = in_threads(16, write)
        assert set().union(*written) == {WriteStatus.STORED}
        assert 1 <= max(seen) <= 2
        assert listed(backend) == sizes_of(backend, chunks)


def test_calls_do_not_wait_long_for_connections_to_a_deaf_server(tmp_path: Path) -> None:
    with (
        redis_server(any_kind(), tmp_path) as server,
        closing(backend_of(f"{server.url}?max_connections=1", timeout=0.2)) as backend,
    ):
        server.pause()
        started = time.monotonic()
        written = in_threads(4, lambda _: backend.write(chunk_of(100)))
        assert all(isinstance(each.error, BackendUnavailable) for each in written)
        assert time.monotonic() - started < LIMIT
        server.resume()
        eventually(lambda: backend.write(chunk_of(100)).status is WriteStatus.STORED)


def test_a_server_that_is_killed_is_unavailable_until_it_is_back(tmp_path: Path) -> None:
    with redis_server(any_kind(), tmp_path) as server, closing(backend_of(server.url)) as backend:
        chunk = chunk_of(100)
        assert backend.write(chunk).status is WriteStatus.STORED
        server.kill()
        assert_unavailable(backend, chunk)
        server.start()
        assert backend.contains([chunk.key]) == [False]
        assert backend.write(chunk).status is WriteStatus.STORED
        assert read_back(backend, chunk) == chunk.payload


def test_a_connection_that_dies_while_it_was_idle_is_made_again(backend: RedisBackend, client: Redis) -> None:
    chunk = chunk_of(100)
    backend.write(chunk)
    client.client_kill_filter(_type="normal", skipme=True)
    assert read_back(backend, chunk) == chunk.payload


def test_connections_that_die_in_the_middle_of_values_serve_no_wrong_byte(
    backend: RedisBackend, server: RedisServer
) -> None:
    chunks = [chunk_of(1 << 20) for _ in range(8)]
    statuses(backend, chunks)
    with Redis(port=server.port) as client, watching(lambda: client.client_kill_filter(_type="normal", skipme=True)):
        for number in range(200):
            chunk = chunks[number % 8]
            into = memoryview(bytearray(len(chunk.payload)))
            read = backend.read(chunk.key, into)
            assert read.status in (ReadStatus.HIT, ReadStatus.FAILED)
            assert read.status is not ReadStatus.HIT or into == chunk.payload
    assert read_back(backend, chunks[0]) == chunks[0].payload


@pytest.mark.parametrize("deaf", ["the server", "the network"])
def test_what_does_not_answer_is_given_up_in_time(tmp_path: Path, deaf: str) -> None:
    with (
        behind_a_proxy(tmp_path) as (server, proxy, at),
        closing(at(timeout=LIMIT)) as patient,
        closing(at(timeout=0.5)) as backend,
    ):
        chunk = chunk_of(100)
        assert patient.write(chunk).status is WriteStatus.STORED
        if deaf == "the server":
            server.pause()
        proxy.deaf = deaf == "the network"
        started = time.monotonic()
        assert_unavailable(backend, chunk)
        assert time.monotonic() - started < LIMIT
        server.resume()
        proxy.deaf = False
        into = memoryview(bytearray(100))
        eventually(lambda: backend.read(chunk.key, into).status is ReadStatus.HIT, "it answers again")
        assert into == chunk.payload


def test_a_value_that_comes_too_slowly_is_given_up(tmp_path: Path) -> None:
    with behind_a_proxy(tmp_path) as (server, proxy, at), ExitStack() as stack:
        opened = (backend_of(server.url), at(timeout=1.0), at())
        direct, slow, patient = (stack.enter_context(closing(each)) for each in opened)
        chunk = chunk_of(32 << 20)
        direct.write(chunk)
        proxy.delay = 0.2
        read = slow.read(chunk.key, memoryview(bytearray(32 << 20)))
        assert isinstance(read.error, BackendUnavailable)
        assert patient.contains([chunk.key]) == [True], "200 ms are no failure"


class StopsTheServer(RedisBackend):
    """Its server stops when it has been asked whether a value is there, and then gets the value."""

    server: RedisServer | None = None

    def _set_command(self, name: bytes, header: memoryview, payload: memoryview) -> list[bytes | memoryview]:
        if self.server is not None:
            self.server.pause()
        return super()._set_command(name, header, payload)


def test_a_write_that_is_carried_out_after_a_clear_is_never_served(tmp_path: Path) -> None:
    """The weights may have changed: the key now stands for other bytes."""
    with redis_server(any_kind(), tmp_path) as server:
        backend = StopsTheServer(server.url, NAMESPACE, RemoteOptions(timeout=4.0))
        client, (key,), other = Redis(port=server.port), chain("late", 1), chain("other", 1)
        with closing(small_store(8, lower(backend))) as store:
            backend.server = server
            assert put(store, [key]) == 1
            assert store.drain(LIMIT)
            assert store.stats().tiers[1].write_failures == 1
            backend.server = None
            server.resume()
            eventually(lambda: bool(client.exists(backend.name_of(key))), "the server has carried it out")
            before = client.get(backend.name_of(key))
            store.clear(lower=True)
            put_below(store, other)
            assert not client.exists(backend.name_of(key))
            # Once more, from the buffer of a proxy.
            client.set(backend.name_of(key), before)
            lookup = store.look_up_shared([key])
            assert lookup is None or lookup.wait(LIMIT)
            assert get(store, [key]) == []
            client.set(backend.name_of(key), before)
            put_below(store, [key], version=1)
            assert get(store, [key]) == [1]
        with closing(small_store(8, lower(backend_of(server.url)))) as another:
            lookup = another.look_up_shared([key])
            assert lookup is None or lookup.wait(LIMIT), "the listing may have found it before"
            assert get(another, [key]) == [1]


# -- who may, and what is shown --------------------------------------------------------------------------


def test_an_acl_user_with_a_prefix_of_its_own(server: RedisServer, client: Redis) -> None:
    client.execute_command(
        "ACL SETUSER", "cache", "on", ">s3cret", "~kv:*", "+@read", "+@write", "+@connection", "-@dangerous"
    )
    at = f"127.0.0.1:{server.port}"
    mine = backend_of(f"redis://cache:s3cret@{at}", prefix="kv:")
    chunk = chunk_of(100)
    assert mine.write(chunk).status is WriteStatus.STORED
    assert read_back(mine, chunk) == chunk.payload
    assert listed(mine) == sizes_of(mine, [chunk])
    by_settings = backend_of(f"redis://{at}", username="cache", password="s3cret", prefix="kv:")
    assert by_settings.contains([chunk.key]) == [True]
    other_prefix = backend_of(f"redis://cache:s3cret@{at}", prefix="other:")
    assert_unavailable(other_prefix, chunk)
    client.execute_command("ACL SETUSER", "cache", "resetpass", ">changed")
    client.execute_command("CLIENT KILL", "USER", "cache")
    assert_unavailable(mine, chunk)
    for each in (mine, by_settings, other_prefix):
        each.close()
    client.execute_command("ACL DELUSER", "cache")


def test_a_password_that_is_rotated_is_read_again(server: RedisServer, client: Redis, tmp_path: Path) -> None:
    client.flushall()
    file = tmp_path / "password"
    client.execute_command("ACL SETUSER", "cache", "on", ">first", "~*", "+@all")
    file.write_text("first\n")
    layout = KVLayout(8, (LayerPages(4096, 2),))
    settings = {"remote_url": f"redis://127.0.0.1:{server.port}", "remote_username": "cache", "remote_timeout": LIMIT}
    settings |= {"remote_password_file": str(file), "max_local_cpu_size": 16 * layout.slot_bytes / 2**30}
    config = Config.load(extra=settings, env={})
    names = Namespace(model="m", dtype="float32", chunk_size=8, block_size=4)
    with closing(build_store(config, names, layout, shared=False)) as store:

        def stores() -> bool:
            before = store.stats().tiers[1].writes
            with store.reserve([new_key()]) as reservation:
                reservation.commit()
            assert store.drain(LIMIT)
            return store.stats().tiers[1].writes > before

        assert stores()
        for password in ("second", "third"):
            client.execute_command("ACL SETUSER", "cache", "resetpass", f">{password}")
            client.execute_command("CLIENT KILL", "USER", "cache")
            assert not stores(), "the file has the old one"
            file.write_text(f"{password}\n")
            eventually(stores)
    client.execute_command("ACL DELUSER", "cache")


def test_a_password_in_the_url_is_the_only_one(server: RedisServer, client: Redis) -> None:
    client.execute_command("ACL SETUSER", "cache", "on", ">s3cret", "~*", "+@all")
    for url in ("redis://cache:s3cret@127.0.0.1", "redis://127.0.0.1?username=cache&password=s3cret"):
        at = url.replace("127.0.0.1", f"127.0.0.1:{server.port}")
        with closing(backend_of(at, username="other", password="x", renew_password=lambda: "y")) as backend:
            assert backend.write(chunk_of(100)).status is WriteStatus.STORED
    client.execute_command("ACL DELUSER", "cache")


def test_an_acl_user_of_a_cluster(cluster: list[RedisServer]) -> None:
    rights = (">s3cret", "~lmkv:*", "+@read", "+@write", "+@connection", "-@dangerous", "+cluster|slots")
    nodes = [Redis(port=each.port) for each in cluster]
    for node in nodes:
        node.flushall()
        node.execute_command("ACL LOG", "RESET")
        node.execute_command("ACL SETUSER", "cache", "on", *rights)
    at = f"127.0.0.1:{cluster[0].port}"
    mine = backend_of(f"redis+cluster://cache:s3cret@{at}")
    chunks = [chunk_of(100) for _ in range(30)]
    assert set(statuses(mine, chunks)) == {WriteStatus.STORED}
    assert [read_back(mine, chunk) for chunk in chunks] == [chunk.payload for chunk in chunks]
    assert mine.contains([chunk.key for chunk in chunks]) == [True] * 30
    assert listed(mine) == sizes_of(mine, chunks)
    mine.delete([chunk.key for chunk in chunks])
    assert listed(mine) == {}
    assert [node.execute_command("ACL LOG") for node in nodes] == [[], [], []], "nothing else is needed"
    for node in nodes:
        node.execute_command("ACL SETUSER", "cache", "-cluster|slots")
    without = backend_of(f"redis+cluster://cache:s3cret@{at}")
    wrong = backend_of(f"redis+cluster://cache:wrong@{at}")
    for refused in (without, wrong):
        assert_unavailable(refused, chunks[0])
        raised(BackendUnavailable, "", listed, refused)
    for each in (mine, without, wrong):
        each.close()
    for node in nodes:
        node.execute_command("ACL DELUSER", "cache")
        node.close()


def test_passwords_are_shown_nowhere(server: RedisServer, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.DEBUG)
    unknown, not_encoded = "host?socket_timeout=x&password=hunter2", "redis://cache:hunter2/x@host"
    with closing(backend_of(f"redis://cache:hunter2@127.0.0.1:{server.port}?db=0")) as backend:
        with pytest.raises(BackendUnavailable) as refused:
            backend.contains([new_key()])
        texts = [repr(backend), str(refused.value), repr(refused.value), caplog.text]
    texts += [
        raised(ConfigError, "", RedisBackend, f"redis://cache:hunter2@{unknown}", NAMESPACE),
        raised(ConfigError, "in a password write / as %2F", RedisBackend, not_encoded, NAMESPACE),
    ]
    assert not any("hunter2" in text for text in texts)


REFUSED_OPTIONS = {
    **{f"{name}=x": f"unsupported options: {name};" for name in (*FAIL_IN_USE, "nonsense")},
    "timeout=5": "unsupported options: timeout;", "encoding=utf-16": "unsupported options: encoding;",
    "protocol=3&decode_responses=true": "unsupported options: decode_responses, protocol;",
    "ssl_cert_reqs=maybe": "Invalid SSL", "socket_timeout=x": "Invalid value for 'socket_timeout'",
    "client_name=a%20b": "client_name must be ASCII text without spaces",
    "max_connections=0": "max_connections must be at least 1",
    "max_connections=x": "Invalid value for 'max_connections'",
    **{f"socket_timeout={wrong}": "socket_timeout must be more than 0" for wrong in ("0", "inf")},
    "socket_connect_timeout=-1": "socket_connect_timeout must be more than 0", "db=-1": "the database must be a number",
    "ssl_ca_certs=/no/file": "ssl_ca_certs must be the path of a file",
    "ssl_certfile=/no/file": "ssl_certfile must be the path of a file",
    "ssl_ca_path=/no/folder": "ssl_ca_path ", "ssl_ca_data=nonsense": "certificate",
    f"ssl_ca_certs={__file__}": "NO_CERTIFICATE_OR_CRL_FOUND|certificate", f"ssl_certfile={__file__}": "PEM",
}  # fmt: skip


def test_an_option_that_cannot_work_is_refused_at_once() -> None:
    urls = {
        **{
            f"{place}/?{query}": says
            for place in ("rediss://host", "rediss+cluster://host", "rediss+sentinel://host/service")
            for query, says in REFUSED_OPTIONS.items()
        },
        # Options of TLS that a cluster does not take are refused there.
        "rediss://host/?ssl_ciphers=x": "cipher",
        "rediss+cluster://host/?ssl_ciphers=x": "unsupported options: ",
        "rediss://host/?ssl_min_version=5": "5",
        "rediss+cluster://host/?ssl_min_version=5": "unsupported options: ",
        **{f"redis://host/{database}": "the database must be a number" for database in ("one", "1/2", "-1")},
        **{f"redis+cluster://host{at}": "a cluster has only database 0" for at in ("/1", "/?db=1")},
    }
    every(urls.items(), lambda url, says: raised(ConfigError, says, RedisBackend, url, NAMESPACE))
    backend_of("redis+cluster://host/0").close()


def test_options_that_may_be_chosen_work(server: RedisServer) -> None:
    options = "client_name=lmkv-1&health_check_interval=1&socket_timeout=5&socket_connect_timeout=5&db=2"
    url, chunk = f"{server.url}?{options}&socket_keepalive=yes&socket_read_size=4096&max_connections=3", chunk_of(100)
    with Redis(port=server.port, db=2) as client, closing(backend_of(url)) as backend:
        client.flushall()
        assert backend.write(chunk).status is WriteStatus.STORED
        assert [each["name"] for each in client.client_list() if each["name"]] == ["lmkv-1"]
        assert client.exists(backend.name_of(chunk.key))


@pytest.mark.parametrize("scheme", ["rediss", "valkeys"])
def test_tls(tmp_path: Path, scheme: str) -> None:
    if PROGRAMS["redis"]() is None:
        missing("redis", "the Valkey of the wheel has no TLS")
    make = ["openssl", "req", "-x509", "-newkey", "rsa:2048", "-nodes", "-days", "2", "-subj", "/CN=localhost"]
    make += ["-addext", "subjectAltName=DNS:localhost,IP:127.0.0.1"]
    subprocess.run([*make, "-keyout", tmp_path / "key", "-out", tmp_path / "cert"], check=True, capture_output=True)
    files = ("--tls-cert-file", str(tmp_path / "cert"), "--tls-key-file", str(tmp_path / "key"))
    port = free_port()
    tls = ("--tls-port", str(port), *files, "--tls-ca-cert-file", str(tmp_path / "cert"), "--tls-auth-clients", "no")
    with redis_server("redis", tmp_path, *tls):
        backend = backend_of(f"{scheme}://localhost:{port}?ssl_ca_certs={tmp_path / 'cert'}")
        chunk = chunk_of(3 << 20)
        assert backend.write(chunk).status is WriteStatus.STORED
        assert read_back(backend, chunk) == chunk.payload
        backend.close()
        distrusting = backend_of(f"{scheme}://localhost:{port}")
        assert_unavailable(distrusting, chunk)
        distrusting.close()
        without = Config.load(env={}, extra={"remote_url": f"redis://localhost:{port}"})
        for verb, reason in refusals(without, without.remotes[0]).items():
            assert "With TLS the URL begins with rediss://" in remedy(verb, reason)
    encrypted = tmp_path / "encrypted"
    lock = ["openssl", "rsa", "-aes256", "-passout", "pass:x", "-in", tmp_path / "key", "-out", encrypted]
    subprocess.run(lock, check=True, capture_output=True)
    mine = f"{scheme}://localhost:{port}?ssl_certfile={tmp_path / 'cert'}&ssl_keyfile={encrypted}"
    backend_of(f"{mine}&ssl_password=x").close()
    raised(ConfigError, "", backend_of, mine)


# -- clusters --------------------------------------------------------------------------------------------


def test_chunks_are_found_while_a_cluster_moves_their_slot(cluster: list[RedisServer]) -> None:
    backend, chunk = backend_of(f"redis+cluster://127.0.0.1:{cluster[1].port}"), chunk_of(200_000)
    assert backend.write(chunk).status is WriteStatus.STORED
    name = backend.name_of(chunk.key)
    nodes = [Redis(port=each.port, decode_responses=True) for each in cluster]
    owner, slot = owner_and_slot(nodes, name)
    target = (owner + 1) % 3
    begin_to_move(slot, nodes[owner], nodes[target])
    assert read_back(backend, chunk) == chunk.payload, "not moved yet"
    nodes[owner].execute_command("MIGRATE", "127.0.0.1", cluster[target].port, name, 0, 5000)
    assert read_back(backend, chunk) == chunk.payload, "asked for where it goes"
    end_to_move(slot, nodes[target], nodes[owner], nodes[3 - owner - target])
    before = redirections(nodes[owner])
    for _ in range(10):
        assert read_back(backend, chunk) == chunk.payload, "moved"
    assert redirections(nodes[owner]) == before + 1, "where it is now is remembered"
    assert backend.write(chunk).status is WriteStatus.PRESENT
    assert backend.contains([chunk.key]) == [True]
    backend.close()
    for node in nodes:
        node.close()


def test_nodes_that_name_no_host_are_where_the_cluster_was_asked(tmp_path_factory: pytest.TempPathFactory) -> None:
    with nodes_of_a_cluster(tmp_path_factory, 3) as servers, ExitStack() as stack:
        form_cluster(servers)
        nodes = [stack.enter_context(closing(Redis(port=each.port, decode_responses=True))) for each in servers]
        for node in nodes:
            eventually(lambda node=node: all(node_id(each) in str(node.cluster("NODES")) for each in nodes))  # type: ignore[misc]
            node.config_set("cluster-preferred-endpoint-type", "unknown-endpoint")
        # Not localhost: that is where a client goes that has no host.
        backend = stack.enter_context(closing(backend_of(f"redis+cluster://127.0.0.1:{servers[0].port}")))
        chunk = chunk_of(1000)
        assert backend.write(chunk).status is WriteStatus.STORED
        client: Any = backend._connected()
        assert {node.host for node in client.get_nodes()} == {"127.0.0.1"}
        name = backend.name_of(chunk.key)
        owner, slot = owner_and_slot(nodes, name)
        target = (owner + 1) % 3
        begin_to_move(slot, nodes[owner], nodes[target])
        nodes[owner].execute_command("MIGRATE", "127.0.0.1", servers[target].port, name, 0, 5000)
        assert read_back(backend, chunk) == chunk.payload
        end_to_move(slot, nodes[target], nodes[owner], nodes[3 - owner - target])
        assert read_back(backend, chunk) == chunk.payload
        assert {node.host for node in client.get_nodes()} == {"127.0.0.1"}


def owner_and_slot(nodes: list[Redis], name: str) -> tuple[int, int]:
    """Which of three has a name, and its slot."""
    slot = int(nodes[0].execute_command("CLUSTER KEYSLOT", name))
    return next(number for number, upper in enumerate((5460, 10921, 16383)) if slot <= upper), slot


def begin_to_move(slot: int, owner: Redis, target: Redis) -> None:
    target.execute_command("CLUSTER SETSLOT", slot, "IMPORTING", node_id(owner))
    owner.execute_command("CLUSTER SETSLOT", slot, "MIGRATING", node_id(target))


def end_to_move(slot: int, target: Redis, *others: Redis) -> None:
    for node in (target, *others):
        node.execute_command("CLUSTER SETSLOT", slot, "NODE", node_id(target))


def node_id(node: Redis) -> str:
    return str(node.execute_command("CLUSTER MYID"))


def redirections(node: Redis) -> int:
    """How often it has said MOVED."""
    return int(node.info("errorstats").get("errorstat_MOVED", {}).get("count", 0))  # type: ignore[union-attr]


def test_chunks_are_written_while_a_cluster_moves_their_slot(tmp_path_factory: pytest.TempPathFactory) -> None:
    with nodes_of_a_cluster(tmp_path_factory, 4) as servers:
        form_cluster(servers[:3])
        nodes = [Redis(port=each.port, decode_responses=True) for each in servers]
        meet(nodes[3], servers[:3])
        for node in nodes:
            eventually(lambda node=node: all(node_id(each) in str(node.cluster("NODES")) for each in nodes))  # type: ignore[misc]
        eventually(lambda: "ok" in str(nodes[3].cluster("INFO")["cluster_state"]))
        for is_new in (False, True):
            backend = backend_of(f"redis+cluster://127.0.0.1:{servers[0].port}")
            chunk = chunk_of(200_000)
            name = backend.name_of(chunk.key)
            owner, slot = owner_and_slot(nodes, name)
            target = nodes[3 if is_new else (owner + 1) % 3]
            begin_to_move(slot, nodes[owner], target)
            assert backend.write(chunk).status is WriteStatus.STORED
            assert name in set(target.keys())  # type: ignore[arg-type]
            assert read_back(backend, chunk) == chunk.payload
            assert backend.write(chunk).status is WriteStatus.PRESENT
            assert backend.contains([chunk.key]) == [True]
            end_to_move(slot, target, *(node for node in nodes if node is not target))
            assert read_back(backend, chunk) == chunk.payload
            backend.close()
        for node in nodes:
            node.close()


def test_a_cluster_node_that_is_killed_costs_its_chunks_until_a_replica_takes_over(
    tmp_path_factory: pytest.TempPathFactory,
) -> None:
    with nodes_of_a_cluster(tmp_path_factory, 4) as servers:
        form_cluster(servers[:3])
        dying, replica = (Redis(port=each.port, decode_responses=True) for each in servers[2:])
        node = dying.execute_command("CLUSTER MYID")
        meet(replica, servers[:3])
        eventually(lambda: str(node) in str(replica.execute_command("CLUSTER NODES")), "the replica knows its master")
        replica.execute_command("CLUSTER REPLICATE", node)
        backend = backend_of(f"redis+cluster://127.0.0.1:{servers[0].port}")
        chunks = [chunk_of(1000) for _ in range(30)]
        assert set(statuses(backend, chunks)) == {WriteStatus.STORED}
        lost = set(dying.keys())  # type: ignore[arg-type]
        eventually(lambda: set(replica.keys()) == lost, "all is replicated")  # type: ignore[arg-type]
        servers[2].kill()
        for chunk in chunks:
            into = memoryview(bytearray(1000))
            read = backend.read(chunk.key, into)
            if backend.name_of(chunk.key) in lost:
                assert isinstance(read.error, BackendUnavailable)
            else:
                assert (read.status, into) == (ReadStatus.HIT, chunk.payload)
        raised(BackendUnavailable, "", backend.contains, [chunk.key for chunk in chunks])
        replica.execute_command("CLUSTER FAILOVER", "TAKEOVER")
        into = memoryview(bytearray(1000))

        def is_read(chunk: Chunk) -> bool:
            return backend.read(chunk.key, into).status is ReadStatus.HIT

        for chunk in chunks:
            eventually(partial(is_read, chunk))
            assert into == chunk.payload
        assert backend.contains([chunk.key for chunk in chunks]) == [True] * 30
        assert set(statuses(backend, [chunk_of(1000) for _ in range(30)])) == {WriteStatus.STORED}
        for each in (dying, replica, backend):
            each.close()


def test_a_cluster_that_is_not_there_at_the_start_is_asked_again() -> None:
    with closing(backend_of(f"redis+cluster://127.0.0.1:{free_port()}", timeout=0.5)) as backend:
        assert_unavailable(backend, chunk_of(100))
        raised(BackendUnavailable, "", lambda: list(backend.list_keys()))


def test_a_cluster_is_found_by_any_of_the_nodes_that_its_url_names(cluster: list[RedisServer]) -> None:
    dead = f"127.0.0.1:{free_port()}"
    with closing(backend_of(f"redis+cluster://{dead},127.0.0.1:{cluster[0].port},{dead}/0")) as backend:
        chunk = chunk_of(1000)
        assert backend.write(chunk).status is WriteStatus.STORED
        assert read_back(backend, chunk) == chunk.payload


# -- under a store ---------------------------------------------------------------------------------------


def test_a_store_that_is_cleared_deletes_what_others_have_written_too(server: RedisServer, client: Redis) -> None:
    client.flushall()
    client.set("somebody", "else")
    one, other = (small_store(16, lower(backend_of(server.url))) for _ in range(2))
    with closing(one), closing(other):
        put_below(one, chain("cleared", 3))
        other.clear()
        assert other.drain(LIMIT)
        assert client.keys() == [b"somebody"]
