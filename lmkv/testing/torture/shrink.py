"""Finds the smallest list that still fails, by delta debugging."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import TypeVar

from attrs import evolve

from lmkv.testing.torture.schedule import Operation

T = TypeVar("T")


def shrink(
    items: Sequence[T],
    fails: Callable[[list[T]], bool],
    *,
    simpler: Callable[[T], Iterable[T]] = lambda item: (),
    over: Callable[[], bool] = lambda: False,
) -> list[T]:
    """The items without those that the failure does not need, and with simpler ones for others.

    `fails`: whether a list still does. `over`: whether the time has come to be content with what there is.
    """
    found = _without_parts(list(items), fails, over)
    for index in range(len(found)):
        found = _with_simpler(found, index, fails, simpler, over)
    return found


def _without_parts(items: list[T], fails: Callable[[list[T]], bool], over: Callable[[], bool]) -> list[T]:
    size = max(1, len(items) // 2)
    while True:
        start, before = 0, len(items)
        while start < len(items):
            if over():
                return items
            rest = items[:start] + items[start + size :]
            if rest and fails(rest):
                items = rest
            else:
                start += size
        if size == 1 and len(items) == before:
            return items
        size = max(1, size // 2)


def _with_simpler(
    items: list[T],
    index: int,
    fails: Callable[[list[T]], bool],
    simpler: Callable[[T], Iterable[T]],
    over: Callable[[], bool],
) -> list[T]:
    """The items with the simplest one at this place that still fails."""
    again = True
    while again:
        again = False
        for candidate in simpler(items[index]):
            if over():
                return items
            changed = [*items[:index], candidate, *items[index + 1 :]]
            if fails(changed):
                items, again = changed, True
                break
    return items


def simpler(operation: Operation) -> Iterator[Operation]:
    """Operations that ask for less than this one."""
    if operation.salt:
        yield evolve(operation, salt="")
    if operation.lora:
        yield evolve(operation, lora=0)
    if operation.max_tokens > 1:
        yield evolve(operation, max_tokens=1)
    if len(operation.prompt) > 1:
        yield evolve(operation, prompt=operation.prompt[:-1])
        yield evolve(operation, prompt=operation.prompt[1:])
    if operation.running:
        yield evolve(operation, running=False)
    if operation.weights:
        yield evolve(operation, weights=0)
    if operation.do == "step" and operation.count > 1:
        yield evolve(operation, count=1)
