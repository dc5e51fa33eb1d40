"""Results of lookups, reads and writes as values: a miss, or one key's failure, is no exception."""

from __future__ import annotations

from enum import Enum

from attrs import frozen

from lmkv.errors import BackendError, outside


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
    """Why tokens were missed, and where: `evicted from disk`, `not ready in cpu`."""
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
