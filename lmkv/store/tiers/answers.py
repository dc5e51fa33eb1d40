"""Judges a backend's answers: are they of the right type, and does a failure mean that the tier is broken?"""

from __future__ import annotations

import errno
from typing import TypeVar

from lmkv.errors import BackendError, CorruptChunkError, NoSpaceError, safe_repr
from lmkv.outcomes import Read, ReadStatus, WriteStatus, Written
from lmkv.protocols import ChunkKey

T = TypeVar("T")


def read_works(result: Read) -> bool | None:
    """Whether the tier can be read. None: no bytes came, so that the answer does not tell."""
    if result.status is ReadStatus.MISS:
        return None
    return result.status is ReadStatus.HIT or isinstance(result.error, CorruptChunkError)


def write_works(result: Written) -> bool | None:
    """Whether the tier takes writes. None: none was needed, or it was refused for want of room."""
    return {WriteStatus.STORED: True, WriteStatus.FAILED: False}.get(result.status)


def is_full(result: Written) -> bool:
    """Whether a deletion would help: the medium is full, rather than refusing all writes."""
    code = getattr(result.error.__cause__, "errno", None) if isinstance(result.error, NoSpaceError) else None
    rejected = result.status is WriteStatus.REJECTED and result.lacking is not None
    return rejected or code in (errno.ENOSPC, errno.EDQUOT)


def checked(result: object, kind: type[T]) -> T:
    if not isinstance(result, kind):
        raise TypeError(f"a backend returned {result!r} instead of a {kind.__name__}")
    return result


def as_backend_error(name: str, action: str, key: ChunkKey, error: Exception) -> BackendError:
    if isinstance(error, BackendError):
        return error
    translated = BackendError(name, action, key.hex(), safe_repr(error))
    translated.__cause__ = error
    return translated
