"""`WeightedAge` keeps reused chunks longer than chunks that were used once. `ADAPTIVE` learns how much longer, with
simulated tiers (`Shadow`).
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence, Set
from itertools import takewhile
from typing import Final

from attrs import define, field

from lmkv.policies.base import DEPTH, FORK, Ghosts, PolicyBase
from lmkv.protocols import ChunkKey, Policy, TakesHints

_GHOST_SHARE = 4
"""Total size of the evicted chunks to remember, as a multiple of the tier's capacity."""


@define(eq=False, repr=False)
class WeightedAge(PolicyBase):
    """Evicts the chunk with the longest time since its last use. For chunks that were used again, this time is first
    divided by `weight`.

    With a weight of 1, the policy is LRU. With a larger weight, chunks that were used only once are evicted sooner. A
    chunk that comes back after its eviction counts as used again.

    Parameters
    ----------
    weight : float
        The divisor, 1 or more.

    Examples
    --------
    >>> policy = WeightedAge(weight=4)
    >>> for name in (b"a", b"b", b"c"):
    ...     policy.insert(name, size=10)
    ...     policy.touch([name])
    >>> policy.touch([b"a"])
    >>> policy.evict(15)
    [b'b', b'c']
    """

    weight: float = field(default=2.0)
    once: OrderedDict[ChunkKey, int] = field(init=False, factory=OrderedDict)
    """For each key that was used once, the time of its last use; negative until the request that inserted the key has
    touched it.
    """
    again: OrderedDict[ChunkKey, int] = field(init=False, factory=OrderedDict)
    now: int = field(init=False, default=1)
    """The policy's clock, which is the number of uses of chunks so far."""
    ghosts: Ghosts = field(init=False, factory=Ghosts)

    def add(self, key: ChunkKey) -> None:
        if key in self.ghosts.keys:
            self.ghosts.discard(key)
            self.again[key] = self.now
        else:
            self.once[key] = -self.now

    def use(self, keys: Sequence[ChunkKey]) -> None:
        once, again, now = self.once, self.again, self.now
        for key in reversed(keys):
            if key in again:
                again[key] = now
                again.move_to_end(key)
            elif key in once:
                if once[key] < 0:
                    once[key] = now
                    once.move_to_end(key)
                else:
                    del once[key]
                    again[key] = now
        self.now = now + len(keys)

    def pop(self) -> ChunkKey | None:
        once, again = self.once, self.again
        if once and again:
            age = self.now - abs(once[next(iter(once))])
            queue = once if age * self.weight >= self.now - again[next(iter(again))] else again
        else:
            queue = once or again
        return queue.popitem(last=False)[0] if queue else None

    def put_back(self, key: ChunkKey) -> None:
        # It waited for chunks behind it, so it was used whenever they were.
        again = self.again
        again[key] = again[next(iter(again))] if again else self.now
        again.move_to_end(key, last=False)

    def rejoin(self, key: ChunkKey) -> None:
        self.again[key] = self.now

    def evicted(self, key: ChunkKey, size: int) -> None:
        self.ghosts.add(key, size)
        self.ghosts.trim(_GHOST_SHARE * self.total_bytes)

    def drop(self, key: ChunkKey) -> None:
        if self.once.pop(key, None) is None:
            del self.again[key]


WEIGHTS: Final = (1.0, 2.0, 4.0, 16.0)
_SAMPLED_CHUNKS: Final = 1024
"""Largest number of chunks in a shadow."""
_MEMORY: Final = 20.0
"""A hit counts only half once later requests have asked for 20 times the tier's capacity."""
_MARGIN: Final = 0.01
"""Another weight replaces the present weight if its shadow finds more tokens by at least this share."""


@define(eq=False, repr=False)
class ADAPTIVE(WeightedAge):
    """A `WeightedAge` policy that learns from the requests which weight gives the most hit tokens.

    For each weight there is a *shadow*: a simulated tier, with keys but without bytes, which replays a sample of the
    requests. Prompts with a common prefix are all in the sample, or none is. The policy uses the weight of the shadow
    with the most hits; older hits count less. A change of the weight costs nothing, because the order of the queues
    does not depend on the weight.

    Parameters
    ----------
    position_cost : float
        The additional value of a hit for each chunk before it in the prompt. With 0, the policy maximizes the number
        of hit tokens. With 1e-3, a hit at chunk 1,000 counts twice as much as a hit at the first chunk. A hit at a
        later chunk saves more time, because its attention takes longer to compute.

    Notes
    -----
    The shadows of a large tier have a sample of about 1,024 chunks, which saves time.

    Examples
    --------
    >>> policy = ADAPTIVE()
    >>> for name in (b"a", b"b", b"c"):
    ...     policy.insert(name, size=10)
    ...     policy.touch([name])
    >>> policy.touch([b"a"])
    >>> policy.evict(15)
    [b'b', b'c']
    """

    position_cost: float = 0.0
    _shadows: list[Shadow] = field(init=False)
    _scores: list[float] = field(init=False)
    _chosen: int = field(init=False, default=1)
    _rate: float = field(init=False, default=1.0)
    _full: bool = field(init=False, default=False)
    _capacity: float = field(init=False, default=0.0)

    def __attrs_post_init__(self) -> None:
        self._begin()
        self.weight = WEIGHTS[self._chosen]

    def _begin(self) -> None:
        self._shadows = [Shadow(WeightedAge(weight), float("inf")) for weight in WEIGHTS]
        self._scores = [0.0] * len(WEIGHTS)

    def touch(self, keys: Sequence[ChunkKey]) -> None:
        super().touch(keys)
        nodes, last = self.nodes, len(keys) - 1
        if last < 0:
            return
        shared = range(min(last, DEPTH), 0, -1)
        own = next((at for at in shared if keys[at - 1] in nodes and nodes[keys[at - 1]][FORK]), 0)
        if int.from_bytes(keys[own][:4]) < self._rate * (1 << 32):
            self._try(keys, own)

    def hint(self, keys: Sequence[ChunkKey], priority: int) -> None:
        super().hint(keys, priority)
        for shadow in self._shadows:
            shadow.hint(keys, priority)

    def _try(self, keys: Sequence[ChunkKey], own: int) -> None:
        """Replay a request in all shadows. The first `own` chunks of `keys` are shared with requests outside the
        sample.
        """
        size, scores = self._largest, self._scores
        if not size:
            return
        if self._rate < 1:
            keys = keys[own:]
        decay = 0.5 ** (len(keys) * size / (_MEMORY * self._shadows[0].capacity))
        best = self._chosen
        for number, shadow in enumerate(self._shadows):
            hit = shadow.request(keys, size)
            scores[number] = scores[number] * decay + hit * (1 + self.position_cost * (own + hit / 2))
            if scores[number] > scores[best]:
                best = number
        if not self._full and len(self._shadows[0]) > _SAMPLED_CHUNKS:
            self._rate /= 2
            self._begin()
        elif self._full and scores[best] > scores[self._chosen] * (1 + _MARGIN):
            self._chosen = best
            self.weight = WEIGHTS[best]

    def evict(self, nbytes: int, protect: Set[ChunkKey] = frozenset()) -> list[ChunkKey] | None:
        self._full = True
        # About the tier's capacity; evicting for a long prompt begins before all of it is used.
        self._capacity = max(self.total_bytes, 0.99 * self._capacity, 1)
        for shadow in self._shadows:
            shadow.resize(self._rate * self._capacity)
        return super().evict(nbytes, protect)


@define(eq=False)
class Shadow:
    """A simulated tier of `capacity` bytes with a policy. A shadow has keys, but no bytes of chunks. Not thread-safe.

    Examples
    --------
    >>> from lmkv.policies import LRU
    >>> shadow = Shadow(LRU(), capacity=20)
    >>> shadow.request([b"a", b"b"], 10), shadow.request([b"a", b"c"], 10), shadow.request([b"a", b"b"], 10)
    (0, 1, 1)
    """

    policy: Policy
    capacity: float
    used: int = 0
    written: int = 0
    """Number of bytes that were inserted so far."""
    _sizes: dict[ChunkKey, int] = field(init=False, factory=dict)

    def __len__(self) -> int:
        return len(self._sizes)

    def __contains__(self, key: ChunkKey) -> bool:
        return key in self._sizes

    def request(self, keys: Sequence[ChunkKey], size: int) -> int:
        """Replay a request for the chunks `keys`, of `size` bytes each. Returns how many of the first chunks were
        present.

        Missing chunks are inserted. If the prompt exceeds the capacity, its last chunks are not inserted.
        """
        hit = self.leading(keys)
        if hit < len(keys):
            self._insert(keys, hit, size)
        self.policy.touch(keys)
        return hit

    def leading(self, keys: Sequence[ChunkKey]) -> int:
        """Return how many chunks, from `keys[0]` on, are present."""
        return len(list(takewhile(self._sizes.__contains__, keys)))

    def _insert(self, keys: Sequence[ChunkKey], hit: int, size: int) -> None:
        sizes = self._sizes
        missing = [at for at in range(hit, len(keys)) if keys[at] not in sizes]
        over = self.used + len(missing) * size - self.capacity
        if over > 0:
            chain = set(keys)
            if not self.evict(over, chain):
                here = sum(sizes[key] for key in chain if key in sizes)
                missing = missing[: max(0, int(self.capacity - here) // size)]
                over = self.used + len(missing) * size - self.capacity
                if over > 0:
                    self.evict(over, chain)
        new = [keys[at] for at in missing]
        self.policy.insert_chain(new, size, [keys[at - 1] if at else b"" for at in missing])
        sizes.update(dict.fromkeys(new, size))
        self.used += len(missing) * size
        self.written += len(missing) * size

    def hint(self, keys: Sequence[ChunkKey], priority: int) -> None:
        """Pass a hint to the policy for those of `keys` that are present."""
        here = [key for key in keys if key in self._sizes]
        if here and isinstance(self.policy, TakesHints):
            self.policy.hint(here, priority)

    def evict(self, nbytes: float, protect: set[ChunkKey]) -> bool:
        victims = self.policy.evict(-int(-nbytes // 1), protect)
        for key in victims or ():
            self.used -= self._sizes.pop(key)
        return victims is not None

    def resize(self, capacity: float) -> None:
        """Change the capacity in bytes. If the used bytes exceed the new capacity, chunks are evicted now."""
        self.capacity = capacity
        if self.used > capacity:
            self.evict(self.used - capacity, set())
