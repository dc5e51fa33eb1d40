"""`Freezer`: has Python's garbage collector leave the entries of an index alone."""

from __future__ import annotations

import gc
import threading
from typing import Any

from attrs import define

_GROWN, _REPLACED = 1 << 14, 1 << 17

_wanted = threading.Event()


@define(eq=False)
class Freezer:
    """Has `gc.freeze` called as an index grows, and when many of its entries were replaced.

    A full collection looks at every object in all indexes, and stops all threads meanwhile: 0.7 s with three million
    chunks. Entries are never part of a cycle, so that they are freed without it. `gc.freeze` is called when the next
    full collection has ended, so that no garbage is kept. But a cycle that was in use then stays in memory for ever.
    """

    _size: int = 0
    _new: int = 0

    def added(self, count: int, size: int) -> None:
        """Note `count` new entries of an index that has `size` now. Called under the store's lock."""
        self._new += count
        self._size = min(self._size, size)
        if size - self._size >= _GROWN or self._new >= _REPLACED:
            self._size, self._new = size, 0
            if _collected not in gc.callbacks:
                gc.callbacks.append(_collected)
            _wanted.set()


def _collected(phase: str, info: dict[str, Any]) -> None:
    """Freeze after a full collection. The collector calls this on any thread."""
    if phase == "stop" and info["generation"] == 2 and _wanted.is_set():
        _wanted.clear()
        gc.freeze()
