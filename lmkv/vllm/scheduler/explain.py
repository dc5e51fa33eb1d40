"""Why the rest of a request was not loaded: `Explainer` finds the reason, a `Miss`, of its first missing chunk."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence

from lmkv.chunks.hashing import KEY_BYTES, token_bytes
from lmkv.outcomes import Presence
from lmkv.protocols import ChunkKey, Clock
from lmkv.store.tiered import TieredStore
from lmkv.vllm.plan.request import Miss, Request

_REMEMBERED = 100_000
"""Evicted chunks, and first chunks of prompts, that are remembered."""

_LAST_BOUNDARIES = 8
"""Boundaries whose missing states are explained: few, because a waiting prompt is explained in every step."""

_SHORT = 16
"""Bytes of a key that are remembered."""


_PRESENT = {Presence.READY: "too_short", Presence.PENDING: "not_ready", Presence.LOWER: "not_promoted"}


class EvictionLog:
    """A `StoreObserver` that notes which chunks each tier has removed, and when: the last `size` of each tier."""

    def __init__(self, clock: Clock, size: int = _REMEMBERED) -> None:
        self._clock = clock
        self._size = size
        # Plain floats, because the garbage collector would visit as many tuples again and again.
        self._removed: dict[str, OrderedDict[bytes, float]] = {}

    def stored(self, tier: str, key: ChunkKey) -> None:
        for removed in list(self._removed.values()):
            removed.pop(key[:_SHORT], None)

    def removed(self, tier: str, key: ChunkKey) -> None:
        if len(key) > KEY_BYTES:
            return
        removed = self._removed.get(tier)
        if removed is None:
            removed = self._removed[tier] = OrderedDict()
        short = key[:_SHORT]
        # In two steps that another thread's `forget` may come between.
        removed.pop(short, None)
        removed[short] = self._clock()
        if len(removed) > self._size:
            removed.popitem(last=False)

    def find(self, key: ChunkKey) -> tuple[str, float] | None:
        """`(tier, seconds ago)`."""
        times = [(removed.get(key[:_SHORT]), tier) for tier, removed in list(self._removed.items())]
        found = max(((when, tier) for when, tier in times if when is not None), default=None)
        return None if found is None else (found[1], self._clock() - found[0])

    def forget(self, keys: Sequence[ChunkKey] | None = None) -> None:
        """Forget these evictions: a caller deleted the chunks. `keys`: None for all. Thread-safe."""
        if keys is None:
            self._removed = {}
        for removed in list(self._removed.values()):
            for key in keys or ():
                removed.pop(key[:_SHORT], None)


class FirstChunks:
    """Notes under which roots (model, salt, tags) this process has stored prompts with the same first chunk."""

    def __init__(self, chunk_size: int, size: int = _REMEMBERED) -> None:
        self._chunk_size = chunk_size
        self._size = size
        self._roots: OrderedDict[int, int] = OrderedDict()

    def _fingerprint(self, request: Request) -> int:
        return hash(token_bytes(request.tokens(0, self._chunk_size)))

    def stored(self, request: Request) -> None:
        self._roots[self._fingerprint(request)] = hash(request.root)
        if len(self._roots) > self._size:
            self._roots.popitem(last=False)

    def stored_elsewhere(self, request: Request) -> bool:
        """Whether a prompt with the request's first chunk was stored last with another salt, or other tags."""
        root = self._roots.get(self._fingerprint(request))
        return root is not None and root != hash(request.root)

    def clear(self) -> None:
        self._roots.clear()


class Explainer:
    """Finds the reasons of misses. Called on the scheduling thread only."""

    def __init__(self, store: TieredStore, chunk_size: int, clock: Clock) -> None:
        self._store = store
        self._chunk_size = chunk_size
        self.evictions = EvictionLog(clock)
        store.catalog.add_observer(self.evictions)
        self.first_chunks = FirstChunks(chunk_size)

    def clear(self) -> None:
        """All chunks were deleted: earlier evictions explain no later miss."""
        self.evictions.forget()
        self.first_chunks.clear()

    def explain(
        self, request: Request, keys: Sequence[ChunkKey], end: int, covered: int, *, few: bool, late: bool
    ) -> Miss | None:
        """Why tokens from number `end` on are not loaded; None when they need not be.

        `keys`: those of all chunks that a load may end with. `covered`: tokens of the chunks that were found, of which
        a load need not bring all. `few`: less was found than the least that is loaded. `late`: the request may not wait
        any more.
        """
        missing = request.last_token - end
        if missing <= 0:
            return None
        index = covered // self._chunk_size
        if few or index >= len(keys):
            return Miss("limited" if request.loadable < request.last_token and not few else "too_short", missing)
        found = self._store.catalog.count_prefix(keys)[1]
        if request.states and index < found:
            return self._without_states(request, index, found, missing, late=late)
        presence = self._store.catalog.lookup([keys[index]])[0]
        if presence is Presence.MISS:
            return self._absent(request, keys[index], index, missing)
        if (
            presence is Presence.LOWER
            and request.waiting.worth_loading is not None
            and index >= request.waiting.worth_loading
        ):
            return Miss("slower", missing, self._store.catalog.tier_of(keys[index]))
        reason = "deadline" if late else _PRESENT[presence]
        return Miss(reason, missing, self._store.catalog.tier_of(keys[index]))

    def _without_states(self, request: Request, index: int, found: int, missing: int, *, late: bool) -> Miss:
        """Why a hit ends behind none of the last chunks from number `index` on, which are all there."""
        index = max(index, found - _LAST_BOUNDARIES)
        states = [key for end in range(index + 1, found + 1) for key in request.state_keys(end)]
        present = [key for key in states if self._store.catalog.lookup([key])[0] is not Presence.MISS]
        tier = next(filter(None, map(self._store.catalog.tier_of, present)), None)
        if any(set(request.state_keys(end)) <= set(present) for end in range(index + 1, found + 1)):
            reason = "deadline" if late else "slower" if request.waiting.longest_hit < found else "not_promoted"
            return Miss(reason, missing, tier)
        evicted = [gone for key in states if (gone := self.evictions.find(key)) is not None]
        if evicted:
            return Miss("evicted", missing, *min(evicted, key=lambda gone: gone[1]))
        return Miss("no_state", missing)

    def _absent(self, request: Request, key: ChunkKey, index: int, missing: int) -> Miss:
        tier = self._store.catalog.unavailable_in(key)
        if tier is not None:
            return Miss("tier_unavailable", missing, tier)
        evicted = self.evictions.find(key)
        if evicted is not None:
            return Miss("evicted", missing, *evicted)
        if request.waiting.shared_lookup is not None and not request.waiting.shared_lookup.done:
            return Miss("deadline", missing)
        other = index == 0 and self.first_chunks.stored_elsewhere(request)
        return Miss("other_salt" if other else "not_stored", missing)
