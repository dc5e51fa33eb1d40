"""`Comparer`: compares chunks on a thread of its own, after a worker has copied them into slots."""

from __future__ import annotations

from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor

from attrs import frozen

from lmkv.chunks.layout import KVLayout
from lmkv.memory.comparison import Comparison, Difference, Part
from lmkv.memory.slab import SlabMap
from lmkv.vllm.metadata import CopyOrder


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
    """Compares the slots of orders, one order after the other. `parts`: the numbers of this rank's memory.

    No slot of an order is changed until its `Comparing` has ended.
    """

    def __init__(self, rank: int) -> None:
        self._rank = rank
        self._pool: ThreadPoolExecutor | None = None
        self.parts: Sequence[Part] = ()

    def begin(self, order: CopyOrder, layout: KVLayout | None, slab: SlabMap | None) -> Comparing:
        """Compare what an order has copied. The copy has ended."""
        assert layout is not None
        assert slab is not None
        comparison = Comparison(layout, slab, self._rank, self.parts)
        self._pool = self._pool or ThreadPoolExecutor(1, "lmkv-compare")
        return Comparing(self._pool.submit(comparison.differences, order.copies, order.compares))

    def close(self) -> None:
        """Wait for the comparison under way. Idempotent."""
        if self._pool is not None:
            self._pool.shutdown()
