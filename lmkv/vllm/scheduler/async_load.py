"""Asynchronous loads: chunks pass through host memory window by window, between steps."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from attrs import define, field

from lmkv.chunks.hashing import StateKey
from lmkv.memory.copier import ChunkCopy
from lmkv.protocols import ChunkKey, Clock
from lmkv.store.leases import Lease
from lmkv.store.promotion import Promotion
from lmkv.store.tiered import TieredStore
from lmkv.vllm.block_map import BlockMap
from lmkv.vllm.requests.request import RequestState


@define(eq=False)
class LoadWindow:
    """Copies of `tokens`, to be ordered together. `lease`: of their slots. `last`: the load ends with this window.

    `first`: number of the first chunk.
    """

    copies: list[ChunkCopy]
    lease: Lease
    failed_blocks: list[int]
    last: bool
    tokens: int = 0
    first: int = 0


@define(eq=False)
class AsyncLoad:
    """Loads tokens [start, end) of one request into its blocks, while the request does not compute.

    `keys`: of the chunks from the one that contains token `start`, and of the states behind the last of them. While
    up to `window` of them are copied the next ones are promoted, so that a load references 2 * `window` slots at most.
    It ends early, naming the blocks that were not filled, when one is lost, none arrives for `timeout` seconds, or all
    its waits together last longer than `limit` seconds.
    """

    store: TieredStore = field(repr=False)
    block_map: BlockMap = field(repr=False)
    keys: Sequence[ChunkKey] = field(repr=lambda keys: f"<{len(keys)} keys>")
    block_ids: Sequence[list[int]] = field(repr=False)
    start: int
    end: int
    window: int
    timeout: float
    clock: Clock = field(repr=False)
    limit: float
    promote: Callable[..., Promotion] = field(repr=False)
    """As `TieredStore.promote`."""
    stopped: bool = False
    abandoned: bool = False
    """Its request has ended: nobody computes the tokens that are not loaded."""
    ended: bool = False
    copying: int = 0
    """Chunks of the window that is being copied, or 0."""
    _copied: int = 0
    _promotion: Promotion | None = None
    _waits_since: float = field(default=0.0, repr=False)
    """When the promotion began, or the copy of the window before it ended, whichever was later."""
    _waited: float = field(default=0.0, repr=False)
    """Seconds of the waits for windows before this one."""

    @property
    def first_chunk(self) -> int:
        """Number of the first chunk that the load touches."""
        return self.start // self.block_map.chunk_size

    def advance(self) -> LoadWindow | None:
        """The next window that can be copied now, or None. Never waits."""
        if self.stopped and not self.ended:
            # vLLM frees the blocks with the last window: not while the one before it is being copied into them.
            return None if self.copying else self.give_up()
        self._promote_next()
        if self.ended or self.copying:
            return None
        promotion = self._promotion
        assert promotion is not None
        waits = self.clock() - self._waits_since
        too_long = self._waited + waits > self.limit
        if not promotion.done and not too_long and waits <= self.timeout:
            return None
        self._waited += waits
        if not promotion.done and too_long:
            # The chunks that are there by now are the last to be copied.
            self.stopped = True
        # Leased before the promotion is released: in between the chunks could be evicted.
        lease = self.store.lease(promotion.keys)
        self._drop_promotion()
        if not lease:
            return self.give_up()
        return self._next_window(lease)

    def _promote_next(self) -> None:
        if self._promotion is None and not self.ended:
            upto = self._copied + self.copying
            if upto < len(self.keys):
                self._promotion = self.promote(self.keys[upto:], limit=self.window)
                self._waits_since = self.clock()

    def _next_window(self, lease: Lease) -> LoadWindow:
        size = self.block_map.chunk_size
        base = self.first_chunk + self._copied
        low, high = max(self.start, base * size), min(self.end, (base + len(lease)) * size)
        copies = self.block_map.load_copies(lease.slots, self.block_ids, low, high)
        copies += self._state_copies(lease)
        self.copying = len(lease)
        self.ended = high >= self.end and self._copied + len(lease) >= len(self.keys)
        return LoadWindow(copies, lease, [], self.ended, max(0, high - low), base)

    def _state_copies(self, lease: Lease) -> list[ChunkCopy]:
        """Copies of the states among the leased entries. Raises ValueError for a state that vLLM has no block for."""
        if not self.block_map.states:
            return []
        blocks = self.block_map.state_blocks(self.block_ids, self.end)
        copies = []
        for key, slot in zip(lease.keys, lease.slots, strict=True):
            if isinstance(key, StateKey):
                copy = self.block_map.state_copy(slot, key.number, blocks)
                if copy is None:
                    raise ValueError(f"no block for state {key.number} after {self.end} tokens")
                copies.append(copy)
        return copies

    def _unfilled(self) -> list[int]:
        low = max(self.start, (self.first_chunk + self._copied) * self.block_map.chunk_size)
        return self.block_map.blocks_between(self.block_ids, low, self.end)

    def give_up(self) -> LoadWindow:
        """End here: a last window without copies, naming the blocks that were not filled."""
        self.ended = True
        self._drop_promotion()
        return LoadWindow([], self.store.lease(()), self._unfilled(), last=True)

    def copied(self, ok: bool) -> None:
        """The copy of the window has ended on every rank, and its lease was released. After a failure it stops."""
        if ok:
            self._copied += self.copying
        else:
            self.stop()
        self.copying, self._waits_since = 0, self.clock()

    def stop(self) -> None:
        """Copy nothing after the window that is being copied, and report the unfilled blocks.

        vLLM frees the request's blocks only once the load is reported as ended, with the next window.
        """
        self.stopped = True
        self._drop_promotion()

    def _drop_promotion(self) -> None:
        if self._promotion is not None:
            self._promotion.release()
            self._promotion = None


class AsyncLoadAdmission:
    """Whether another request may have blocks that are filled between steps.

    vLLM cannot preempt a request whose blocks are being filled. Before it schedules another one it reserves
    the blocks that these still need, but vLLM 0.32 reserves too few for layers with a sliding window: two
    requests can then wait for each other's blocks for ever. For such models another request is admitted only
    when the free blocks suffice for all of them. `free_blocks()`: how many vLLM has.
    """

    def __init__(self, block_map: BlockMap) -> None:
        self._block_map = block_map
        self._has_windows = any(group.window is not None for group in block_map.groups)
        self._requests: dict[str, RequestState] = {}
        self.free_blocks: Callable[[], int] = lambda: 0

    def admits(self, state: RequestState) -> bool:
        """Whether the request may begin an asynchronous load now."""
        others = [other for other in self._requests.values() if other is not state]
        if not others or not self._has_windows:
            return True
        lengths = [other.request.num_tokens for other in (*others, state)]
        return sum(map(self._block_map.most_blocks, lengths)) <= self.free_blocks()

    def begin(self, state: RequestState) -> None:
        """Note that the request's blocks are allocated and not filled yet."""
        self._requests[state.request_id] = state

    def end(self, state: RequestState) -> None:
        """Note that the request computes, has lost its blocks, or has ended."""
        self._requests.pop(state.request_id, None)
