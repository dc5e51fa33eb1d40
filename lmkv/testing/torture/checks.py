"""Checks beside answers: reported hits can be true, and nothing is left over."""

from __future__ import annotations

import time
from collections.abc import Callable, Hashable, Sequence
from typing import Any

from attrs import asdict, define, field

from lmkv.testing.torture.engine import Engine


@define
class Problem:
    """A failed check, of a `kind`: difference, truthfulness, leak, hang, or death, of the process.

    `request`: whose answer it is. `expected`, `given`: tokens, which differ at `position`.
    """

    kind: str
    text: str
    request: str = ""
    expected: list[int] = field(factory=list)
    given: list[int] = field(factory=list)
    position: int | None = None

    @property
    def nature(self) -> str:
        """Equal for problems of the same kind; deaths are by the same exception, too."""
        return f"{self.kind} {self.text.partition(':')[0]}" if self.kind == "death" else self.kind

    def as_json(self) -> dict[str, Any]:
        return asdict(self)


@define
class Prefixes:
    """All tokens of all requests so far, by salt, adapter and weights. Nothing else can have been cached."""

    _seen: dict[Hashable, list[Sequence[int]]] = field(factory=dict)

    def add(self, scope: Hashable, tokens: Sequence[int]) -> None:
        self._seen.setdefault(scope, []).append(tokens)

    def longest(self, scope: Hashable, tokens: Sequence[int]) -> int:
        """Tokens of the longest beginning that an earlier request had as well."""
        return max((_common(tokens, seen) for seen in self._seen.get(scope, ())), default=0)


def _common(first: Sequence[int], second: Sequence[int]) -> int:
    count = 0
    for one, other in zip(first, second, strict=False):
        if one != other:
            break
        count += 1
    return count


def untrue(cached: int, prompt: int, longest: int) -> str | None:
    """Why a prompt of so many tokens cannot have had `cached` of them; None if it can.

    The last token is computed in any case, and nobody had more than the `longest` beginning of an earlier request.
    """
    if cached > prompt - 1:
        return f"{cached} tokens are reported as cached, of a prompt of {prompt}, whose last one is always computed"
    if cached > longest:
        others = "no earlier request with the same salt, adapter and weights"
        return f"{cached} tokens are reported as cached, and {others} began with more than {longest} of them"
    return None


def leak(engine: Engine, patience: float, tick: Callable[[], None]) -> Problem | None:
    """Wait until all blocks and requests are given back, with `tick` to go on; what is left when patience ends."""
    deadline = time.monotonic() + patience
    while left := engine.left():
        if time.monotonic() > deadline:
            return Problem("leak", f"{left}, {patience:.0f} s after the last request")
        tick()
        time.sleep(0.002)
    return None
