"""Judges a backend's answers: are they of the right type, and does a failure mean that the tier is broken?"""

from __future__ import annotations

import errno
from typing import TypeVar

from lmkv.errors import BackendError, CorruptChunkError, NoSpaceError, safe_repr
from lmkv.outcomes import Read, ReadStatus, WriteStatus, Written
from lmkv.protocols import ChunkKey

T = TypeVar("T")


def tier_answers(result: Read) -> bool:
    """Whether the tier works, as far as this read can tell."""
    return result.status is not ReadStatus.FAILED or isinstance(result.error, CorruptChunkError)


def is_full(result: Written) -> bool:
    """Whether a deletion would help: the medium is full, rather than refusing all writes."""
    code = getattr(result.error.__cause__, "errno", None) if isinstance(result.error, NoSpaceError) else None
    return result.status is WriteStatus.REJECTED or code in (errno.ENOSPC, errno.EDQUOT)


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
