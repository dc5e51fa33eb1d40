"""`PolicyBase`: what eviction policies share, which is everything but their order."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable, Sequence, Set

from attrs import define, field

from lmkv.errors import UsageError
from lmkv.protocols import ChunkKey


@define(eq=False)
class PolicyBase(ABC):
    """Base of eviction policies: sizes, acquired keys, all-or-nothing eviction.

    A subclass keeps the order of eviction, in `touch`, `_enqueue`, `_dequeue` and `_choose`. Only evictable
    keys are in it: `_dequeue` is called when a key is acquired, `_enqueue` when it is released again.

    Notes
    -----
    Not thread-safe: the store calls its policies under its lock.

    Examples
    --------
    >>> class MRU(PolicyBase):  # evicts what was inserted or released last
    ...     def __init__(self):
    ...         super().__init__()
    ...         self.order = []
    ...     def touch(self, keys):
    ...         pass
    ...     def _enqueue(self, key):
    ...         self.order.append(key)
    ...     def _dequeue(self, key):
    ...         if key in self.order:
    ...             self.order.remove(key)
    ...     def _choose(self, nbytes, protect):
    ...         return self._first(reversed(self.order), nbytes, protect)
    >>> policy = MRU()
    >>> policy.insert(b"a", size=10)
    >>> policy.insert(b"b", size=10)
    >>> policy
    <MRU: 2 keys, 2 of them evictable>
    >>> policy.evict(5)
    [b'b']
    """

    _sizes: dict[ChunkKey, int] = field(init=False, factory=dict)
    """Bytes of each known key."""
    _acquired: set[ChunkKey] = field(init=False, factory=set)
    _evictable_bytes: int = field(init=False, default=0)

    def __repr__(self) -> str:
        evictable = len(self._sizes) - len(self._acquired)
        return f"<{type(self).__name__}: {len(self._sizes)} keys, {evictable} of them evictable>"

    def insert(self, key: ChunkKey, size: int, parent: ChunkKey = b"") -> None:
        """Add an evictable key of `size` bytes, the newest of all. Raises UsageError for a known key."""
        if key in self._sizes:
            raise UsageError(f"chunk {key.hex()} is already in the policy")
        if size < 1:
            raise UsageError(f"chunk {key.hex()} has the size {size}")
        self._sizes[key] = size
        self._evictable_bytes += size
        self._enqueue(key)

    @abstractmethod
    def touch(self, keys: Sequence[ChunkKey]) -> None:
        """Note the use of a chain's keys, given head first; the head must outlive the tail."""

    def discard(self, key: ChunkKey) -> None:
        """Forget a key, known or not."""
        size = self._sizes.pop(key, None)
        if size is None:
            return
        if key in self._acquired:
            self._acquired.remove(key)
        else:
            self._evictable_bytes -= size
        self._dequeue(key)

    def acquire(self, key: ChunkKey) -> None:
        """Keep a known key from eviction until it is released. Idempotent."""
        if key not in self._sizes:
            raise self._unknown(key)
        if key not in self._acquired:
            self._acquired.add(key)
            self._evictable_bytes -= self._sizes[key]
            self._dequeue(key)

    def release(self, key: ChunkKey) -> None:
        """A known key may be evicted again. Idempotent."""
        if key not in self._sizes:
            raise self._unknown(key)
        if key in self._acquired:
            self._acquired.remove(key)
            self._evictable_bytes += self._sizes[key]
            self._enqueue(key)

    def evict(self, nbytes: int, protect: Set[ChunkKey] = frozenset()) -> list[ChunkKey] | None:
        """Remove and return evictable keys of `nbytes` together; None, and no change, when there are not."""
        if nbytes > self._evictable_bytes:
            return None
        victims = self._choose(nbytes, protect)
        for key in victims or ():
            self._dequeue(key)
            self._evictable_bytes -= self._sizes.pop(key)
        return victims

    def _unknown(self, key: ChunkKey) -> UsageError:
        return UsageError(f"chunk {key.hex()} is not in the policy")

    def _first(self, order: Iterable[ChunkKey], nbytes: int, protect: Set[ChunkKey]) -> list[ChunkKey] | None:
        """The first keys of `order` outside `protect` that have `nbytes` together; None when all have not."""
        victims: list[ChunkKey] = []
        if nbytes <= 0:
            return victims
        for key in order:
            if key not in protect:
                victims.append(key)
                nbytes -= self._sizes[key]
                if nbytes <= 0:
                    return victims
        return None

    @abstractmethod
    def _enqueue(self, key: ChunkKey) -> None:
        """The key is evictable from now on."""

    @abstractmethod
    def _dequeue(self, key: ChunkKey) -> None:
        """The key is acquired, or unknown, from now on. It may not have been in the order."""

    @abstractmethod
    def _choose(self, nbytes: int, protect: Set[ChunkKey]) -> list[ChunkKey] | None:
        """Evictable keys outside `protect` of at least `nbytes` together, in order of eviction, or None."""
