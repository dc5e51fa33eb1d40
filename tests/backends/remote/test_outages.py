"""Every remote store in every state that one can be in, while an engine goes on.

vLLM's scheduling thread waits for none of them, no byte is wrong, and the tier works again soon after.
With `-rP` each test shows what a user sees meanwhile: what docs/remote.md says of it is from there.
"""

from __future__ import annotations

import logging
import re
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import closing
from itertools import cycle
from pathlib import Path
from typing import Any

import attrs
import pytest

pytest.importorskip("redis")
pytest.importorskip("obstore")

from redis import Redis

from tests.backends.remote.outages import MEANINGLESS, STATES, STORES, TIMEOUT
from tests.backends.remote.served import CHUNK, CHUNKS, Prompt, Served, Times
from tests.kit import LIMIT, eventually, listing_every
from tests.servers import redis_server

SECONDS = 2.5
"""How long a state lasts."""
AGAIN = 5.0
"""Seconds from the end of a state until chunks are written and read again, at most."""
NO_WAIT, PAUSE = 0.02, 0.2
"""Seconds: of 99 calls of the scheduler side in 100, and of each one, at most.

A call that waits for a store takes half a second. A machine that does other work lets threads wait for each other.
"""
KNOWN = 6
"""Prompts that come again and again, two at a time: host memory has lost them by then."""
HIT = CHUNKS * CHUNK
DAILY = {("redis", "refuses reads"): 0.3, ("redis", "half open"): 1.0, ("folder", "full"): 0.3}
"""Cells of the table that are in every run, and for how long."""
LONG, LONG_SECONDS = ("redis", "s3", "infinistore", "mooncake"), 25.0
"""After so long a breaker tries rarely."""
QUIET = {"another one", "slow", "refuses deletions"}
"""States in which the log need not say anything: what is not there is a miss, what comes in time is a hit."""
COUNTED: dict[str, set[str]] = {
    "refuses writes": {"write_failures"},
    "refuses reads": {"read_failures"},
    "refuses deletions": {"write_rejects"},
    "full": {"write_rejects"},
    "another one": {"lost", "read_failures"},
    "slow": set(),
    "gone": {"read_failures"},
    "half open": {"read_failures"},
}
"""Counters of which one goes up."""
VARIES = re.compile(r"\S*[0-9a-f]{64}\S*|[\d.]+ ?[nuµm]?s\b")


def cells() -> Iterator[Any]:
    for store in STORES:
        for state in STATES:
            if state not in MEANINGLESS.get(store, {}):
                daily = (store, state) in DAILY
                yield pytest.param(store, state, marks=[] if daily else pytest.mark.nightly("outages"))
    for store in LONG:
        yield pytest.param(store, "half open for long", marks=pytest.mark.nightly("outages"))
    # Lookups are answered all the while.
    for state in ("refuses reads", "refuses writes"):
        yield pytest.param("redis", f"{state} for long", marks=pytest.mark.nightly("outages"))


@pytest.mark.parametrize(("store", "state"), list(cells()))
def test_the_engine_goes_on(
    store: str, state: str, tmp_path: Path, tmp_path_factory: pytest.TempPathFactory, caplog: pytest.LogCaptureFixture
) -> None:
    seconds = DAILY.get((store, state), SECONDS)
    if state.endswith(" for long"):
        state, seconds = state.removesuffix(" for long"), LONG_SECONDS
    kind, made = STORES[store]
    with made(kind, tmp_path, tmp_path_factory) as breakable:
        served = Served(breakable.url, TIMEOUT, **breakable.settings)
        with closing(served):
            assert served.store.wait_indexed(LIMIT)
            known = [served.new_prompt() for _ in range(KNOWN)]
            for pair in zip(known[::2], known[1::2], strict=True):
                eventually(lambda pair=pair: has(served, *pair), "it works at first")  # type: ignore[misc]
            before = served.remote
            served.timed.take()
            with caplog.at_level(logging.WARNING, "lmkv"):
                broken = breakable.states[state]
                broken.begin()
                try:
                    if state == "refuses deletions":
                        served.timed(served.store.clear)
                    seen = go_on(
                        served, known, seconds, lambda: state in QUIET or noticed(before, served, state, caplog)
                    )
                finally:
                    broken.end()
                during, after = served.timed.take(), served.remote
                took = until_it_works(served)
            said = [record.getMessage() for record in caplog.records]
            moved = changes(attrs.asdict(before), attrs.asdict(after))
            print(row(store, state, during, took, seen, moved))
            print(*said, sep="\n")
            assert_never_waited(during)
            assert_never_waited(served.timed.take())
            assert said or state in QUIET, "the log says nothing"
            reasons = [VARIES.sub("", line) for line in said]
            assert len(reasons) == len(set(reasons)), "each is said once a minute"
            assert moved.keys() & COUNTED[state] or not COUNTED[state]


def noticed(before: Any, served: Served, state: str, caplog: pytest.LogCaptureFixture) -> bool:
    """Whether counters show the state, and the log says it, or has said it within the last minute."""
    moved = changes(attrs.asdict(before), attrs.asdict(served.remote)).keys()
    return bool(caplog.records) and bool(moved & COUNTED[state] or not COUNTED[state])


def assert_never_waited(times: Times) -> None:
    assert times.most < NO_WAIT, times
    assert times.longest < PAUSE, times


def has(served: Served, *prompts: Prompt) -> bool:
    """Whether chunks of these prompts, once they were computed, are loaded from the store alone."""
    served.serve(*prompts)
    deadline = time.monotonic() + TIMEOUT
    while served.store.stats().pending_io and time.monotonic() < deadline:
        time.sleep(0.002)
    served.forget(*prompts)
    return served.serve(*prompts) == [HIT] * len(prompts)


def go_on(served: Served, known: list[Prompt], seconds: float, noticed: Callable[[], bool]) -> Counter[str]:
    """Answer prompts for so long, old ones and new ones, and until the state was noticed; how often what was seen."""
    seen, end = Counter[str](), time.monotonic() + seconds
    pairs = cycle(zip(known[::2], known[1::2], strict=True))
    while time.monotonic() < end or (not noticed() and time.monotonic() < end + LIMIT):
        *old, new = served.serve(*next(pairs), served.new_prompt())
        assert new == 0
        stats = served.remote
        seen.update({"rounds": 1, "loaded": sum(old) > 0})
        seen.update([f"breaker {stats.breaker}", f"write_breaker {stats.write_breaker}"])
    return seen


def until_it_works(served: Served) -> float:
    """Seconds until a new prompt is stored, and loaded again."""
    started = time.monotonic()
    while not has(served, served.new_prompt()):
        assert time.monotonic() < started + AGAIN, f"not within {AGAIN} s: {served.remote}"
    return time.monotonic() - started


def changes(before: dict[str, Any], after: dict[str, Any]) -> dict[str, int]:
    return {
        name: value - before[name]
        for name, value in after.items()
        if isinstance(value, int) and value != before[name] and name != "used_bytes"
    }


def row(store: str, state: str, times: Times, took: float, seen: Counter[str], moved: dict[str, int]) -> str:
    opened = {name: count for name, count in seen.items() if "closed" not in name}
    numbers = f"{1e3 * times.most:.1f} / {1e3 * times.longest:.1f} ms of {times.calls} ({times.worst})"
    return f"| {store} | {state} | {numbers} | again after {took:.1f} s | {opened} | {moved} |"


def test_a_prompt_in_host_memory_is_written_again_where_it_was_lost(tmp_path: Path) -> None:
    with redis_server("redis", tmp_path) as server, listing_every(0.05), closing(Served(server.url, LIMIT)) as served:
        client, prompt = Redis(port=server.port), served.new_prompt()
        served.serve(prompt)
        eventually(lambda: client.dbsize() == CHUNKS)
        client.flushall()
        eventually(lambda: served.remote.chunks == 0, "a listing")
        assert served.serve(prompt) == [HIT]
        eventually(lambda: client.dbsize() == CHUNKS, "it is written again")
        client.close()
