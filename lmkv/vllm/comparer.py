"""`Comparer`: compares chunks on a thread of its own, after a worker has copied them into slots or read them back."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor

from attrs import frozen
from cachetools import LRUCache

from lmkv.chunks.layout import KVLayout
from lmkv.memory.comparison import Comparison, Difference, Part
from lmkv.memory.device import Staging
from lmkv.memory.paged import PagedMemory
from lmkv.memory.readback import Digests, ReadBack, Reading
from lmkv.memory.slab import SlabMap
from lmkv.vllm.metadata import CopyOrder, ReadOrder

_REMEMBERED = 10_000_000
"""Digests of audited loads that are kept until their blocks are given up: 80 MB."""


def _number(digests: Digests) -> int:
    return sum(len(copy) for part in digests for copy in part)


@frozen
class Comparing:
    """The end of an order's comparison, as the event of its copy. All but `wait` raise what the comparison raised."""

    _future: Future[list[Difference]]

    def query(self) -> bool:
        if not self._future.done():
            return False
        self._future.result()
        return True

    def wait(self) -> None:
        self._future.exception()

    @property
    def differences(self) -> list[Difference]:
        """The chunks that differ. Call it once the comparison has ended."""
        return self._future.result()


class Comparer:
    """Compares what orders have copied, one order after the other, for one rank.

    No slot of an order is changed until its `Comparing` has ended.
    """

    def __init__(self, rank: int) -> None:
        self._rank = rank
        self._pool: ThreadPoolExecutor | None = None
        self._parts: Sequence[Part] = ()
        self._layout: KVLayout | None = None
        self._back: ReadBack | None = None
        self.forget()

    def register(
        self, memory: PagedMemory, layout: KVLayout | None, parts: Sequence[Part], staging: Staging | None
    ) -> None:
        """Set the paged memory that is read back. `parts`: of its pages, by layer."""
        self._parts, self._layout = parts, layout
        self._back = None if layout is None else ReadBack(memory, layout, parts, self._rank, staging)
        self.forget()

    def forget(self) -> None:
        """The paged memory loses its pages: also what is being compared now is not looked at again."""
        self._loaded: LRUCache[int, Digests] = LRUCache(_REMEMBERED, _number)

    def begin(self, order: CopyOrder, slab: SlabMap | None) -> Comparing:
        """Compare what a store has copied. The copy has ended."""
        assert self._layout is not None
        assert slab is not None
        comparison = Comparison(self._layout, slab, self._rank, self._parts)
        return self._submit(lambda: comparison.differences(order.copies, order.compares))

    def read(self, order: CopyOrder | ReadOrder) -> Reading:
        """Read the blocks of an order, in the order of all that was launched until now."""
        assert self._back is not None
        return self._back.begin(order.copies)

    def compare_load(self, order: CopyOrder, reading: Reading, slab: SlabMap | None) -> Comparing:
        """Compare what was read after a load with the slots, and remember it. The reading has ended."""
        back, loaded = self._back, self._loaded
        assert back is not None
        assert slab is not None

        def differences() -> list[Difference]:
            found = back.digests(reading, order.copies)
            wrong = back.differences(order.copies, found, back.of_slots(order.copies, slab))
            if not wrong and _number(found) <= _REMEMBERED:
                loaded[order.job] = found
            return wrong

        return self._submit(differences)

    def compare_again(self, order: ReadOrder, reading: Reading) -> Comparing:
        """Compare what was read with what was read after the load, and forget that. The reading has ended."""
        back, loaded = self._back, self._loaded
        assert back is not None

        def differences() -> list[Difference]:
            known = loaded.pop(order.load, None)
            found = back.digests(reading, order.copies)
            return [] if known is None else back.differences(order.copies, found, known)

        return self._submit(differences)

    def _submit(self, compare: Callable[[], list[Difference]]) -> Comparing:
        self._pool = self._pool or ThreadPoolExecutor(1, "lmkv-compare")
        return Comparing(self._pool.submit(compare))

    def close(self) -> None:
        """Wait for the comparison under way. Idempotent."""
        if self._pool is not None:
            self._pool.shutdown()
