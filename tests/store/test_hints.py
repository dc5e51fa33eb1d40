"""Hints reach the policies of all tiers: ended sessions, priorities that end, and quotas of tenants."""

from __future__ import annotations

import threading
from typing import Any

import pytest

from lmkv.config import Config
from lmkv.errors import ConfigError
from lmkv.policies import LRU, POLICIES, Quotas, make_policy
from lmkv.store.hints import Hints
from lmkv.testing import ManualClock
from tests.tables import chain, raised

A, B, C = chain("a", 4), chain("b", 4), chain("c", 4)


LOCK = threading.Lock()


def filled(name: str = "LRU") -> tuple[Hints, Any, ManualClock]:
    policy: Any = make_policy(name)
    clock = ManualClock()
    for keys in (A, B, C):
        for at in reversed(range(4)):
            policy.insert(keys[at], 10, keys[at - 1] if at else b"")
        policy.touch(keys)
    return Hints(LOCK, {"cpu": policy}, clock), policy, clock


def expire(hints: Hints) -> None:
    with LOCK:
        hints.expire()


@pytest.mark.parametrize("name", sorted(POLICIES))
def test_an_ended_session_goes_first(name: str) -> None:
    """Whether its last request says so, or it is ended without another one."""
    hints, policy, _ = filled(name)
    hints.session(b"", "agent", B[:3])
    hints.session(b"", "agent", B, ended=True)
    assert policy.evict(40) == B[::-1]
    hints, policy, _ = filled(name)
    hints.session(b"", "agent", B)
    assert [hints.end_session(b"", each) for each in ("another", "agent", "agent")] == [False, True, False]
    assert policy.evict(40) == B[::-1]


@pytest.mark.parametrize("name", sorted(POLICIES))
def test_a_priority_is_kept_until_its_time_is_over(name: str) -> None:
    hints, policy, clock = filled(name)
    hints.set_priority(B, 1, seconds=30)
    assert {*(policy.evict(80) or ())} == {*A, *C}
    expire(hints)
    for keys in (A, C):
        for at in reversed(range(4)):
            policy.insert(keys[at], 10, keys[at - 1] if at else b"")
    clock.advance(31)
    expire(hints)
    policy.hint(C, 1)
    assert {*(policy.evict(80) or ())} == {*A, *B}


def test_chunks_that_another_session_shares_are_not_given_up() -> None:
    hints, policy, _ = filled()
    branch = [*B[:2], b"x" * 32]
    policy.insert(branch[2], 10, B[1])
    hints.session(b"", "other", branch)
    hints.session(b"", "agent", B, ended=True)
    assert policy.evict(20) == [B[3], B[2]]
    assert policy.evict(10) == [A[3]]


@pytest.mark.parametrize("its", [4, 2], ids=["its own prompt", "a beginning of it"])
def test_what_a_living_session_has_is_not_given_up_for_another_ones_end(its: int) -> None:
    hints, policy, _ = filled()
    hints.session(b"alice", "living", B[:its])
    hints.session(b"mallory", "zzz", B, ended=True)
    assert policy.evict(10 * (4 - its) + 10) == [*B[its:][::-1], A[3]]
    assert hints.end_session(b"alice", "living")
    assert policy.evict(10) == [B[its - 1]]


def test_sessions_that_are_forgotten_count_for_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    hints, _policy, clock = filled()
    monkeypatch.setattr("lmkv.store.hints.MAX_HINTED", 50)
    monkeypatch.setattr("lmkv.store.hints._MAX_SESSION", 8)
    for number in range(30):
        hints.session(b"", f"{number % 3}", chain(f"{number % 7}", number % 10))
    assert hints.counts()["branches"] == sum(map(len, (each for _, found in hints._sessions.items() for each in found)))
    with LOCK:
        hints.recount()
    clock.advance(100_000)
    expire(hints)
    assert not hints.counts()["branches"]


def test_the_end_of_a_session_ends_so_many_claims_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """The others end at their time."""
    hints, _policy, clock = filled()
    monkeypatch.setattr("lmkv.store.hints._MAX_ENDED", 4)
    hints.session(b"", "agent", B)
    for length in (4, 3, 2):
        hints.set_priority(B[:length], 1, 10.0 * (5 - length), session="agent")
    hints.session(b"", "agent", B, ended=True)
    assert 0 < hints.counts()["priorities"] < 3
    clock.advance(40)
    expire(hints)
    assert not hints.counts()["priorities"]


def test_a_use_takes_the_end_back() -> None:
    hints, policy, _ = filled()
    hints.session(b"", "agent", C, ended=True)
    policy.touch(C)
    assert policy.evict(10) == [A[3]]


def test_a_chunk_that_the_session_has_replaced_is_given_up() -> None:
    """Its last chunk had fewer tokens, or other ones."""
    hints, policy, _ = filled()
    hints.session(b"", "agent", C)
    hints.session(b"", "agent", [*C[:3], b"y" * 32])
    assert policy.evict(10) == [C[3]]


def test_labels_reach_the_policies_with_quotas() -> None:
    quotas = Quotas(LRU, {"alice": 0.5})
    hints = Hints(threading.Lock(), {"cpu": quotas, "disk": LRU()}, ManualClock())
    hints.label(A, ["nobody", "alice"])
    quotas.insert(A[0], 10)
    quotas.insert(A[1], 10, A[0])
    quotas.insert(B[0], 10)
    assert hints.used_bytes() == {"cpu": {"alice": 20, "": 10}}


def test_quotas_are_read_as_people_write_them() -> None:
    given = ("alice=40 team:red=20", "alice=40%, team:red=20", {"alice": 40, "team:red": "20"})
    assert {str(Config(quotas=each).quotas) for each in given} == {str(Config(quotas=given[0]).quotas)}
    assert [(share.tenant, share.percent) for share in Config(quotas=given[0]).quotas] == [
        ("salt-2bd806c97f0e00af", 40),
        ("team:red", 20),
    ]
    assert Config(quotas="salt-2bd806c97f0e00af=40 team:red=20").quotas == Config(quotas=given[0]).quotas
    for bad in ("alice", "alice=x", "=4", "alice=60 bob=60", 7, {"alice": -1}):
        raised(ConfigError, "quotas", Config, quotas=bad)
