"""Loads that do not fit host memory at once: read, copied and released piece by piece between steps."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from attrs import define

from lmkv.memory.copier import ChunkCopy
from lmkv.protocols import ChunkKey, Clock
from lmkv.store.leases import Lease
from lmkv.store.promotion import Promotion
from lmkv.store.tiered import TieredStore
from lmkv.vllm.geometry import Geometry
from lmkv.vllm.scheduler.request import RequestState


@define(eq=False)
class LoadWindow:
    """Copies of one piece, the lease that holds their slots, and whether the request's load ends with it."""

    copies: list[ChunkCopy]
    lease: Lease
    failed_blocks: list[int]
    last: bool


@define(eq=False)
class AsyncLoad:
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

    def advance(self) -> LoadWindow | None:
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
        return self._next_window(lease)

    def _look_ahead(self) -> None:
        if self._promotion is None and not self.ended:
            upto = self._done + self.copying
            if upto < len(self.keys):
                self._promotion = self.store.promote(self.keys[upto:], limit=self.window)
                self._asked = self.clock()

    def _next_window(self, lease: Lease) -> LoadWindow:
        size = self.geometry.chunk_size
        base = self.start // size + self._done
        low, high = max(self.start, base * size), min(self.end, (base + len(lease)) * size)
        copies = self.geometry.load_copies(lease.slots, self.block_ids, low, high)
        self.copying = len(lease)
        self.ended = high >= self.end
        return LoadWindow(copies, lease, [], self.ended)

    def _unfilled(self) -> list[int]:
        size = self.geometry.chunk_size
        low = max(self.start, (self.start // size + self._done) * size)
        return self.geometry.blocks_between(self.block_ids, low, self.end)

    def give_up(self) -> LoadWindow:
        """End here: a piece without copies, naming the blocks that were not filled."""
        self.ended = True
        self._drop_promotion()
        return LoadWindow([], self.store.lease(()), self._unfilled(), last=True)

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


class AsyncLoadAdmission:
    """Who holds blocks that are being filled, or have been, and does not compute yet.

    vLLM cannot take such blocks back. Before it lets another such request in, it sets aside what the others
    still need; but vLLM 0.32 sets too little aside for layers with a window, and two requests that hold can
    wait for each other for ever. Of such models another one is let in only when the free blocks suffice for
    all of them. `free_blocks`: how many vLLM has.
    """

    def __init__(self, geometry: Geometry) -> None:
        self._geometry = geometry
        self._unreserved = any(group.window is not None for group in geometry.groups)
        self._requests: dict[str, RequestState] = {}
        self.free_blocks: Callable[[], int] = lambda: 0

    def admits(self, state: RequestState) -> bool:
        """Whether the request may become one of them now."""
        others = [other for other in self._requests.values() if other is not state]
        if not others or not self._unreserved:
            return True
        lengths = [other.request.num_tokens for other in (*others, state)]
        return sum(map(self._geometry.most_blocks, lengths)) <= self.free_blocks()

    def begin(self, state: RequestState) -> None:
        self._requests[state.request_id] = state

    def end(self, state: RequestState) -> None:
        """It computes, or has lost its blocks, or is gone."""
        self._requests.pop(state.request_id, None)
