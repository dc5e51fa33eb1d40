"""`NullBackend`: stores nothing. It measures the overhead of a store, and is the smallest example."""

from __future__ import annotations

from collections.abc import Sequence

from attrs import define, field

from lmkv.errors import ClosedError
from lmkv.outcomes import MISS, Read, Written
from lmkv.protocols import Chunk, ChunkKey


@define(eq=False)
class NullBackend:
    """Rejects every chunk and misses every key.

    Parameters
    ----------
    name
        Name of the tier in logs and statistics.

    Raises
    ------
    ClosedError
        Every verb raises it after `close`.

    Notes
    -----
    Any number of threads may call: there is nothing to lock.

    Examples
    --------
    >>> from lmkv.protocols import Chunk
    >>> backend = NullBackend()
    >>> backend.write(Chunk(bytes(32), memoryview(b"payload"))).status
    <WriteStatus.REJECTED: 'rejected'>
    """

    name: str = "null"
    closed: bool = field(default=False, init=False)

    def contains(self, keys: Sequence[ChunkKey]) -> list[bool]:
        self._check_open()
        return [False] * len(keys)

    def read(self, key: ChunkKey, into: memoryview) -> Read:
        self._check_open()
        return MISS

    def write(self, chunk: Chunk) -> Written:
        self._check_open()
        return Written.rejected("null", None)

    def delete(self, keys: Sequence[ChunkKey]) -> None:
        self._check_open()

    def close(self) -> None:
        self.closed = True

    def _check_open(self) -> None:
        if self.closed:
            raise ClosedError(f"backend {self.name!r} is closed")
