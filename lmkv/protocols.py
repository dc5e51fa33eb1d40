"""The interfaces between lmkv's parts, and the data that pass through these interfaces.

A backend call for one key returns a miss or a failure as a value, and raises no exception. Optional features of a
backend have separate protocols, which lmkv tests with `isinstance`.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from enum import Enum
from typing import Literal, Protocol, runtime_checkable

from attrs import define, field, frozen, validators

from lmkv.errors import BackendError, UsageError, outside


class Presence(Enum):
    """Where a chunk is: in host memory, only in a lower tier, or nowhere. `Catalog.lookup` returns this value."""

    MISS = "miss"
    READY = "ready"
    """The chunk is complete in host memory. A request can lease the chunk, which keeps the chunk there during a
    load.
    """
    PENDING = "pending"
    """The chunk is being stored in host memory, or promoted into host memory."""
    LOWER = "lower"
    """The chunk is only in a lower tier. A request can promote the chunk, which means to read it into host memory."""


def miss_in_words(reason: str, tier: str | None) -> str:
    """Return a text that says why tokens were missed, and in which tier: `evicted from disk`, `not ready in cpu`."""
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
    """The result of `Backend.write`. After STORED or PRESENT the backend has the complete chunk. After any other status
    the backend does not have the chunk.

    `reason`: why the chunk was not stored. `lacking`: after REJECTED, the number of bytes to delete before the write
    can succeed; 0 if this number is unknown, None if deletions would not help.
    """

    status: WriteStatus
    reason: str = ""
    error: BackendError | None = None
    lacking: int | None = 0

    @classmethod
    def rejected(cls, reason: str, lacking: int | None = 0) -> Written:
        """Return a result with the status REJECTED. The text `reason` is shortened, and passwords in it are masked."""
        return cls(WriteStatus.REJECTED, outside(reason), lacking=lacking)

    @classmethod
    def failed(cls, error: BackendError) -> Written:
        return cls(WriteStatus.FAILED, str(error), error)


STORED = Written(WriteStatus.STORED)
PRESENT = Written(WriteStatus.PRESENT)


ChunkKey = bytes
"""The key of a chunk: 32 raw bytes. `lmkv.chunks.hashing` computes keys."""


@frozen
class Chunk:
    """A chunk for `Backend.write`.

    `payload`: the chunk's bytes, in contiguous memory of the caller, who does not change the bytes until `write`
    returns. `parent`: the key of the chunk before this chunk in its prompt; empty for the first chunk. `tokens`: the
    chunk's token ids as little-endian uint32; empty if unknown. A backend may store `parent` and `tokens` with the
    chunk.
    """

    key: ChunkKey
    payload: memoryview
    parent: ChunkKey = b""
    tokens: bytes = b""

    def check(self) -> None:
        """Raise UsageError if the payload, parent or tokens have a wrong shape or length."""
        if not len(self.payload) or self.payload.ndim != 1 or self.payload.itemsize != 1:
            raise UsageError("a payload must be a one-dimensional view of at least one byte")
        if len(self.parent) not in (0, len(self.key)) or len(self.tokens) % 4:
            raise UsageError(f"a parent must be empty or {len(self.key)} bytes, and tokens 4 bytes each")


@runtime_checkable
class Backend(Protocol):
    """Storage of immutable chunks by key. The methods may block, and several threads call them at the same time.

    `read` and `write` transfer one chunk, and return failures as values. `contains` and `delete` take several keys, and
    raise `BackendError`. A backend neither counts bytes nor evicts chunks: the store does both.
    After `close`, every call except `close` raises `ClosedError`.
    """

    @property
    def name(self) -> str: ...

    def contains(self, keys: Sequence[ChunkKey]) -> list[bool]:
        """Return a bool for each key, in the order of `keys`: whether the chunk is stored. May raise `BackendError`."""
        ...

    def read(self, key: ChunkKey, into: memoryview) -> Read:
        """Copy a chunk's payload into `into`, a buffer of the caller with the payload's length, and return the result.

        Unless the result is HIT, the content of the buffer is undefined. If the stored chunk has another length, the
        result is FAILED. After a result with `CorruptChunkError` lmkv deletes the chunk. After any other error lmkv
        keeps the chunk.
        """
        ...

    def write(self, chunk: Chunk) -> Written:
        """Store a chunk completely or not at all. If the key is already stored, keep the stored chunk and return
        PRESENT.
        """
        ...

    def delete(self, keys: Sequence[ChunkKey]) -> None:
        """Remove these chunks. Absent keys are no error. May raise `BackendError`."""
        ...

    def close(self) -> None: ...


@frozen
class Listed:
    """One chunk in the result of `ListsKeys.list_keys`. `nbytes`: how many bytes of the tier's capacity the chunk
    takes. `last_used`: time of the last use, in seconds since 1970; 0.0 if unknown.
    """

    key: ChunkKey
    nbytes: int
    last_used: float = 0.0


@runtime_checkable
class ListsKeys(Protocol):
    """A backend that can list its chunks. Such chunks outlive the process that stored the chunks."""

    def list_keys(self) -> Iterator[list[Listed]]:
        """Yield the stored chunks in batches. If the medium records times of use, the least recently used chunks come
        first.

        Reads no payload.
        """
        ...


@runtime_checkable
class SharesCapacity(Protocol):
    """A backend that shares its medium with other processes and namespaces, and counts the bytes of all these writers.

    Chunks of other namespaces count as used space, and may be evicted, but are never read. Keys of other namespaces
    have more than 32 bytes.
    """

    def reserve_bytes(self, nbytes: int) -> int:
        """Add `nbytes` bytes, which the caller will write next, to the shared count. Return the new count: the bytes of
        all writers.
        """
        ...

    def release_bytes(self, nbytes: int) -> None:
        """Subtract `nbytes` bytes from the shared count: bytes that `reserve_bytes` has added, but that were not
        written.
        """
        ...

    def reclaim(self, keys: Sequence[ChunkKey]) -> int:
        """Delete chunks of any namespace, and return the number of freed bytes. May raise `BackendError`."""
        ...

    def list_all(self) -> Iterator[list[Listed]]:
        """Yield chunks as `list_keys` does, but include the chunks of other namespaces."""
        ...


@runtime_checkable
class SizesChunks(Protocol):
    """A backend in which a stored chunk takes more space than its payload, for a header or padding."""

    def stored_bytes(self, payload_bytes: int) -> int: ...


@runtime_checkable
class RegistersMemory(Protocol):
    """A backend that reads and writes payloads directly in host memory, which lmkv registers with the backend."""

    def register_memory(self, descriptor: int, address: int, nbytes: int) -> None:
        """Register the memory that holds all payloads: one whole memory file.

        `descriptor`: the file descriptor of the memory file, which the caller owns. `address`, `nbytes`: the address
        and the size of the file's mapping in this process. lmkv calls this method once, before all other methods. The
        memory exists until `close`.
        """
        ...


@runtime_checkable
class Shared(Protocol):
    """A backend that other processes may also write to, so that the backend may have chunks that are new to the store.

    If `shared` is true, the store looks for such chunks with `contains` for each request. If the backend is also a
    `ListsKeys`, the store lists the backend's chunks repeatedly. The store reads `shared` only when the store is made.
    """

    @property
    def shared(self) -> bool: ...


@runtime_checkable
class Policy(Protocol):
    """Decides which chunks a tier evicts, from keys, sizes in bytes and uses, without a clock or I/O.

    The store calls a policy while holding the store's lock. An inserted key is either evictable or held. A policy
    evicts a chunk before the chunk's parent (the previous chunk of the prompt), because no request finds a chunk
    without its parent. `lmkv.policies.PolicyBase` implements everything except the eviction order.
    """

    def insert_chain(self, keys: Sequence[ChunkKey], size: int, parents: Sequence[ChunkKey]) -> None:
        """Add evictable keys, for chunks of `size` bytes each. `keys`: consecutive chunks of one prompt, first to last.

        The policy adds the last of `keys` first, because the last chunk of a prompt is evicted first. `parents`: for
        each key the key of the previous chunk; empty for the first chunk of a prompt, or if the previous chunk is
        unknown. Raises UsageError for a key that was already inserted.
        """
        ...

    def touch(self, keys: Sequence[ChunkKey]) -> None:
        """Note that a request has used these chunks of a prompt, first to last. Unknown keys are possible.

        The request that stored a chunk also touches this chunk, so the first touch of a chunk is not a reuse.
        """
        ...

    def discard(self, key: ChunkKey) -> None:
        """Remove a key from the policy. Unknown keys are ignored."""
        ...

    def hold(self, key: ChunkKey) -> None:
        """Prevent the eviction of a known key until `release` is called for the key. Idempotent."""
        ...

    def release(self, key: ChunkKey) -> None:
        """Allow the eviction of a known key again. This call counts as a use of the chunk. Idempotent."""
        ...

    def evict(self, nbytes: int, protect: frozenset[ChunkKey] | set[ChunkKey] = frozenset()) -> list[ChunkKey] | None:
        """Remove and return evictable keys of chunks that together have at least `nbytes` bytes. No returned key is in
        `protect`.

        If all evictable chunks together have fewer bytes, return None and change nothing.
        """
        ...


@runtime_checkable
class TakesHints(Protocol):
    """A policy that accepts hints: callers may say which chunks to evict first or last."""

    def hint(self, keys: Sequence[ChunkKey], priority: int) -> None:
        """Set the eviction priority of a prompt's keys, which are in the order of the prompt. Keys with a priority
        below 0 are evicted before all others.

        Keys with the priority 0 are evicted when the policy chooses them. Keys with a priority above 0 are evicted
        after all others, the lowest priority first. A key may be unknown to the policy, because its chunk is still
        being written.
        """
        ...


@runtime_checkable
class LabelsKeys(Protocol):
    """A policy that knows to which tenant (a user or group with a quota) each chunk belongs."""

    def label(self, keys: Sequence[ChunkKey], names: Sequence[str]) -> None:
        """Assign chunks to the first tenant in `names` that has a quota. The keys need not be inserted yet."""
        ...

    def used_bytes(self) -> Mapping[str, int]:
        """Return the number of bytes that each tenant uses, by the tenant's name. The name "" stands for chunks without
        a tenant.
        """
        ...


@runtime_checkable
class DividesTier(Protocol):
    """A policy that divides the tier among tenants: users or groups with a quota."""

    def part_of(self, key: ChunkKey, parent: ChunkKey = b"") -> tuple[str, float]:
        """Return `(tenant, share)`: the name of a chunk's tenant, and the tenant's share of the tier, from 0 to 1.

        A chunk without a label belongs to the tenant of `parent`, the previous chunk of the prompt. If `parent` has no
        tenant either, the name is "", and the share is the rest of the tier.
        """
        ...


@runtime_checkable
class Admission(Protocol):
    """A filter that decides which new chunks a tier stores. The store calls the filter while holding the store's
    lock.
    """

    def admit(self, key: ChunkKey) -> bool: ...


@runtime_checkable
class SeesPrompts(Protocol):
    """An admission filter that needs to know the lengths of prompts."""

    def prompt(self, keys: Sequence[ChunkKey], tokens: int) -> None:
        """Note that a request has a prompt of `tokens` tokens, with chunks of these keys. The store may soon call
        `admit` for these keys.
        """
        ...


class Clock(Protocol):
    """A function that returns monotonic seconds, such as `time.monotonic`. A test can pass a clock that the test
    controls.
    """

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
        Largest number of bytes to store; None means as many as the backend accepts. Host memory ignores this number,
        because host memory has a fixed number of slots.
    admission : Admission, optional
        A filter for new chunks, or None to store all chunks. The tier of host memory must have None.
    write : str
        When the store writes a chunk to this tier: "through" when a request stores the chunk, "back" when host memory
        evicts the chunk.

    Raises
    ------
    ValueError
        `write` is neither "through" nor "back".

    Notes
    -----
    The store calls the policy and the admission filter while holding the store's lock, but never calls the backend
    then.

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
