"""`PolicyBase`: one queue of keys in the order of their eviction, and those that may not be evicted now."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections import OrderedDict
from collections.abc import Sequence, Set

from attrs import define, field

from lmkv.errors import UsageError
from lmkv.protocols import ChunkKey


@define(eq=False)
class PolicyBase(ABC):
    """Base of eviction policies that keep their keys in one queue.

    A subclass decides how a use reorders it (`touch`) and where a released key goes (`_requeue`). New keys go
    to its end; its front is evicted first.

    Raises
    ------
    UsageError
        A key is inserted twice or with no size, or held or released without being known.

    Notes
    -----
    Not thread-safe: the store calls its policies under its lock. `evict` is O(victims + protected), amortised,
    all else O(1) per key: a held key leaves the queue only when its turn comes.

    Examples
    --------
    >>> class MRU(PolicyBase):  # evicts the chunk that was used last
    ...     def touch(self, keys):
    ...         for key in keys:
    ...             if key in self._queue:
    ...                 self._queue.move_to_end(key, last=False)
    ...     def _requeue(self, key, size):
    ...         self._queue[key] = size
    ...         self.touch([key])
    >>> policy = MRU()
    >>> policy.insert(b"a", size=10)
    >>> policy.insert(b"b", size=10)
    >>> policy.touch([b"b"])
    >>> policy
    <MRU: 20 evictable bytes, 0 keys held>
    >>> policy.evict(5)
    [b'b']
    """

    _queue: OrderedDict[ChunkKey, int] = field(init=False, factory=OrderedDict)
    """Bytes of each key, in the order of eviction. Acquired keys whose turn came are not in it."""
    _held: dict[ChunkKey, int] = field(init=False, factory=dict)
    """Bytes of each held key."""
    _evictable_bytes: int = field(init=False, default=0)

    def __repr__(self) -> str:
        return f"<{type(self).__name__}: {self._evictable_bytes:,} evictable bytes, {len(self._held)} keys held>"

    def insert(self, key: ChunkKey, size: int, parent: ChunkKey = b"") -> None:
        """Add an evictable key of `size` bytes, the newest of all. Raises UsageError for a known key."""
        if key in self._queue or key in self._held:
            raise UsageError(f"chunk {key.hex()} is already in the policy")
        if size < 1:
            raise UsageError(f"chunk {key.hex()} has the size {size}")
        self._queue[key] = size
        self._evictable_bytes += size

    @abstractmethod
    def touch(self, keys: Sequence[ChunkKey]) -> None:
        """Note the use of a chain's keys, given head first; the head must outlive the tail."""

    @abstractmethod
    def _requeue(self, key: ChunkKey, size: int) -> None:
        """The key is evictable again. It is in the queue still, unless its turn came meanwhile."""

    def discard(self, key: ChunkKey) -> None:
        """Forget a key, known or not."""
        size = self._queue.pop(key, 0)
        if self._held.pop(key, None) is None:
            self._evictable_bytes -= size

    def hold(self, key: ChunkKey) -> None:
        """Keep a known key from eviction until it is released. Idempotent."""
        if key in self._held:
            return
        size = self._queue.get(key)
        if size is None:
            raise self._unknown(key)
        self._held[key] = size
        self._evictable_bytes -= size

    def release(self, key: ChunkKey) -> None:
        """A known key may be evicted again. Idempotent."""
        size = self._held.pop(key, None)
        if size is not None:
            self._evictable_bytes += size
            self._requeue(key, size)
        elif key not in self._queue:
            raise self._unknown(key)

    def evict(self, nbytes: int, protect: Set[ChunkKey] = frozenset()) -> list[ChunkKey] | None:
        """Remove and return evictable keys of `nbytes` together; None, and no change, when there are not."""
        victims: list[ChunkKey] = []
        if nbytes > self._evictable_bytes:
            return None
        passed: list[ChunkKey] = []
        found = 0
        for key, size in self._queue.items():
            if found >= nbytes:
                break
            if key in self._held:
                passed.append(key)
            elif key not in protect:
                victims.append(key)
                found += size
        if found < nbytes:
            return None
        for key in (*passed, *victims):
            del self._queue[key]
        self._evictable_bytes -= found
        return victims

    def _unknown(self, key: ChunkKey) -> UsageError:
        return UsageError(f"chunk {key.hex()} is not in the policy")
