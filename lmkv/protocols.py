"""The protocols between lmkv's parts, the data that they exchange, and the results of calls.

A miss, or the failure of one key, is a value, not an exception. Capabilities beyond the plain `Backend` are protocols,
too, found with `isinstance`.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from enum import Enum
from typing import Literal, Protocol, runtime_checkable

from attrs import define, field, frozen, validators

from lmkv.errors import BackendError, UsageError, outside


class Presence(Enum):
    """Where a chunk is, as `TieredStore.lookup` sees it."""

    MISS = "miss"
    READY = "ready"
    """Complete in host memory; it can be leased now."""
    PENDING = "pending"
    """Being stored in host memory, or promoted into it."""
    LOWER = "lower"
    """In a lower tier only; it can be promoted."""


def miss_in_words(reason: str, tier: str | None) -> str:
    """Return why tokens were missed, and where: `evicted from disk`, `not ready in cpu`."""
    where = f" {'from' if reason == 'evicted' else 'in'} {tier}" if tier else ""
    return reason.replace("_", " ") + where


class ReadStatus(Enum):
    HIT = "hit"
    MISS = "miss"
    FAILED = "failed"


@frozen
class Read:
    """Outcome of reading one key. `error` is set exactly when the status is FAILED."""

    status: ReadStatus
    error: BackendError | None = None

    @classmethod
    def failed(cls, error: BackendError) -> Read:
        return cls(ReadStatus.FAILED, error)


HIT = Read(ReadStatus.HIT)
MISS = Read(ReadStatus.MISS)


class WriteStatus(Enum):
    STORED = "stored"
    PRESENT = "present"
    REJECTED = "rejected"
    FAILED = "failed"


@frozen
class Written:
    """Outcome of writing one key: after STORED or PRESENT the chunk is complete, otherwise it is absent.

    `lacking`: bytes to delete first, if REJECTED; 0 if unknown, None if deleting would not help.
    """

    status: WriteStatus
    reason: str = ""
    error: BackendError | None = None
    lacking: int | None = 0

    @classmethod
    def rejected(cls, reason: str, lacking: int | None = 0) -> Written:
        """`reason`: may be a store's text. It is cut, and shown in one line without passwords."""
        return cls(WriteStatus.REJECTED, outside(reason), lacking=lacking)

    @classmethod
    def failed(cls, error: BackendError) -> Written:
        return cls(WriteStatus.FAILED, str(error), error)


STORED = Written(WriteStatus.STORED)
PRESENT = Written(WriteStatus.PRESENT)


ChunkKey = bytes
"""32 raw bytes; see `lmkv.chunks.hashing`."""


@frozen
class Chunk:
    """A chunk to be written by a backend.

    `payload`: its bytes, contiguous, owned by the caller, stable until `write` returns. `parent`: key of the chunk
    before it, empty for a chain's first. `tokens`: its token ids as little-endian uint32, empty when not known. A
    backend may record `parent` and `tokens` as a description; it never interprets them.
    """

    key: ChunkKey
    payload: memoryview
    parent: ChunkKey = b""
    tokens: bytes = b""

    def check(self) -> None:
        """Raise UsageError for a chunk that no backend can store."""
        if not len(self.payload) or self.payload.ndim != 1 or self.payload.itemsize != 1:
            raise UsageError("a payload must be a flat view of at least one byte")
        if len(self.parent) not in (0, len(self.key)) or len(self.tokens) % 4:
            raise UsageError(f"a parent must be empty or {len(self.key)} bytes, and tokens 4 bytes each")


@runtime_checkable
class Backend(Protocol):
    """Blocking, thread-safe storage of immutable chunks; called only on lmkv's own threads, several at a time.

    Payloads move one at a time, and their failures are values. `contains` and `delete` take batches and raise
    `BackendError`; `contains` answers in the order of its keys. A backend neither counts bytes nor evicts: its tier
    does. `close` is idempotent; after it every other call raises `ClosedError`.
    """

    @property
    def name(self) -> str: ...

    def contains(self, keys: Sequence[ChunkKey]) -> list[bool]:
        """Return whether each chunk is there. A `Shared` backend is asked for chunks that the index does not know."""
        ...

    def read(self, key: ChunkKey, into: memoryview) -> Read:
        """Fill the caller-owned buffer with a chunk; its content is undefined unless HIT.

        The buffer's length is the chunk's payload length; a stored chunk of another length is FAILED. FAILED with a
        `CorruptChunkError`: the bytes are wrong, and the chunk is deleted. Any other error may be temporary.
        """
        ...

    def write(self, chunk: Chunk) -> Written:
        """Store a chunk completely or not at all; an existing key is PRESENT and stays as it is."""
        ...

    def delete(self, keys: Sequence[ChunkKey]) -> None:
        """Remove these chunks; absent keys are fine."""
        ...

    def close(self) -> None: ...


@frozen
class Listed:
    """One chunk found by `ListsKeys.list_keys`. `nbytes`: its share of the tier's capacity."""

    key: ChunkKey
    nbytes: int
    last_used: float = 0.0


@runtime_checkable
class ListsKeys(Protocol):
    """A backend with content that survives its process, and that it can list."""

    def list_keys(self) -> Iterator[list[Listed]]:
        """List the stored chunks in batches, least recently used first if the medium knows their order. Reads no
        payload."""
        ...


@runtime_checkable
class SharesRoom(Protocol):
    """A backend that shares its medium with other processes and namespaces, and counts the bytes of all.

    Chunks of other namespaces take space, and are never served. Their keys are longer than 32 bytes.
    """

    def reserve_bytes(self, nbytes: int) -> int:
        """Count bytes that are about to be written; returns the bytes of all, these included."""
        ...

    def release_bytes(self, nbytes: int) -> None:
        """Cancel a reservation: these bytes were not written."""
        ...

    def reclaim(self, keys: Sequence[ChunkKey]) -> int:
        """Delete as `delete` does, also chunks of other namespaces; returns the freed bytes."""
        ...

    def list_all(self) -> Iterator[list[Listed]]:
        """List as `list_keys` does, also chunks of other namespaces."""
        ...


@runtime_checkable
class SizesChunks(Protocol):
    """A backend with chunks larger than their payload, by headers or padding."""

    def stored_bytes(self, payload_bytes: int) -> int: ...


@runtime_checkable
class RegistersMemory(Protocol):
    """A backend that moves payloads in registered memory without a copy."""

    def register_memory(self, descriptor: int, address: int, nbytes: int) -> None:
        """Prepare to move payloads in this memory: a whole memory file, mapped at `address`.

        Called once, before any other call. The descriptor stays the caller's; the memory exists until `close`.
        """
        ...


@runtime_checkable
class Shared(Protocol):
    """A backend that other processes may write to.

    Where `shared` is true, chunks that the index does not know may be there. The store asks for them with `contains`
    for each request, and lists a `ListsKeys` backend repeatedly. It reads `shared` once, when it is made.
    """

    @property
    def shared(self) -> bool: ...


@runtime_checkable
class Policy(Protocol):
    """An eviction order over keys and their sizes in bytes, without a clock, I/O or chunk contents.

    Called only under the owning store's lock. A known key is either evictable or held. A key cannot be found without
    its parent: a policy evicts children first. `lmkv.policies.PolicyBase` implements all of it except the order.
    """

    def insert_chain(self, keys: Sequence[ChunkKey], size: int, parents: Sequence[ChunkKey]) -> None:
        """Add evictable keys of `size` bytes each, the last one first.

        Inserting a known key is a `UsageError`. `parents`: one for each key; empty if it has none, or it is not known.
        """
        ...

    def touch(self, keys: Sequence[ChunkKey]) -> None:
        """Note that a request that used this chain has ended. The chain is given head first, and keys may be unknown.
        The request that stored a chunk also touches it, so the first touch is not a reuse.
        """
        ...

    def discard(self, key: ChunkKey) -> None:
        """Forget a key, known or not."""
        ...

    def hold(self, key: ChunkKey) -> None:
        """Keep a known key from eviction until it is released. Idempotent."""
        ...

    def release(self, key: ChunkKey) -> None:
        """Let a known key be evicted again; this counts as a use. Idempotent."""
        ...

    def evict(self, nbytes: int, protect: frozenset[ChunkKey] | set[ChunkKey] = frozenset()) -> list[ChunkKey] | None:
        """Remove and return victims of at least `nbytes` together, none of them in `protect`.

        If it cannot free that much, returns None and changes nothing.
        """
        ...


@runtime_checkable
class TakesHints(Protocol):
    """A policy to which callers may say which chunks will be used."""

    def hint(self, keys: Sequence[ChunkKey], priority: int) -> None:
        """Evict a chain's keys, given head first, before all others (below 0), in turn (0) or last (above 0).

        Among priorities above 0 the lowest goes first. Keys may be unknown: they may be on their way to the tier.
        """
        ...


@runtime_checkable
class LabelsKeys(Protocol):
    """A policy with quotas of tenants."""

    def label(self, keys: Sequence[ChunkKey], names: Sequence[str]) -> None:
        """Chunks with these keys, once they are inserted, belong to the first of these names that has a quota."""
        ...

    def used_bytes(self) -> Mapping[str, int]:
        """Return the bytes of each tenant that has any; "" for those without a quota."""
        ...


@runtime_checkable
class DividesTier(Protocol):
    """A policy that gives each tenant a part of the tier."""

    def part_of(self, key: ChunkKey, parent: ChunkKey = b"") -> tuple[str, float]:
        """Return the tenant of a chunk, or else of its parent, and its part, 0 to 1; the tenant "" has the rest."""
        ...


@runtime_checkable
class Admission(Protocol):
    """Decides which chunks a tier takes. Called under the store's lock."""

    def admit(self, key: ChunkKey) -> bool: ...


@runtime_checkable
class SeesPrompts(Protocol):
    """An admission filter that decides by the lengths of prompts."""

    def prompt(self, keys: Sequence[ChunkKey], tokens: int) -> None:
        """Note that chunks with these keys may soon be offered. They belong to a request with `tokens` tokens."""
        ...


class Clock(Protocol):
    """Monotonic seconds; tests pass their own clock."""

    def __call__(self) -> float: ...


@define(eq=False)
class Tier:
    """A tier of a `TieredStore`: a backend, and how the store uses it.

    Parameters
    ----------
    backend : Backend
        Where the chunks are.
    policy : Policy
        The order of eviction. Every tier needs a separate policy object.
    capacity_bytes : int, optional
        Largest number of bytes to store; None: as many as the backend accepts. Ignored for host memory, which has a
        fixed number of slots.
    admission : Admission, optional
        A filter for new chunks; None takes all. Host memory must have none.
    write : str
        When a lower tier gets a chunk: "through": when it is stored, "back": when host memory evicts it.

    Raises
    ------
    ValueError
        `write` is neither "through" nor "back".

    Notes
    -----
    The store calls the policy and the filter under its lock, the backend never.

    Examples
    --------
    >>> from lmkv.backends import NullBackend
    >>> from lmkv.policies import LRU
    >>> Tier(NullBackend(), LRU(), capacity_bytes=1 << 30, write="back").name
    'null'
    """

    backend: Backend
    policy: Policy
    capacity_bytes: int | None = None
    admission: Admission | None = None
    write: Literal["through", "back"] = field(default="through", validator=validators.in_(("through", "back")))

    @property
    def name(self) -> str:
        return self.backend.name
