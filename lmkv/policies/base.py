"""What all eviction policies share: sizes, keys that must not be evicted, all-or-nothing eviction."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable, Sequence, Set

from attrs import define, field

from lmkv.errors import UsageError
from lmkv.protocols import ChunkKey


@define(eq=False)
class PolicyBase(ABC):
    """A `Policy` but for the order, which a subclass keeps in `_enqueue`, `_dequeue` and `_choose`.

    Only evictable keys are in the order: an acquired key is dequeued, and enqueued again when it is released.
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
        self._check_known(key)
        if key not in self._acquired:
            self._acquired.add(key)
            self._evictable_bytes -= self._sizes[key]
            self._dequeue(key)

    def release(self, key: ChunkKey) -> None:
        """A known key may be evicted again. Idempotent."""
        self._check_known(key)
        if key in self._acquired:
            self._acquired.remove(key)
            self._evictable_bytes += self._sizes[key]
            self._enqueue(key)

    def evict(self, nbytes: int, protect: Set[ChunkKey] = frozenset()) -> list[ChunkKey] | None:
        """Remove and return victims of at least `nbytes` together; None, and no change, if there are not."""
        if nbytes > self._evictable_bytes:
            return None
        victims = self._choose(nbytes, protect)
        for key in victims or ():
            self._dequeue(key)
            self._evictable_bytes -= self._sizes.pop(key)
        return victims

    def _check_known(self, key: ChunkKey) -> None:
        if key not in self._sizes:
            raise UsageError(f"chunk {key.hex()} is not in the policy")

    def _first(self, order: Iterable[ChunkKey], nbytes: int, protect: Set[ChunkKey]) -> list[ChunkKey] | None:
        """The first unprotected keys of `order` that have `nbytes` together; None when they do not."""
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
        """The key is acquired, or unknown, from now on; it need not have been in the order."""

    @abstractmethod
    def _choose(self, nbytes: int, protect: Set[ChunkKey]) -> list[ChunkKey] | None:
        """Evictable keys outside `protect` of at least `nbytes` together, in order of eviction, or None."""
