"""The protocols that lmkv's parts meet at: types only, no behaviour.

Capabilities beyond the plain `Backend` are protocols of their own, found with `isinstance`.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Literal, Protocol, runtime_checkable

from attrs import define, field, frozen, validators

from lmkv.outcomes import Read, Written

ChunkKey = bytes
"""32 raw bytes, see `lmkv.chunks.hashing`."""


@frozen
class Chunk:
    """A chunk on its way to a backend.

    `payload`: the bytes, contiguous, owned by the caller, stable until `write` returns.
    `parent`: key of the chunk before it (empty for a chain's first). `tokens`: little-endian uint32 ids,
    empty when not known. A backend may persist both to describe what it holds; it never interprets them.
    """

    key: ChunkKey
    payload: memoryview
    parent: ChunkKey = b""
    tokens: bytes = b""


@runtime_checkable
class Backend(Protocol):
    """Blocking, thread-safe, batched storage of immutable chunks; called only on lmkv's own threads.

    Results come in request order, one per key. A backend neither counts bytes nor evicts: its tier does.
    `close` is idempotent; after it every other call raises `ClosedError`.
    """

    @property
    def name(self) -> str: ...

    def contains(self, keys: Sequence[ChunkKey]) -> list[bool]: ...

    def read(self, items: Sequence[tuple[ChunkKey, memoryview]]) -> list[Read]:
        """Fill each caller-owned buffer with its chunk; a buffer's content is undefined unless HIT.

        A buffer's length is the chunk's payload length; a stored chunk of another length is FAILED.
        """
        ...

    def write(self, chunks: Sequence[Chunk]) -> list[Written]:
        """Store each chunk completely or not at all; an existing key is PRESENT and stays as it is."""
        ...

    def delete(self, keys: Sequence[ChunkKey]) -> None:
        """Remove what is there; absent keys are fine."""
        ...

    def close(self) -> None: ...


@frozen
class Listed:
    """One chunk found by `ListsKeys.list_keys`. `nbytes` is what it takes of the tier's capacity."""

    key: ChunkKey
    nbytes: int
    last_used: float = 0.0


@runtime_checkable
class ListsKeys(Protocol):
    """A backend that survives its process and can say what it still holds."""

    def list_keys(self) -> Iterator[list[Listed]]:
        """What is stored, in batches, oldest use first where the medium knows; reads no payload."""
        ...


@runtime_checkable
class SharesRoom(Protocol):
    """A backend whose medium others fill, too, and that keeps count for all of them.

    Others are other processes, and other namespaces, whose chunks take up room without ever being served.
    Their keys are longer than 32 bytes.
    """

    def reserve_bytes(self, nbytes: int) -> int:
        """Count bytes that are about to be written; returns the bytes of everybody, these included."""
        ...

    def release_bytes(self, nbytes: int) -> None:
        """They were not written."""
        ...

    def reclaim(self, keys: Sequence[ChunkKey]) -> int:
        """`delete`, of others' chunks too; returns the bytes that this freed: none for what was gone."""
        ...

    def list_all(self) -> Iterator[list[Listed]]:
        """`list_keys`, of others' chunks too."""
        ...


@runtime_checkable
class SizesChunks(Protocol):
    """A backend whose chunks take more of its capacity than their payload (headers, padding)."""

    def stored_bytes(self, payload_bytes: int) -> int: ...


@runtime_checkable
class Shared(Protocol):
    """A backend whose content other processes may change: a key unknown to the index may be there."""

    @property
    def shared(self) -> bool: ...


class Policy(Protocol):
    """An eviction order over keys and sizes: pure, no clock, no I/O, no values.

    Called only under the owning store's lock. Every key is in one of two states: evictable or held.
    """

    def insert(self, key: ChunkKey, size: int, parent: ChunkKey = b"") -> None:
        """Add an evictable key. Inserting a known key is a `UsageError`."""
        ...

    def touch(self, keys: Sequence[ChunkKey]) -> None:
        """Note the use of a chain's keys, given head first; the head must outlive the tail."""
        ...

    def discard(self, key: ChunkKey) -> None:
        """Forget a key, known or not."""
        ...

    def acquire(self, key: ChunkKey) -> None:
        """Keep a known key from eviction until it is released. Idempotent."""
        ...

    def release(self, key: ChunkKey) -> None:
        """A known key may be evicted again; this counts as a use. Idempotent."""
        ...

    def evict(self, nbytes: int, protect: frozenset[ChunkKey] | set[ChunkKey] = frozenset()) -> list[ChunkKey] | None:
        """Remove and return victims of at least `nbytes` together, none of them in `protect`.

        All or nothing: None, and nothing changed, when that much cannot be freed.
        """
        ...


class Admission(Protocol):
    """Decides which chunks a tier takes. Called under the store's lock."""

    def admit(self, key: ChunkKey) -> bool: ...


class Clock(Protocol):
    """Monotonic seconds; tests bring their own."""

    def __call__(self) -> float: ...


@define(eq=False)
class Tier:
    """How a store uses a backend. Plain data: build it, hand it to a `TieredStore`.

    Of a primary tier only backend and policy count: its capacity is its slab. `capacity_bytes`: None means as
    much as the backend takes. `write`: "through" copies chunks down as they are stored, "back" when they
    leave host memory. `admission`: None admits all.
    """

    backend: Backend
    policy: Policy
    capacity_bytes: int | None = None
    admission: Admission | None = None
    write: Literal["through", "back"] = field(default="through", validator=validators.in_(("through", "back")))

    @property
    def name(self) -> str:
        return self.backend.name
