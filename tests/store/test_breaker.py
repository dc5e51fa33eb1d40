"""Breaker: when it refuses, whom it lets try, and that it closes by itself."""

from __future__ import annotations

import pytest
from hypothesis import given, strategies as st

from lmkv.store.health import Breaker
from lmkv.testing import ManualClock


@pytest.fixture
def clock() -> ManualClock:
    return ManualClock(100.0)


@pytest.fixture
def breaker(clock: ManualClock) -> Breaker:
    return Breaker(clock)


def call(breaker: Breaker, ok: bool | None, seconds: float = 0.0) -> bool:
    """Make a call of so many seconds if it is let through; whether it was."""
    number = breaker.begin()
    if number is not None:
        assert isinstance(breaker.clock, ManualClock)
        breaker.clock.advance(seconds)
        breaker.end(number, ok)
    return number is not None


def fail(breaker: Breaker, times: int) -> None:
    for _ in range(times):
        assert call(breaker, False)


def test_it_opens_after_five_failures_in_a_row(breaker: Breaker) -> None:
    fail(breaker, 4)
    assert call(breaker, True)
    fail(breaker, 4)
    assert breaker.state == "closed"
    fail(breaker, 1)
    assert breaker.state == "open"
    assert not breaker.usable
    assert not call(breaker, True)


def test_one_call_tries_and_its_success_closes(breaker: Breaker, clock: ManualClock) -> None:
    fail(breaker, 5)
    clock.advance(1.0)
    assert breaker.state == "half-open"
    probe = breaker.begin()
    assert probe is not None
    assert (breaker.state, breaker.usable, breaker.begin()) == ("half-open", False, None)
    breaker.end(probe, True)
    assert breaker.state == "closed"
    fail(breaker, 4)
    assert breaker.state == "closed", "it has forgotten the failures of before"


@pytest.mark.parametrize(("seconds", "longest"), [(0.0, 4), (0.1, 10), (1.0, 60)])
def test_the_delay_doubles_up_to_a_minute_and_starts_anew_after_a_success(
    breaker: Breaker, clock: ManualClock, seconds: float, longest: float
) -> None:
    """To less than a minute where the tries take less than a hundredth of the time all the same."""
    fail(breaker, 5)
    delays = []
    for _ in range(9):
        waited = 0.0
        while breaker.state == "open":
            waited += 0.5
            clock.advance(0.5)
        delays.append(waited)
        assert call(breaker, False, seconds)
    assert delays == [min(each, longest) for each in (1, 2, 4, 8, 16, 32, 60, 60, 60)]
    clock.advance(60)
    assert call(breaker, True)
    fail(breaker, 5)
    clock.advance(1)
    assert breaker.state == "half-open"


def test_an_end_that_tells_nothing_neither_opens_nor_closes(breaker: Breaker, clock: ManualClock) -> None:
    fail(breaker, 4)
    assert call(breaker, None)
    fail(breaker, 1)
    assert not breaker.usable
    clock.advance(1)
    assert call(breaker, None)
    assert (breaker.state, breaker.usable) == ("half-open", True), "the next one tries"
    assert call(breaker, True)
    assert (breaker.state, breaker.usable) == ("closed", True)


def test_failures_that_were_under_way_when_it_opened_do_not_prolong_it(breaker: Breaker, clock: ManualClock) -> None:
    numbers = [breaker.begin() for _ in range(20)]
    for number in numbers:
        assert number is not None
        breaker.end(number, False)
    clock.advance(1)
    assert breaker.state == "half-open"


def test_a_call_that_hangs_holds_it_open_until_it_returns(breaker: Breaker, clock: ManualClock) -> None:
    hung = breaker.begin()
    assert hung is not None
    clock.advance(4)
    assert call(breaker, True)
    clock.advance(2)
    assert (breaker.state, breaker.usable) == ("open", False)
    breaker.end(hung, True)
    assert (breaker.state, breaker.usable) == ("closed", True)


def test_a_try_that_hangs_is_followed_by_no_other(breaker: Breaker, clock: ManualClock) -> None:
    fail(breaker, 5)
    clock.advance(1)
    probe = breaker.begin()
    assert probe is not None
    clock.advance(1000)
    assert breaker.begin() is None
    breaker.end(probe, False)
    assert breaker.state == "open"
    clock.advance(2)
    assert call(breaker, True)


@given(st.lists(st.one_of(st.booleans().map(lambda ok: ("call", ok)), st.floats(0, 100).map(lambda s: ("wait", s)))))
def test_it_always_closes_again_once_calls_succeed(history: list[tuple[str, float]]) -> None:
    clock = ManualClock()
    breaker = Breaker(clock)
    failures = 0
    for what, value in history:
        if what == "wait":
            clock.advance(value)
        elif call(breaker, bool(value)):
            failures = 0 if value else failures + 1
        assert (breaker.state == "closed") == (failures < 5)
    clock.advance(60)
    assert call(breaker, True)
    assert breaker.state == "closed"
