"""Loads that do not fit host memory at once: read, copied and released piece by piece between steps."""

from __future__ import annotations

from collections.abc import Sequence

from attrs import define

from lmkv.claims import Lease
from lmkv.copier import ChunkCopy
from lmkv.promotion import Promotion
from lmkv.protocols import ChunkKey, Clock
from lmkv.tiered import TieredStore
from lmkv.vllm.geometry import Geometry


@define(eq=False)
class Piece:
    """Copies of one piece, the lease that holds their slots, and whether the request's load ends with it."""

    copies: list[ChunkCopy]
    lease: Lease
    failed_blocks: list[int]
    last: bool


@define(eq=False)
class Stream:
    """An asynchronous load of tokens [start, end) of one request into its blocks.

    At most `window` chunks are held at a time, one piece being copied while the next is being read. Ends
    early, naming the blocks that were not filled, when a chunk is lost or nothing arrives for `patience`
    seconds.
    """

    store: TieredStore
    geometry: Geometry
    keys: Sequence[ChunkKey]
    """Of the chunks from the one that holds `start`."""
    block_ids: Sequence[Sequence[int]]
    start: int
    end: int
    window: int
    patience: float
    clock: Clock
    stopped: bool = False
    ended: bool = False
    copying: int = 0
    _done: int = 0
    _promotion: Promotion | None = None
    _asked: float = 0.0

    @property
    def first_chunk(self) -> int:
        """Number of the first chunk that the load touches."""
        return self.start // self.geometry.chunk_size

    def advance(self) -> Piece | None:
        """The next piece that can be copied now, or None. Never waits."""
        if self.stopped and not self.ended:
            return self.give_up()
        self._look_ahead()
        if self.ended or self.copying:
            return None
        promotion = self._promotion
        assert promotion is not None
        stalled = self.clock() - self._asked > self.patience
        if not promotion.done and not stalled:
            return None
        lease = self.store.lease(promotion.keys)
        self._drop_promotion()
        if not lease:
            return self.give_up()
        return self._piece(lease)

    def _look_ahead(self) -> None:
        if self._promotion is None and not self.ended:
            upto = self._done + self.copying
            if upto < len(self.keys):
                self._promotion = self.store.promote(self.keys[upto:], limit=self.window)
                self._asked = self.clock()

    def _piece(self, lease: Lease) -> Piece:
        size = self.geometry.chunk_size
        base = self.start // size + self._done
        low, high = max(self.start, base * size), min(self.end, (base + len(lease)) * size)
        copies = self.geometry.load_copies(lease.slots, self.block_ids, low, high)
        self.copying = len(lease)
        self.ended = high >= self.end
        return Piece(copies, lease, [], self.ended)

    def _unfilled(self) -> list[int]:
        size = self.geometry.chunk_size
        low = max(self.start, (self.start // size + self._done) * size)
        return self.geometry.blocks_between(self.block_ids, low, self.end)

    def give_up(self) -> Piece:
        """End here: a piece without copies, naming the blocks that were not filled."""
        self.ended = True
        self._drop_promotion()
        return Piece([], self.store.lease(()), self._unfilled(), last=True)

    def copied(self) -> None:
        """The piece that was being copied has been, so that its slots could be released."""
        self._done += self.copying
        self.copying = 0

    def stop(self) -> None:
        """A piece failed, or the request is gone: nothing more is copied, what is unfilled is reported.

        The request's blocks stay allocated until the load is reported as ended.
        """
        self.stopped = True
        self.copying = 0
        self._drop_promotion()

    def _drop_promotion(self) -> None:
        if self._promotion is not None:
            self._promotion.release()
            self._promotion = None
