"""Several engines of a server behind one address: real services that ask each other through real sockets."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, closing
from pathlib import Path
from typing import Any

import httpx
import pytest

from lmkv.agent.client import Client
from lmkv.agent.server import AgentServer
from lmkv.policies import LRU, Quotas
from lmkv.store.tiered import TieredStore
from tests.agent.serving import (
    TOKEN,
    engines_of,
    keys_of,
    put,
    service_of,
    service_of_scheduler,
    serving,
    store_over,
    tokenize,
)
from tests.kit import LIMIT, raised
from tests.vllm.scheduler.test_explain import CHUNK, OTHERS, PROMPT, engine_of

TEXT = "the 24 bytes of a prompt"


@pytest.fixture
def stores(tmp_path: Path) -> Iterator[list[TieredStore]]:
    """The agent APIs of two engines that share a disk."""
    with ExitStack() as stack:
        yield [stack.enter_context(store_over(tmp_path / "kv")) for _ in range(2)]


@pytest.fixture
def servers(stores: list[TieredStore]) -> Iterator[list[AgentServer]]:
    with serving(*map(service_of, stores)) as servers:
        yield servers


@pytest.fixture
def client(servers: list[AgentServer]) -> Iterator[Client]:
    """The first engine's agent API."""
    with Client(servers[0].url, TOKEN) as client:
        yield client


def hits(answer: dict[str, Any], what: str = "hit_tokens") -> list[int]:
    return [engine[what] for _, engine in sorted(engines_of(answer).items())]


def test_lookup_has_the_best_and_each(stores: list[TieredStore], servers: list[AgentServer], client: Client) -> None:
    put(stores[1], TEXT)
    stores[1].delete(put(stores[0], TEXT)[4:])
    found = client.lookup(TEXT)
    assert hits(found) == [23, 16]
    assert (found["engine"], found["hit_tokens"], found["sources"]) == (0, 23, {"cpu": 23})
    only = {"total_tokens": 24, "hit_tokens": 16, "sources": {"cpu": 16}}
    with Client(servers[1].url, TOKEN) as second:
        assert client.lookup(TEXT, engine=1) == second.lookup(TEXT) == only, "it answers for itself"


def test_a_prefetch_is_for_all_under_one_name(stores: list[TieredStore], client: Client) -> None:
    for store in stores:
        store.drop(put(store, TEXT))
    begun = client.prefetch(TEXT, wait=LIMIT)
    assert begun["done"]
    assert hits(begun, "ready_tokens") == [24, 24]
    assert {engine["id"] for engine in engines_of(begun).values()} == {begun["id"]}
    assert [store.stats().leased for store in stores] == [6, 6]
    assert hits(client.prefetched(begun["id"]), "ready_tokens") == [24, 24]
    assert client.cancel(begun["id"])["cancelled"]
    assert [store.stats().leased for store in stores] == [0, 0]
    raised(httpx.HTTPStatusError, "404", client.prefetched, begun["id"])


def test_a_prefetch_may_be_for_one(stores: list[TieredStore], client: Client) -> None:
    for store in stores:
        store.drop(put(store, TEXT))
    begun = client.prefetch(TEXT, wait=LIMIT, engine=1, id="mine")
    assert begun == {"id": "mine", "done": True, "found_tokens": 24, "ready_tokens": 24}
    assert client.prefetched("mine") == begun
    assert [store.stats().leased for store in stores] == [0, 6]


def test_pins_and_clears_are_for_all(stores: list[TieredStore], client: Client) -> None:
    for store in stores:
        put(store, TEXT)
    assert hits(client.pin(TEXT, seconds=30), "pinned_tokens") == [24, 24]
    assert client.unpin(TEXT, engine=0) == {"unpinned_chunks": 6}
    assert client.unpin(TEXT)["unpinned_chunks"] == 6
    assert client.clear(TEXT, engine=1) == {"deleted_chunks": 6}
    assert [store.stats().primary.chunks for store in stores] == [6, 0]
    client.clear()
    assert [store.stats().primary.chunks for store in stores] == [0, 0]


def test_stats_add_up_what_each_has_of_its_own(stores: list[TieredStore], client: Client) -> None:
    put(stores[0], TEXT)
    put(stores[1], "another!")
    own, shared = client.stats()["tiers"]
    assert (own["chunks"], own["used_bytes"], own["capacity_bytes"]) == (8, 8 << 12, 128 << 12)
    tiers = [store.stats().tiers[1] for store in stores]
    assert shared["writes"] == sum(tier.writes for tier in tiers) == 8
    assert shared["used_bytes"] == max(tier.used_bytes for tier in tiers)
    assert [engine["tiers"][0]["chunks"] for engine in engines_of(client.stats()).values()] == [6, 2]


def test_a_session_is_ended_where_it_is_known(stores: list[TieredStore], client: Client) -> None:
    name = "team a/agent 7?"
    kept = put(stores[1], "another prompt")
    ended = put(stores[1], TEXT)
    stores[1].hints.session(b"", name, ended)
    assert client.end_session(name) == {"session": name, "ended": True}
    raised(httpx.HTTPStatusError, "404", client.end_session, name)
    for number in range(30):
        put(stores[1], f"{number:04}" * 2)
    assert stores[1].catalog.count_prefix(kept)[0] == len(kept)
    assert stores[1].catalog.count_prefix(ended)[0] == 0


def test_tenants_add_up_too(tmp_path: Path) -> None:
    def quotas() -> Quotas:
        return Quotas(LRU, {"alice": 0.5})

    with store_over(tmp_path / "0", quotas) as first, store_over(tmp_path / "1", quotas) as second:
        for store, text in ((first, TEXT), (second, "another!")):
            store.hints.label(keys_of(tokenize(text), "alice", {}), ["alice"])
            put(store, text, "alice")
        put(first, "of nobody who has a quota")
        with serving(service_of(first), service_of(second)) as servers, Client(servers[0].url, TOKEN) as client:
            assert client.stats()["tenants"]["cpu"] == {"alice": 8 << 12, "": 7 << 12}
            each = [one["tenants"]["cpu"]["alice"] for one in engines_of(client.stats()).values()]
            assert each == [6 << 12, 2 << 12]


def test_an_engine_that_is_away_is_named(stores: list[TieredStore], servers: list[AgentServer], client: Client) -> None:
    put(stores[0], TEXT)
    servers[1].close()
    found = client.lookup(TEXT)
    assert found["hit_tokens"] == 23
    assert "ConnectError" in engines_of(found)[1]["unavailable"]
    assert client.prefetch(TEXT)["ready_tokens"] == 24
    assert client.stats()["tiers"][0]["chunks"] == 6
    assert "ConnectError" in client.requests()["unavailable"]["1"]
    raised(httpx.HTTPStatusError, r"503 .*engine 1 is unavailable", client.lookup, TEXT, engine=1)
    raised(httpx.HTTPStatusError, r"400 .*there is no engine 7; the engines are 0, 1", client.lookup, TEXT, engine=7)


def test_what_one_refuses_is_said(client: Client) -> None:
    for engine in (0, 1):
        with pytest.raises(httpx.HTTPStatusError, match=r"400 .*one of text, messages and tokens"):
            client.send("POST", "/v1/lookup", {"engine": engine})


def test_what_an_engine_answers_is_passed_on_whole(tmp_path: Path) -> None:
    """Every field that an answer has is one that another engine expects."""
    with store_over(tmp_path / "kv") as store, closing(engine_of(ram_chunks=6)) as engine:
        for number, tokens in enumerate([PROMPT, *OTHERS, PROMPT]):
            engine.serve(f"cmpl-{number}", tokens)
        services = service_of(store), service_of_scheduler(engine.scheduler, CHUNK)
        with (
            serving(*services) as servers,
            Client(servers[0].url, TOKEN) as all_of,
            Client(servers[1].url, TOKEN) as one,
        ):
            told, own = engines_of(all_of.stats())[1], one.stats()
            assert {**told, "time": 0} == {**own, "time": 0, "engine": 1}
            reports = [{**report, "engine": 1} for report in one.requests()["requests"]]
            assert all_of.requests()["requests"] == reports
            assert any("missed" in report for report in reports)
            assert all_of.explain("cmpl-0") == {**one.explain("cmpl-0"), "engine": 1}
            for call in ("lookup", "pin", "unpin", "clear"):
                path = f"/v1/{call}"
                assert set(all_of.send("POST", path, {"tokens": PROMPT, "engine": 1})) == set(
                    one.send("POST", path, {"tokens": PROMPT})
                )


def test_only_who_has_the_token_announces_an_engine(stores: list[TieredStore], servers: list[AgentServer]) -> None:
    with Client(servers[0].url, "another") as stranger, pytest.raises(httpx.HTTPStatusError, match="401"):
        stranger.announce(5)
