"""The interfaces between lmkv's parts, and the data that pass through them.

Calls for one key return misses and failures as values, and raise no exception for them. Optional methods of a backend
form separate protocols; lmkv tests for them with `isinstance`.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from enum import Enum
from typing import Literal, Protocol, runtime_checkable

from attrs import define, field, frozen, validators

from lmkv.errors import BackendError, UsageError, outside


class Presence(Enum):
    """Whether a chunk is in host memory, only in a lower tier, or nowhere: a result of `Catalog.lookup`."""

    MISS = "miss"
    READY = "ready"
    """Complete in host memory; it can be leased now."""
    PENDING = "pending"
    """Being stored in host memory, or promoted into it."""
    LOWER = "lower"
    """In a lower tier only; it can be promoted."""


def miss_in_words(reason: str, tier: str | None) -> str:
    """Return why tokens were missed, and where: `evicted from disk`, `not ready in cpu`."""
    words = {"slower": "too slow to load", "limited": "over max_load_tokens"}.get(reason, reason.replace("_", " "))
    return f"{words} {'from' if reason in ('evicted', 'slower') else 'in'} {tier}" if tier else words


class ReadStatus(Enum):
    HIT = "hit"
    MISS = "miss"
    FAILED = "failed"


@frozen
class Read:
    """The result of `Backend.read`. `error` is set if, and only if, the status is FAILED."""

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
    """The result of `Backend.write`. After STORED or PRESENT the chunk is complete; otherwise it is absent.

    `lacking`: after REJECTED the number of bytes to delete first; 0 if unknown, None if that would not help.
    """

    status: WriteStatus
    reason: str = ""
    error: BackendError | None = None
    lacking: int | None = 0

    @classmethod
    def rejected(cls, reason: str, lacking: int | None = 0) -> Written:
        """Make a result for a chunk that was not stored. `reason` is shortened, and shown without passwords."""
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
    """A chunk for `Backend.write`.

    `payload`: the chunk's bytes, contiguous, in memory of the caller, which does not change until `write` returns.
    `parent`: the key of the chunk before it; empty for the first chunk of a prompt. `tokens`: the chunk's token ids as
    little-endian uint32; empty if unknown. A backend may record `parent` and `tokens` as a description.
    """

    key: ChunkKey
    payload: memoryview
    parent: ChunkKey = b""
    tokens: bytes = b""

    def check(self) -> None:
        """Raise UsageError for a chunk that no backend can store."""
        if not len(self.payload) or self.payload.ndim != 1 or self.payload.itemsize != 1:
            raise UsageError("a payload must be a one-dimensional view of at least one byte")
        if len(self.parent) not in (0, len(self.key)) or len(self.tokens) % 4:
            raise UsageError(f"a parent must be empty or {len(self.key)} bytes, and tokens 4 bytes each")


@runtime_checkable
class Backend(Protocol):
    """Storage of immutable chunks by key. Its methods may block, and several threads call them at the same time.

    `read` and `write` transfer one chunk, and return failures as values. `contains` and `delete` have several keys, and
    raise `BackendError`. A backend neither counts bytes nor evicts, because its tier does both. `close` may be called
    again; after it every other call raises `ClosedError`.
    """

    @property
    def name(self) -> str: ...

    def contains(self, keys: Sequence[ChunkKey]) -> list[bool]:
        """Return a bool for each key, in the order of `keys`: whether the chunk is stored. May raise `BackendError`."""
        ...

    def read(self, key: ChunkKey, into: memoryview) -> Read:
        """Fill `into`, a buffer of the caller, with a chunk's payload; unless the result is HIT, its content is
        undefined.

        The buffer has the length of the payload. A stored chunk of another length is FAILED. After a
        `CorruptChunkError` lmkv deletes the chunk. After any other error it keeps the chunk.
        """
        ...

    def write(self, chunk: Chunk) -> Written:
        """Store a chunk completely or not at all. If its key exists, keep the stored chunk and return PRESENT."""
        ...

    def delete(self, keys: Sequence[ChunkKey]) -> None:
        """Remove these chunks. Absent keys are no error. May raise `BackendError`."""
        ...

    def close(self) -> None: ...


@frozen
class Listed:
    """One chunk that `ListsKeys.list_keys` has found. `nbytes`: the bytes that it takes of the tier's capacity."""

    key: ChunkKey
    nbytes: int
    last_used: float = 0.0


@runtime_checkable
class ListsKeys(Protocol):
    """A backend that can list its chunks, because they survive the end of its process."""

    def list_keys(self) -> Iterator[list[Listed]]:
        """Yield the stored chunks in batches, least recently used first if the medium knows their order.

        Reads no payload.
        """
        ...


@runtime_checkable
class SharesRoom(Protocol):
    """A backend that shares its medium with other processes and namespaces, and counts the bytes of all of them.

    Chunks of other namespaces count, and may be evicted, but are never served. Their keys have more than 32 bytes.
    """

    def reserve_bytes(self, nbytes: int) -> int:
        """Count bytes that the caller is about to write, and return the bytes of all writers, these included."""
        ...

    def release_bytes(self, nbytes: int) -> None:
        """Subtract bytes that were reserved but not written."""
        ...

    def reclaim(self, keys: Sequence[ChunkKey]) -> int:
        """Delete chunks of any namespace, and return the number of freed bytes. May raise `BackendError`."""
        ...

    def list_all(self) -> Iterator[list[Listed]]:
        """Yield chunks as `list_keys` does, including those of other namespaces."""
        ...


@runtime_checkable
class SizesChunks(Protocol):
    """A backend where a stored chunk takes more space than its payload, for a header or padding."""

    def stored_bytes(self, payload_bytes: int) -> int: ...


@runtime_checkable
class RegistersMemory(Protocol):
    """A backend that transfers payloads from and to registered memory without a copy."""

    def register_memory(self, descriptor: int, address: int, nbytes: int) -> None:
        """Register memory whose payloads will be transferred: a whole memory file, mapped at `address`.

        Called once, before any other call. The caller owns the file `descriptor`; the memory exists until `close`.
        """
        ...


@runtime_checkable
class Shared(Protocol):
    """A backend that other processes may write to, so that it may have chunks that the store does not know.

    If `shared` is true, the store looks for such chunks with `contains` for each request, and lists a `ListsKeys`
    backend repeatedly. The store reads `shared` once, when the store is made.
    """

    @property
    def shared(self) -> bool: ...


@runtime_checkable
class Policy(Protocol):
    """Decides which keys a tier evicts, from their sizes in bytes and their uses, without a clock or I/O.

    The store calls it while it holds its lock. A known key is either evictable or held. A policy evicts a chunk before
    its parent, because a chunk cannot be found without its parent. `lmkv.policies.PolicyBase` implements everything
    except the order.
    """

    def insert_chain(self, keys: Sequence[ChunkKey], size: int, parents: Sequence[ChunkKey]) -> None:
        """Add evictable keys of `size` bytes each, the last one first. Raises UsageError for a known key.

        `parents`: for each key the key of the chunk before it; empty if there is none, or if it is unknown.
        """
        ...

    def touch(self, keys: Sequence[ChunkKey]) -> None:
        """Note that a request has used these chunks of a prompt, given first to last. Keys may be unknown.
        The request that stored a chunk also touches it, so the first touch is not a reuse.
        """
        ...

    def discard(self, key: ChunkKey) -> None:
        """Forget a key. Unknown keys are ignored."""
        ...

    def hold(self, key: ChunkKey) -> None:
        """Keep a known key from eviction until it is released. Idempotent."""
        ...

    def release(self, key: ChunkKey) -> None:
        """Let a known key be evicted again; this counts as a use. Idempotent."""
        ...

    def evict(self, nbytes: int, protect: frozenset[ChunkKey] | set[ChunkKey] = frozenset()) -> list[ChunkKey] | None:
        """Remove and return evictable keys of at least `nbytes` bytes together, none of them in `protect`.

        If there are too few, it returns None and changes nothing.
        """
        ...


@runtime_checkable
class TakesHints(Protocol):
    """A policy that callers may tell which chunks to evict first or last."""

    def hint(self, keys: Sequence[ChunkKey], priority: int) -> None:
        """Evict a prompt's keys, given first to last, before all others (priority below 0), in turn (0) or last (above
        0).

        Among priorities above 0, keys of the lowest are evicted first. Keys may be unknown, because a write may still
        be on its way to the tier.
        """
        ...


@runtime_checkable
class LabelsKeys(Protocol):
    """A policy that knows to which tenant each chunk belongs."""

    def label(self, keys: Sequence[ChunkKey], names: Sequence[str]) -> None:
        """Assign chunks, also before they are inserted, to the first of these names that has a quota."""
        ...

    def used_bytes(self) -> Mapping[str, int]:
        """Return the bytes that each tenant uses, by name. The name "" counts all chunks without a tenant."""
        ...


@runtime_checkable
class DividesTier(Protocol):
    """A policy that divides the tier among tenants."""

    def part_of(self, key: ChunkKey, parent: ChunkKey = b"") -> tuple[str, float]:
        """Return the tenant of a chunk, or else of its parent, and the tenant's share of the tier, 0 to 1.

        The tenant "" has the rest.
        """
        ...


@runtime_checkable
class Admission(Protocol):
    """A filter that decides which new chunks a tier stores. The store calls it while it holds its lock."""

    def admit(self, key: ChunkKey) -> bool: ...


@runtime_checkable
class SeesPrompts(Protocol):
    """An admission filter that needs to know the lengths of prompts."""

    def prompt(self, keys: Sequence[ChunkKey], tokens: int) -> None:
        """Note that a request with `tokens` tokens has chunks with these keys, which may soon be offered."""
        ...


class Clock(Protocol):
    """A function that returns monotonic seconds, such as `time.monotonic`. Tests pass their own clock."""

    def __call__(self) -> float: ...


@define(eq=False)
class Tier:
    """A tier of a `TieredStore`: a backend, and how the store uses it.

    Parameters
    ----------
    backend : Backend
        Stores the chunks.
    policy : Policy
        Decides what to evict. Every tier needs a separate policy object.
    capacity_bytes : int, optional
        Largest number of bytes to store, or None for as many as the backend accepts. Host memory ignores it, because
        it has a fixed number of slots.
    admission : Admission, optional
        A filter for new chunks, or None to store all. Host memory must have none.
    write : str
        "through": write a chunk to this tier when it is stored; "back": when host memory evicts it.

    Raises
    ------
    ValueError
        `write` is neither "through" nor "back".

    Notes
    -----
    The store calls the policy and the filter while it holds its lock. It never calls the backend then.

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
