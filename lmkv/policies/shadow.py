"""`Shadow`: a tier of keys without bytes. It tells how much a policy would find with a given capacity."""

from __future__ import annotations

from collections.abc import Sequence

from attrs import define, field

from lmkv.protocols import ChunkKey, Policy, TakesHints


@define(eq=False)
class Shadow:
    """The keys that a tier of `capacity` bytes would have with this policy. Not thread-safe.

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
    """Bytes that were inserted."""
    _sizes: dict[ChunkKey, int] = field(init=False, factory=dict)

    def __len__(self) -> int:
        return len(self._sizes)

    def __contains__(self, key: ChunkKey) -> bool:
        return key in self._sizes

    def request(self, keys: Sequence[ChunkKey], size: int) -> int:
        """Replay a request for a chain, head first, of chunks of `size` bytes; returns how many leading ones are here.

        Missing chunks are inserted, as many as fit beside those of the chain that are here.
        """
        hit = self.leading(keys)
        if hit < len(keys):
            self._insert(keys, hit, size)
        self.policy.touch(keys)
        return hit

    def leading(self, keys: Sequence[ChunkKey]) -> int:
        """How many leading chunks are here."""
        sizes = self._sizes
        hit = 0
        for key in keys:
            if key not in sizes:
                break
            hit += 1
        return hit

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
        """Pass a hint on to the policy, about those of the keys that are here."""
        here = [key for key in keys if key in self._sizes]
        if here and isinstance(self.policy, TakesHints):
            self.policy.hint(here, priority)

    def evict(self, nbytes: float, protect: set[ChunkKey]) -> bool:
        victims = self.policy.evict(-int(-nbytes // 1), protect)
        for key in victims or ():
            self.used -= self._sizes.pop(key)
        return victims is not None

    def resize(self, capacity: float) -> None:
        """Change the capacity; evicts at once when it shrinks."""
        self.capacity = capacity
        if self.used > capacity:
            self.evict(self.used - capacity, set())
