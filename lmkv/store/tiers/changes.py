"""`Changes`: marks changes of a store, so that one that is cut short by an exception is put right."""

from __future__ import annotations

import logging
from collections.abc import Callable

from attrs import define, field

from lmkv.errors import safe_repr
from lmkv.store.tiers.attempt import attempt

logger = logging.getLogger(__name__)


@define(eq=False)
class Changes:
    """A context within the store's lock: `with self._lock, self._changes`.

    Ctrl-C, or a MemoryError, may come between any two lines. So the mark is set before the first line of a change, and
    goes after its last one. The next change that finds it set calls `repair` first, which counts everything anew. An
    exception within these methods, too, leaves the mark where it has to be; the lock is C's, and leaves no gap.
    """

    repair: Callable[[], None] = field(default=lambda: None)
    cut_short: bool = False
    lost: list[object] = field(init=False, factory=list)
    """What else has to be counted anew. To append to a list is C's: no Ctrl-C comes into it, wherever it is done."""

    def __enter__(self) -> None:
        if self.cut_short or self.lost:
            self.put_right()
        self.cut_short = True

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        if kind is None:
            self.cut_short = False

    def put_right(self) -> None:
        """Locked. Repair now."""
        self.cut_short = True
        self.lost.clear()
        attempt(self.repair, lambda error: logger.error("lmkv: a store cannot be put right: %s", safe_repr(error)))
