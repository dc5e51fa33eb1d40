"""The agent API over a real store, through real sockets: what each call does, and what it refuses."""

from __future__ import annotations

import asyncio
import errno
import fcntl
import io
import json
import os
import re
import socket
import stat
import threading
from collections.abc import AsyncIterator, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import asynccontextmanager, closing, suppress
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import httpx
import pytest
from attrs import evolve
from fastapi import FastAPI

import lmkv.vllm.scheduler.observer
from lmkv.agent import server as agent_server
from lmkv.agent.client import AsyncClient, Client
from lmkv.agent.http import EXAMPLES, History, application
from lmkv.agent.server import Address, AgentServer
from lmkv.agent.service import CacheService, Prompt
from lmkv.backends.cpu import CPUPinnedBackend
from lmkv.backends.disk import LocalDiskBackend
from lmkv.chunks.namespace import salt_label
from lmkv.cli.server import written
from lmkv.errors import ConfigError, UsageError
from lmkv.policies import LRU, Quotas
from lmkv.protocols import Tier
from lmkv.store.tiered import TieredStore
from lmkv.testing import ManualClock
from lmkv.testing.backend_suite import in_threads
from lmkv.vllm.assemble import clear_namespace
from lmkv.vllm.plan.request import Report
from lmkv.vllm.scheduler.observer import TraceRecorder
from tests.agent.serving import NAMESPACE, TOKEN, at_port, put, service_of, serving, short_socket, tokenize
from tests.kit import LIMIT, Gated, eventually, memory, raised


def test_lookup_says_how_many_tokens_are_where(store: TieredStore, client: Client) -> None:
    keys = put(store, "a prompt of 23 letters,")
    assert client.lookup("a prompt of 23 letters,") == {"total_tokens": 23, "hit_tokens": 22, "sources": {"cpu": 22}}
    store.drop(keys[2:4])
    found = {"total_tokens": 23, "hit_tokens": 22, "sources": {"cpu": 8, "disk": 14}}
    assert client.lookup("a prompt of 23 letters,") == found
    assert client.lookup(tokenize("a prompt of 23 letters and more"))["hit_tokens"] == 20
    assert client.lookup("another")["sources"] == {}


def test_prompts_are_texts_messages_or_tokens(store: TieredStore, client: Client) -> None:
    put(store, "<user>hello<tool>world")
    messages = [{"role": "user", "content": "hello"}, {"role": "tool", "content": "world"}]
    for prompt in (messages, tokenize("<user>hello<tool>world"), "<user>hello<tool>world"):
        assert client.lookup(prompt)["hit_tokens"] == 21


def test_tools_and_what_else_a_template_is_given_belong_to_a_chat(store: TieredStore, client: Client) -> None:
    messages, tools = [{"role": "user", "content": "hello"}], [{"type": "function", "function": {"name": "search"}}]
    put(store, f"{ {'thinking': True, 'tools': tools} }<user>hello")
    given: dict[str, Any] = {"chat_template_kwargs": {"thinking": True}, "tools": tools}
    found = client.lookup(messages, **given)
    assert found["hit_tokens"] == found["total_tokens"] - 1 > 22
    assert client.lookup(messages)["hit_tokens"] == 0
    for prompt in ("hello", [1, 2]):
        raised(httpx.HTTPStatusError, "need messages", client.lookup, prompt, **given)
    with pytest.raises(httpx.HTTPStatusError, match="the server uses its own"):
        client.lookup(messages, chat_template_kwargs={"chat_template": "{{ 1 }}"})


def test_a_prefetch_of_the_same_name_takes_the_place_of_the_one_before(store: TieredStore, client: Client) -> None:
    keys = put(store, "a prompt of 23 letters,")
    client.prefetch("a prompt of 23 letters,", id="mine", wait=LIMIT)
    client.prefetch("another", id="mine")
    assert client.clear()["deleted_chunks"] == len(keys)
    eventually(lambda: store.stats().tiers[0].used_bytes == 0, "nothing refers to the first one's chunks")


@pytest.fixture
def slow(tmp_path: Path) -> Iterator[Gated]:
    """A disk that answers no read while it is shut, with a prompt on it."""
    gated = Gated(LocalDiskBackend(tmp_path / "slow", NAMESPACE.digest))
    yield gated
    gated.open()


@pytest.fixture
def slow_server(slow: Gated) -> Iterator[AgentServer]:
    with closing(TieredStore(Tier(CPUPinnedBackend(64 << 12, 4096), LRU()), [Tier(slow, LRU())])) as store:
        assert store.wait_indexed(LIMIT)
        store.drop(put(store, "a prompt of 23 letters,"))
        slow.shut("read")
        with at_port(service_of(store)) as server:
            yield server
            slow.open()


def _is_known(client: Client, name: str) -> bool:
    with suppress(httpx.HTTPStatusError):
        return bool(client.prefetched(name))
    return False


@pytest.mark.parametrize("end", ["done", "cancelled", "replaced"])
def test_a_prefetch_that_is_waited_for_is_known_until_its_end(slow: Gated, slow_server: AgentServer, end: str) -> None:
    with (
        Client(slow_server.url, TOKEN) as client,
        Client(slow_server.url, TOKEN) as other,
        ThreadPoolExecutor() as pool,
    ):
        answer = pool.submit(client.prefetch, "a prompt of 23 letters,", id="mine", wait=60)
        eventually(lambda: _is_known(other, "mine"), "it is known")
        slow.waiting("read")
        state = {"id": "mine", "done": False, "found_tokens": 23, "ready_tokens": 0}
        assert other.prefetched("mine") == state
        if end == "done":
            slow.open()
            state |= {"done": True, "ready_tokens": 23}
        elif end == "cancelled":
            assert other.cancel("mine")["cancelled"]
        else:
            other.prefetch("another", id="mine")
        got = answer.result(LIMIT)
        assert got["ready_tokens"] == state["ready_tokens"]
        assert end != "done" or got == state
        assert _is_known(other, "mine") == (end != "cancelled")


def test_a_wait_that_is_over_ends_no_prefetch(slow: Gated, slow_server: AgentServer) -> None:
    with Client(slow_server.url, TOKEN) as client:
        assert not client.prefetch("a prompt of 23 letters,", id="mine", wait=0.01)["done"]
        slow.open()
        eventually(lambda: bool(client.prefetched("mine")["done"]), "it goes on")
        assert client.prefetched("mine")["ready_tokens"] == 23


def test_many_that_wait_leave_the_service_to_others(slow_server: AgentServer) -> None:
    """More than there are threads."""

    async def ask() -> None:
        async with AsyncClient(slow_server.url, TOKEN) as client, AsyncClient(slow_server.url, TOKEN) as other:
            calls = [client.prefetch("a prompt of 23 letters,", id=f"number{each}", wait=60) for each in range(60)]
            waiting = [asyncio.ensure_future(call) for call in calls]
            for each in range(60):
                while True:
                    with suppress(httpx.HTTPStatusError):
                        assert not (await other.prefetched(f"number{each}"))["done"]
                        break
            assert (await other.stats())["tiers"]
            assert not any(each.done() for each in waiting)
            for each in range(60):
                await other.cancel(f"number{each}")
            await asyncio.gather(*waiting)

    asyncio.run(asyncio.wait_for(ask(), LIMIT))


def test_salts_and_tags_keep_prompts_apart(store: TieredStore, client: Client) -> None:
    put(store, "the secret prompt of a tenant", "tenant", team="a")
    asked = ("the secret prompt of a tenant",)
    assert client.lookup(*asked, cache_salt="tenant", tags={"team": "a"})["hit_tokens"] == 28
    assert client.lookup(*asked)["hit_tokens"] == 0
    assert client.lookup(*asked, cache_salt="tenant")["hit_tokens"] == 0
    assert client.lookup(*asked, cache_salt="other", tags={"team": "a"})["hit_tokens"] == 0


def test_prefetch_brings_a_prompt_from_disk(store: TieredStore, client: Client) -> None:
    keys = put(store, "a prompt that is on disk only")
    store.drop(keys)
    begun = client.prefetch("a prompt that is on disk only", wait=LIMIT)
    assert begun == {"id": begun["id"], "done": True, "found_tokens": 29, "ready_tokens": 29}
    assert client.lookup("a prompt that is on disk only")["sources"] == {"cpu": 28}
    assert client.prefetched(begun["id"]) == begun
    assert store.stats().leased == len(keys), "it is kept"
    assert client.cancel(begun["id"]) == {"id": begun["id"], "cancelled": True}
    assert store.stats().leased == 0
    for call in (client.prefetched, client.cancel):
        for name in (begun["id"], "a?b#c"):
            raised(httpx.HTTPStatusError, r"404 .* no prefetch", call, name)


def test_what_a_neighbour_has_stored_is_found(store: TieredStore, client: Client, tmp_path: Path) -> None:
    other = Tier(LocalDiskBackend(tmp_path / "kv", NAMESPACE.digest, shared=True), LRU())
    neighbour = TieredStore(Tier(CPUPinnedBackend(64 << 12, 4096), LRU()), [other])
    put(neighbour, "stored by another engine")
    neighbour.close()
    assert client.lookup("stored by another engine")["sources"] == {"disk": 23}
    assert client.prefetch("stored by another engine", wait=LIMIT)["ready_tokens"] == 24


def test_pins_keep_a_prompt_until_they_are_ended(store: TieredStore, client: Client) -> None:
    put(store, "what is pinned stays")
    assert client.pin("what is pinned stays and more", seconds=30) == {"pinned_tokens": 20, "seconds": 30}
    assert store.stats().pinned == 5
    assert client.unpin("what is pinned stays") == {"unpinned_chunks": 5}
    assert store.stats().pinned == 0
    assert client.pin("what is pinned stays")["seconds"] == 60


def test_clear_deletes_a_prompt_or_everything(store: TieredStore, client: Client) -> None:
    put(store, "the first prompt")
    put(store, "the other prompt", "tenant")
    assert client.clear("the first prompt") == {"deleted_chunks": 4}
    assert client.lookup("the first prompt")["hit_tokens"] == 0
    assert client.lookup("the other prompt", cache_salt="tenant")["hit_tokens"] == 15
    for apart in ({"cache_salt": "tenant"}, {"tags": {"team": "a"}}):
        raised(httpx.HTTPStatusError, r"400 .*chunks do not record salts", client.clear, **apart)
    raised(httpx.HTTPStatusError, "cannot clear other namespaces", client.clear, namespace="ab")
    assert store.stats().primary.chunks == 4
    assert client.clear()["deleted_chunks"] == 4
    assert store.drain(LIMIT)
    assert client.lookup("the other prompt", cache_salt="tenant")["hit_tokens"] == 0


def test_a_namespace_is_cleared_by_the_engine_that_shares_its_folder(tmp_path: Path, store: TieredStore) -> None:
    """Its own one in all tiers; another one on disk; and none where it is not clear which."""
    other = evolve(NAMESPACE, model="other")
    disk = Tier(LocalDiskBackend(tmp_path / "kv", other.digest, shared=True), LRU())
    with closing(TieredStore(Tier(CPUPinnedBackend(64 << 12, 4096), LRU()), [disk])) as neighbour:
        put(neighbour, "of another model")
    put(store, "the first prompt")
    clear = partial(clear_namespace, store.clear, NAMESPACE.digest, str(tmp_path / "kv"))
    with at_port(service_of(store, clear_namespace=clear)) as server, Client(server.url, TOKEN) as client:
        for none in ("", "0123456789abcdef"):
            raised(httpx.HTTPStatusError, r"must match exactly one namespace|422", client.clear, namespace=none)
        with pytest.raises(httpx.HTTPStatusError, match=r"400 .*chunks do not record salts"):
            client.clear("the first prompt", namespace=other.digest.hex())
        assert client.clear(namespace=other.digest.hex()[:12].upper()) == {"deleted_chunks": 4}
        assert not list((tmp_path / "kv" / other.digest.hex()).rglob("*.kv1"))
        assert client.lookup("the first prompt")["hit_tokens"] == 15
        assert client.clear(namespace=NAMESPACE.digest.hex()) == {"deleted_chunks": 4}
        assert client.lookup("the first prompt")["hit_tokens"] == 0


def test_stats_are_the_stores(service: CacheService, store: TieredStore, client: Client) -> None:
    """Those of the last hour are sampled."""
    put(store, "16 tokens it has")
    cpu, disk = client.stats()["tiers"]
    assert (cpu["name"], cpu["chunks"], disk["name"], disk["chunks"]) == ("cpu", 4, "disk", 4)
    eventually(lambda: bool(client.history()["samples"]))
    assert {tier["name"] for tier in client.history()["samples"][0]["tiers"]} == {"cpu", "disk"}

    async def stats() -> dict[str, Any]:
        return service.stats()

    async def sampled() -> list[dict[str, Any]]:
        history = History(stats, interval=0.0, size=3)
        with pytest.raises(TimeoutError):
            await asyncio.wait_for(history.run(), 0.1)
        found: list[dict[str, Any]] = history.snapshot()["samples"]
        return found

    first, *_, last = asyncio.run(sampled())
    assert last["time"] >= first["time"]
    assert [tier["chunks"] for tier in last["tiers"]] == [4, 4]


@pytest.mark.parametrize("number", [0, 1 << 40, (1 << 63) - 1])
def test_a_trace_begins_at_any_number(store: TieredStore, number: int) -> None:
    recorder = TraceRecorder(4, 4096, ManualClock())
    with serving(service_of(store, trace=recorder.since)) as (server,), Client(server.url, TOKEN) as client:
        assert client.trace(number)["requests"] == []
        for most in (1 << 63, 10**400, -1):
            raised(httpx.HTTPStatusError, "422", client.trace, most)
            raised(httpx.HTTPStatusError, "422", client.send, "GET", f"/v1/requests?limit={most}")


def note(recorder: TraceRecorder, requests: int, chunks: int) -> None:
    """Note requests with this many chunks each."""
    keys: list[Any] = [number.to_bytes(32) for number in range(chunks)]
    for number in range(requests):
        request: Any = SimpleNamespace(
            num_tokens=4 * chunks + number,
            prompt_tokens=4 * chunks,
            waiting=SimpleNamespace(computed=0),
            report=Report(),
            options=SimpleNamespace(hint=SimpleNamespace(session="")),
        )
        recorder.finished(request, keys)


@pytest.mark.parametrize(("requests", "chunks"), [(24, 16_384), (6, 131_072), (9_000, 1)])
def test_a_trace_of_any_size_is_answered_in_parts(store: TieredStore, requests: int, chunks: int) -> None:
    """An answer is made in one go, and clients take none without end."""
    recorder = TraceRecorder(4, 4096, ManualClock())
    most = max(2 << 20, 18 * chunks)
    service = service_of(store, trace=recorder.since)
    with serving(service) as (server,), Client(server.url, TOKEN, most=most) as client:
        file = io.StringIO()
        recorded = written(client, file, LIMIT, poll=0.0)
        assert next(recorded) == 0
        note(recorder, requests, chunks)
        assert next(recorded) == requests
    outputs = [json.loads(line)["output"] for line in file.getvalue().splitlines()[1:]]
    assert outputs == list(range(requests))


def test_a_trace_keeps_no_more_than_it_may(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(lmkv.vllm.scheduler.observer, "_MAX_BYTES", 1 << 20)
    recorder = TraceRecorder(4, 4096, ManualClock())
    recorder.since(0)
    note(recorder, 100, 1024)
    kept = recorder.since(0)["requests"]
    assert [each["output"] for each in kept] == list(range(100 - len(kept), 100))
    assert 900_000 < sum(len(each["keys"]) for each in kept) <= 1 << 20
    note(recorder, 1, 100_000)
    assert [len(each["keys"]) for each in recorder.since(0)["requests"]] == [17 * 100_000 - 1]


@pytest.mark.parametrize("name", ["a\nb", "\n", "a\r\n", "a/b", "a%0A?#", "\u2028"])
def test_any_name_is_one_of_a_request_or_a_session(store: TieredStore, name: str) -> None:
    report = {"request": name, "time": 1.0, "tokens": 9, "vllm_tokens": 0, "hit_tokens": 8, "sources": {"cpu": 8}}
    found = {"lookup_tokens": 9, "hit_tokens": 8, "requests": [report], "ids": [name]}
    store.hints.session(b"", name, put(store, "a prompt of 23 letters,"))
    with serving(service_of(store, requests=lambda: found)) as (server,), Client(server.url, TOKEN) as client:
        assert client.explain(name)["request"] == name
        assert client.end_session(name) == {"session": name, "ended": True}


def test_a_prefetch_counts_for_the_tenant_of_its_salt(tmp_path: Path) -> None:
    shares = {salt_label("alice"): 0.5, salt_label("bob"): 0.5}
    host = Tier(CPUPinnedBackend(32 << 12, 4096), Quotas(LRU, shares))
    with closing(TieredStore(host, [Tier(memory(64, "low"), LRU())])) as store:
        keys = put(store, "a prompt of 23 letters,", "alice")
        store.drop(keys)
        service = service_of(store)
        state, ended = service.prefetch(Prompt(text="a prompt of 23 letters,", cache_salt="alice"), "mine")
        eventually(ended.done, "the prefetch")
        assert state()["ready_tokens"] == 23
        service.cancel("mine")
        assert set(store.hints.used_bytes()["cpu"]) == {salt_label("alice")}


def test_a_session_is_ended_with_the_salt_and_tags_of_its_requests(store: TieredStore) -> None:
    def root_of(salt: str | None, tags: Mapping[str, str]) -> bytes:
        return f"{salt} {sorted(tags.items())}".encode()

    store.hints.session(root_of("alice", {"team": "red"}), "1", put(store, "a prompt of 23 letters,"))
    with serving(service_of(store, root_of=root_of)) as (server,), Client(server.url, TOKEN) as client:
        for scope in ({}, {"cache_salt": "mallory"}, {"cache_salt": "alice"}, {"tags": {"team": "red"}}):
            raised(httpx.HTTPStatusError, "404", client.end_session, "1", **scope)
        assert client.end_session("1", cache_salt="alice", tags={"team": "red"})["ended"]


def test_the_async_client_does_the_same(store: TieredStore, server: AgentServer) -> None:
    keys = put(store, "asked by many at once")
    store.drop(keys)

    async def ask() -> list[dict[str, Any]]:
        async with AsyncClient(server.url, TOKEN) as client:
            begun = await client.prefetch("asked by many at once", wait=LIMIT)
            assert begun["ready_tokens"] == 21
            return await asyncio.gather(*(client.lookup("asked by many at once") for _ in range(20)))

    assert {answer["hit_tokens"] for answer in asyncio.run(ask())} == {20}


def test_without_the_token_nothing_is_answered(store: TieredStore, server: AgentServer) -> None:
    put(store, "16 tokens it has")
    for token in (None, "letmeout", "letmein2"):
        with Client(server.url, token) as client:
            for call in (client.stats, client.clear, lambda: client.lookup("x"), lambda: client.prefetched("x")):
                raised(httpx.HTTPStatusError, "401", call)
    assert store.stats().primary.chunks == 4


def test_what_is_no_prompt_is_refused_with_the_reason(server: AgentServer, service: CacheService) -> None:
    headers = {"Authorization": f"Bearer {TOKEN}"}
    bodies: list[dict[str, Any]] = [
        *({}, {"text": "a", "tokens": [1]}, {"tokens": [-1]}, {"tokens": [1 << 32]}, {"tokens": ["a"]}, {"text": 3}),
        *({"text": "a", "everything_else": 1}, {"messages": "hello"}),
    ]
    for body in bodies:
        for path in ("lookup", "prefetch", "pin", "unpin", "clear"):
            answer = httpx.post(f"{server.url}/v1/{path}", json=body, headers=headers)
            assert 400 <= answer.status_code < 500, answer.text
            assert answer.json()["detail"]
    raised(UsageError, "one of text, messages and tokens", service.lookup, Prompt(text="a", tokens=[1]))


def test_a_prompt_that_the_engine_does_not_take_is_refused(store: TieredStore) -> None:
    put(store, "16 tokens it has")
    with at_port(service_of(store, longest=16)) as server, Client(server.url, TOKEN) as client:
        assert client.lookup("16 tokens it has")["hit_tokens"] == 15
        for prompt in ("17 tokens it has.", [1] * 17, [{"role": "user", "content": "0123456789a"}]):
            for call in (client.lookup, client.prefetch, client.pin, client.unpin, client.clear):
                raised(httpx.HTTPStatusError, r"400 .* 17 tokens, and this engine takes 16", call, prompt)
    assert store.stats().primary.chunks == 4


def test_a_prefetch_that_waits_when_the_server_ends_is_told_so(slow: Gated, slow_server: AgentServer) -> None:
    with Client(slow_server.url, TOKEN) as client, ThreadPoolExecutor() as pool:
        answer = pool.submit(client.prefetch, "a prompt of 23 letters,", id="mine", wait=60)
        with Client(slow_server.url, TOKEN) as other:
            eventually(lambda: _is_known(other, "mine"), "it is known")
        slow_server.close()
        raised(httpx.HTTPStatusError, r"503 .*the engine is shutting down", answer.result, LIMIT)


def test_a_closed_store_answers_nothing_found(store: TieredStore, client: Client) -> None:
    put(store, "16 tokens it has")
    store.close()
    assert client.prefetch("16 tokens it has")["ready_tokens"] in (0, 16)


class TestAddresses:
    def test_a_port_that_another_server_has_bound_is_not_taken(self) -> None:
        """vLLM's server binds its port before the engine starts, and listens afterwards."""
        with socket.socket() as theirs:
            theirs.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            theirs.bind(("0.0.0.0", 0))
            port = theirs.getsockname()[1]
            raised(OSError, "in use", Address(f"127.0.0.1:{port}").bind)
            theirs.listen()
            raised(OSError, "in use", Address(f"127.0.0.1:{port}").bind)

    def test_a_port_is_bound_again_after_its_connections_have_ended(self) -> None:
        bound, _ = Address("127.0.0.1:0").bind()
        place = bound.getsockname()
        with bound, socket.create_connection(place), bound.accept()[0] as accepted:
            # The side that closes first keeps the connection for a while.
            accepted.close()
        again, _ = Address(f"127.0.0.1:{place[1]}").bind()
        again.close()

    def test_of_this_machine_alone(self) -> None:
        for text in ("127.0.0.1:0", "localhost:0", *(["[::1]:0"] if socket.has_ipv6 else [])):
            bound, url = Address(text).bind()
            assert url.endswith(f":{bound.getsockname()[1]}")
            bound.close()

    def test_of_others_are_refused(self) -> None:
        for text in (
            *("0.0.0.0:1", "[::]:1", "example.com:80", "8377", ":1", "localhost", "", "127.0.0.1:65536", "::1:-1"),
            # Abstract sockets, which every user may connect to, and paths that mean nothing.
            *("unix:", "unix:\0name", "unix:/a\0b", "unix:relative.sock", f"127.0.0.1:{'9' * 5000}"),
        ):
            raised(ConfigError, "must be unix:/path, or a loopback address", Address(text).bind)

    def test_engines_of_a_server_have_one_each(self) -> None:
        first = Address("127.0.0.1:8377"), Address("unix:/run/lmkv.sock")
        assert [each.of_engine(0) for each in first] == list(first)
        assert [each.of_engine(2).text for each in first] == ["127.0.0.1:8379", "unix:/run/lmkv.sock.2"]


class TestUnixSockets:
    @pytest.fixture
    def path(self) -> Iterator[Path]:
        # Sockets' paths are short; those of tests are not.
        path = Path(f"/tmp/lmkv-{os.getpid()}-{id(self)}.sock")
        yield path
        path.unlink(missing_ok=True)

    def test_they_are_their_users_alone(self, service: CacheService, store: TieredStore, path: Path) -> None:
        put(store, "16 tokens it has")
        server = AgentServer(lambda: application(service, None), Address(f"unix:{path}"))
        assert stat.S_IMODE(path.stat().st_mode) == 0o600
        with Client(server.url) as client:
            assert client.lookup("16 tokens it has")["hit_tokens"] == 15
        server.close()
        assert not path.exists()

    def test_one_that_was_left_is_replaced_and_one_in_use_is_not(self, path: Path) -> None:
        left = socket.socket(socket.AF_UNIX)
        left.bind(str(path))
        left.close()
        bound, _ = Address(f"unix:{path}").bind()
        # From the start, not once its server's thread runs.
        with socket.socket(socket.AF_UNIX) as early:
            early.connect(str(path))
        raised(OSError, "in use", Address(f"unix:{path}").bind)
        bound.close()

    def test_of_servers_that_start_at_the_same_time_one_has_it(self, path: Path) -> None:
        for _ in range(100):
            bound: list[socket.socket] = []

            def start(_: int, bound: list[socket.socket] = bound) -> None:
                with suppress(OSError):
                    bound.append(Address(f"unix:{path}").bind()[0])

            in_threads(4, start)
            with socket.socket(socket.AF_UNIX) as client:
                client.connect(str(path))
            assert len(bound) == 1
            bound[0].close()

    def test_who_keeps_the_folders_lock_keeps_nobody_from_starting(
        self, path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr(agent_server, "_PATIENCE", 0.0)
        folder = os.open(path.parent, os.O_RDONLY)
        fcntl.flock(folder, fcntl.LOCK_EX)
        Address(f"unix:{path}").bind()[0].close()
        os.close(folder)

    def test_one_in_use_is_not_taken(self, path: Path) -> None:
        """By a server that is busy, or by a file."""
        with socket.socket(socket.AF_UNIX) as busy, socket.socket(socket.AF_UNIX) as waiting:
            busy.bind(str(path))
            busy.listen(0)
            waiting.connect(str(path))
            raised(OSError, "in use", Address(f"unix:{path}").bind)
        path.unlink()
        path.write_text("mine")
        raised(OSError, "in use", Address(f"unix:{path}").bind)
        assert path.read_text() == "mine"

    def test_one_of_another_server_stays(self, service: CacheService, path: Path) -> None:
        first = AgentServer(lambda: application(service, None), Address(f"unix:{path}"))
        path.unlink()
        with closing(AgentServer(lambda: application(service, None), Address(f"unix:{path}"))):
            for _ in range(2):
                first.close()
            with Client(f"unix:{path}") as client:
                assert client.stats()["tiers"]
        assert not path.exists()


@pytest.mark.parametrize("what", ["the application", "the thread"])
def test_what_does_not_start_gives_its_sockets_back(service: CacheService, what: str) -> None:
    first = short_socket()
    inside = first.private(0)
    paths = [Path(each.text.removeprefix("unix:")) for each in (first, inside)]
    before = sorted(os.listdir("/proc/self/fd"))

    def make() -> FastAPI:
        assert all(path.is_socket() for path in paths)
        if what == "the application":
            raise RuntimeError("no application")
        # No thread has so much room.
        threading.stack_size(1 << 47)
        return application(service, TOKEN)

    try:
        with pytest.raises(RuntimeError, match=r"no application|can't start new thread") as raised:
            AgentServer(make, first, lambda: inside)
    finally:
        threading.stack_size(0)
    assert not any(path.exists() for path in paths)
    assert sorted(os.listdir("/proc/self/fd")) == before, raised


def test_one_whose_thread_has_failed_refuses_connections(caplog: pytest.LogCaptureFixture) -> None:
    @asynccontextmanager
    async def failing(_: FastAPI) -> AsyncIterator[None]:
        raise RuntimeError("it does not begin")
        yield

    first = short_socket()
    server = AgentServer(lambda: FastAPI(lifespan=failing), first)
    with closing(server), socket.socket(socket.AF_UNIX) as caller:
        server._thread.join(LIMIT)
        assert caller.connect_ex(first.text.removeprefix("unix:")) == errno.ENOENT
    assert "the engine continues without the API" in caplog.text


def test_it_ends_while_a_call_waits(server: AgentServer) -> None:
    with socket.create_connection(("127.0.0.1", int(server.url.rpartition(":")[2]))) as half:
        half.sendall(b"POST /v1/lookup HTTP/1.1\r\n")
        server.close()
        assert not server._thread.is_alive()


def test_the_page_of_the_api_has_all_calls_and_loads_nothing(server: AgentServer) -> None:
    with httpx.Client(base_url=server.url, trust_env=False) as client:
        page, document = client.get("/docs"), client.get("/openapi.json").json()
    assert [path for path in document["paths"] if f" {path}</h2>" not in page.text] == []
    assert all(call["security"] for methods in document["paths"].values() for call in methods.values())
    assert "<code>chat_template_kwargs</code>" in page.text
    assert "`" not in page.text
    assert page.text.count("<pre>curl ") == sum(map(len, document["paths"].values()))
    schemas = document["components"]["schemas"]
    bodies = [
        fields for name, schema in schemas.items() if name.endswith("Body") for fields in schema["properties"].values()
    ]
    assert all(fields["description"] for fields in bodies)
    assert not re.search(r"<script|src=|https?://|@import|url\(", page.text)
    assert "default-src 'none'" in page.headers["Content-Security-Policy"]


def test_examples_of_the_api_are_answered_as_they_say(service: CacheService) -> None:
    server = AgentServer(lambda: application(service, None), Address("127.0.0.1:0"))
    with closing(server), httpx.Client(base_url=server.url, trust_env=False) as client:
        for (method, path), (body, answer) in EXAMPLES.items():
            found = client.request(method, path, json=body)
            assert (found.status_code, set(found.json())) == (200, set(answer or ())), path
        about = client.get("/v1/about").json()
    assert about["uptime"] >= 0
