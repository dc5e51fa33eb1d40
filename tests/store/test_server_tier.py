"""A store over a real server that others fill, or that refuses some of its commands."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import closing
from typing import Any

import pytest

from lmkv.backends.remote.base import RemoteOptions
from lmkv.backends.remote.redis import RedisBackend
from lmkv.policies import LRU
from lmkv.protocols import Clock, Tier
from lmkv.store.tiered import TieredStore
from lmkv.testing import ManualClock
from tests.kit import (
    LIMIT,
    NEVER,
    chain,
    eventually,
    get,
    listing_every,
    lower,
    memory,
    put_below,
    put_through,
    small_store,
)
from tests.servers import Proxy, RedisServer, any_kind, redis_server, without_limits

NAMESPACE = bytes(range(32))


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RedisServer]:
    with redis_server(any_kind(), tmp_path_factory.mktemp("server")) as started:
        yield started


@pytest.fixture
def client(server: RedisServer) -> Iterator[Any]:
    with without_limits(server) as client:
        yield client


def over(server: RedisServer, clock: Clock, slots: int = 16) -> TieredStore:
    """A store that has listed the server once, and does not again."""
    with listing_every(NEVER):
        backend = RedisBackend(server.url, NAMESPACE, RemoteOptions(timeout=LIMIT))
        store = small_store(slots, lower(backend), clock=clock)
    assert store.wait_indexed(LIMIT)
    return store


def look_up(store: TieredStore, keys: list[bytes]) -> None:
    lookup = store.look_up_shared(keys)
    assert lookup is None or lookup.wait(LIMIT)


def refuse(client: Any, *commands: str) -> None:
    client.execute_command("ACL SETUSER", "default", *(f"-{command}" for command in commands))


def allow(client: Any, *commands: str) -> None:
    client.execute_command("ACL SETUSER", "default", *(f"+{command}" for command in commands))


def test_a_server_that_others_fill_keeps_the_chunks_that_it_has(
    server: RedisServer, client: Any, caplog: pytest.LogCaptureFixture
) -> None:
    """Deletions that do not help end, and go on at the tier's pace; with room again all is written."""
    clock = ManualClock()
    with closing(over(server, clock)) as store:
        keys = chain("mine", 8)
        put_below(store, keys)
        client.config_set("maxmemory", "1mb")
        for number in range(40):
            put_below(store, chain(f"refused {number}", 1))
        assert client.dbsize() == 7, "one was deleted, in vain"
        for seconds in (1, 2, 4):
            clock.advance(seconds)
            for number in range(5):
                put_below(store, chain(f"refused later {number}", 1))
        assert client.dbsize() == 4
        assert sum(len(get(store, [key])) for key in keys) == 4
        said = [each for each in caplog.messages if "did not store" in each]
        assert len(said) == 1, "once a minute"
        assert "tier 'redis'" in said[0]
        assert "maxmemory" in said[0]
        client.config_set("maxmemory", "0")
        put_below(store, chain("again", 3))
        assert client.dbsize() == 7
        assert store.stats().tiers[1].writes == 11


def test_a_server_that_answers_lookups_and_refuses_reads_is_not_asked(server: RedisServer, client: Any) -> None:
    clock, keys = ManualClock(), chain("unread", 6)
    with closing(over(server, clock)) as other, closing(over(server, clock)) as store:
        put_below(other, keys)
        refuse(client, "get")
        look_up(store, keys)
        for number in range(8):
            look_up(store, chain(f"beside {number}", 1))
            assert get(store, keys[number % 6 :][:1]) == []
        failed = store.stats().tiers[1].read_failures
        assert get(store, keys) == []
        assert store.stats().tiers[1].read_failures == failed, "it is not tried"
        assert store.stats().tiers[1].breaker == "open"
        assert store.look_up_shared(chain("unknown", 2)) is None
        assert store.catalog.count_prefix(keys) == (0, 0)

        clock.advance(1)
        look_up(store, chain("beside", 1))
        assert store.stats().tiers[1].breaker == "half-open", "an answer is no read"
        assert get(store, keys) == []
        assert store.stats().tiers[1].read_failures == failed + 1, "one read tries, others do not wait"
        assert store.catalog.count_prefix(keys) == (0, 0)

        allow(client, "get")
        clock.advance(2)
        assert get(store, keys[:1]) == [0]
        assert store.stats().tiers[1].breaker == "closed"
        assert get(store, keys) == [0] * 6


def test_a_server_that_answers_again_is_tried_at_once(server: RedisServer, client: Any) -> None:
    """No request waits to find that out. The clock stands still: by itself no breaker lets anything through."""
    keys = chain("kept", 6)
    with closing(Proxy(server.port)) as proxy, listing_every(0.5):
        backend = RedisBackend(f"redis://127.0.0.1:{proxy.port}", NAMESPACE, RemoteOptions(timeout=0.2))
        with closing(TieredStore(Tier(memory(16), LRU()), [lower(backend)], clock=ManualClock())) as store:
            put_below(store, keys)
            proxy.deaf = True
            eventually(lambda: get(store, keys) == [] and store.stats().tiers[1].breaker == "open")
            eventually(lambda: store._tiers[0]._silent, "it was asked")
            assert store.stats().tiers[1].breaker == "open"
            proxy.deaf = False
            eventually(lambda: get(store, keys) == [0] * 6, "they are read", limit=10.0)


def test_a_server_whose_reads_work_again_is_read_from_before_a_request_has_to_try(
    server: RedisServer, client: Any
) -> None:
    clock, keys = ManualClock(), chain("unread", 6)
    with closing(over(server, clock)) as other, closing(over(server, clock)) as store:
        put_below(other, keys)
        refuse(client, "get")
        look_up(store, keys)
        tier = store._tiers[0]
        for seconds in (0, 1, 2, 4, 4, 8):
            clock.advance(seconds)
            for key in keys:
                get(store, [key])
        assert tier.stats().breaker == "open"
        tier.probe()
        assert tier.stats().breaker == "open"
        allow(client, "get")
        tier.probe()
        assert get(store, keys) == [0] * 6


def test_where_deletions_are_refused_a_clear_says_why_nothing_is_written(
    server: RedisServer, client: Any, caplog: pytest.LogCaptureFixture
) -> None:
    clock = ManualClock()
    with closing(over(server, clock)) as store:
        put_below(store, chain("old", 6))
        refuse(client, "unlink")
        store.clear()
        for number in range(12):
            put_through(store, chain(f"new {number}", 1))
        said = [each for each in caplog.messages if "writes nothing to this tier" in each]
        assert len(said) == 1
        assert "redis" in said[0]
        assert "unlink" in said[0].lower()
        clock.advance(61)
        put_through(store, chain("much later", 1))
        assert len([each for each in caplog.messages if "writes nothing to this tier" in each]) == 2, (
            "again once a minute"
        )
        assert store.stats().tiers[1].writes == 6
        allow(client, "unlink")
        clock.advance(61)
        put_below(store, chain("next", 2))
        assert client.dbsize() == 2


def test_a_damaged_value_that_cannot_be_deleted_keeps_no_other_chunk_out(
    server: RedisServer, client: Any, caplog: pytest.LogCaptureFixture
) -> None:
    clock, keys = ManualClock(), chain("damaged", 3)
    with closing(over(server, clock)) as store:
        put_below(store, keys)
        [name] = client.keys(f"*/{keys[0].hex()}")
        client.setrange(name, client.strlen(name) - 1, b"\xff\xff")
        refuse(client, "unlink")
        assert get(store, keys) == []
        others = chain("other", 8)
        for key in others:
            put_below(store, [key])
        put_below(store, keys[:1], version=1)
        assert store.drain(LIMIT)
        tier = store.stats().tiers[1]
        assert (tier.write_failures, tier.write_breaker) == (0, "closed")
        assert client.dbsize() == 11
        assert (
            len([each for each in caplog.messages if "lmkv writes none of these chunks to this tier until" in each])
            == 1
        )
        assert len(get(store, others)) == 8
        store.drop(keys)
        assert get(store, keys) == [], "the damaged value is not found again"
        allow(client, "unlink")
        put_below(store, keys[:1], version=1)
        store.drop(keys)
        assert get(store, keys) == [1, 0, 0]


def test_each_listing_that_is_refused_is_said_once_a_minute(
    server: RedisServer, client: Any, caplog: pytest.LogCaptureFixture
) -> None:
    def said() -> int:
        return sum("list failed" in line and "scan" in line for line in caplog.messages)

    clock = ManualClock()
    tier = lower(RedisBackend(server.url, NAMESPACE))
    with listing_every(0.01), closing(TieredStore(Tier(memory(16), LRU()), [tier], clock=clock)) as store:
        for count in (1, 2):
            client.execute_command("ACL SETUSER", "default", "-scan")
            eventually(lambda count=count: said() == count, "it is said")  # type: ignore[misc]
            client.execute_command("ACL SETUSER", "default", "+scan")
            key = chain(f"listed {count}", 1)
            put_through(store, key)
            client.flushall()
            eventually(lambda: store.stats().tiers[1].chunks == 0, "it is listed again")
            clock.advance(61)
