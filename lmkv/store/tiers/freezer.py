"""`Freezer`: has Python's garbage collector leave the entries of an index alone."""

from __future__ import annotations

import gc

from attrs import define

_GROWN, _REPLACED = 1 << 14, 1 << 17


@define(eq=False)
class Freezer:
    """Calls `gc.freeze` as an index grows, and when many of its entries were replaced. Called under the store's lock.

    A full collection looks at every object in all indexes, and stops all threads meanwhile: 0.7 s with three million
    chunks. Entries are never part of a cycle, so that they are freed without it. What else is alive then is not looked
    at again, either: a cycle of it that becomes garbage later stays in memory. So this is done seldom.
    """

    _largest: int = 0
    _new: int = 0

    def added(self, count: int, size: int) -> None:
        """Note `count` new entries of an index that has `size` now."""
        self._new += count
        if size - self._largest >= _GROWN or self._new >= _REPLACED:
            self._largest, self._new = max(self._largest, size), 0
            gc.freeze()
