"""The clairvoyant optimum against exhaustive search, and replays against figures that others have measured."""

from __future__ import annotations

import os
from functools import cache
from itertools import combinations
from pathlib import Path

import pytest
from hypothesis import given, strategies as st

from lmkv.policies import POLICIES, make_policy
from lmkv.simulation import clairvoyant, replay
from lmkv.simulation.trace import Trace, TraceRequest, read_trace

TRACES = Path(os.environ.get("LMKV_TRACES", "/nowhere"))
"""A folder with Mooncake's and RAGPulse's traces."""


def trace_of(drawn: list[list[int]]) -> Trace:
    requests = [
        TraceRequest(float(number), [bytes(letters[: end + 1]) for end in range(len(letters))], len(letters))
        for number, letters in enumerate(drawn)
    ]
    return Trace("drawn", 1, requests)


def exhaustive(trace: Trace, capacity: int) -> int:
    """The most chunks that any choice of what to keep after each request finds."""
    chains = [request.keys for request in trace.requests]

    @cache
    def best(number: int, resident: frozenset[bytes]) -> int:
        if number == len(chains):
            return 0
        chain = chains[number]
        hit = next((count for count, key in enumerate(chain) if key not in resident), len(chain))
        there = sorted(resident | {*chain})
        choices = combinations(there, min(capacity, len(there)))
        return hit + max(best(number + 1, frozenset(kept)) for kept in choices)

    return best(0, frozenset())


requests = st.lists(st.lists(st.integers(0, 1), min_size=1, max_size=3), min_size=1, max_size=7)


@given(drawn=requests, capacity=st.integers(1, 4))
def test_clairvoyant_finds_what_exhaustive_search_finds(drawn: list[list[int]], capacity: int) -> None:
    trace = trace_of(drawn)
    assert clairvoyant(trace, capacity)[1] == exhaustive(trace, capacity)


@pytest.mark.parametrize("name", sorted(POLICIES))
@given(drawn=requests, capacity=st.integers(1, 6))
def test_no_policy_beats_it(name: str, drawn: list[list[int]], capacity: int) -> None:
    trace = trace_of(drawn)
    found = replay(trace, make_policy(name), capacity)
    assert found.hit_chunks <= clairvoyant(trace, capacity)[1]
    assert replay(trace, make_policy(name), 1 << 40).hit_chunks == clairvoyant(trace, 1 << 40)[1]


FIGURES = {
    ("conversation", "LRU"): (0.054, 0.200, 0.284, 0.360),
    ("conversation", "Clairvoyant"): (0.251, 0.374, 0.374, 0.374),
    ("synthetic", "LRU"): (0.039, 0.160, 0.267, 0.452),
    ("synthetic", "Clairvoyant"): (0.189, 0.403, 0.516, 0.637),
}
"""Token hit ratios at 1, 5, 10 and 25 % of the unique chunks, by an independent simulator."""


@pytest.mark.skipif(not TRACES.exists(), reason="needs the traces: LMKV_TRACES=FOLDER")
@pytest.mark.parametrize(("name", "unlimited"), [("conversation", 0.3736), ("synthetic", 0.6512)])
def test_figures_are_those_of_an_independent_simulator(name: str, unlimited: float) -> None:
    trace = read_trace(next(TRACES.rglob(f"{name}_trace.jsonl*")))
    assert replay(trace, make_policy("LRU"), 1 << 60).hit_ratio == pytest.approx(unlimited, abs=0.0001)
    for place, share in enumerate((0.01, 0.05, 0.10, 0.25)):
        capacity = int(trace.unique * share)
        lru = replay(trace, make_policy("LRU"), capacity).hit_ratio
        assert lru == pytest.approx(FIGURES[name, "LRU"][place], abs=0.003)
        optimum = clairvoyant(trace, capacity)[0] / trace.tokens
        assert optimum == pytest.approx(FIGURES[name, "Clairvoyant"][place], abs=0.003)
