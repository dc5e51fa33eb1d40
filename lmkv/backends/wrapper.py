"""`NullBackend` stores nothing; `WrapperBackend` forwards to another backend, for instrumentation and faults."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TypeVar

from attrs import define, field

from lmkv.errors import ClosedError
from lmkv.protocols import (
    MISS,
    Backend,
    Chunk,
    ChunkKey,
    ListsKeys,
    Read,
    RegistersMemory,
    Shared,
    SharesRoom,
    SizesChunks,
    Written,
)

T = TypeVar("T")


class WrapperBackend:
    """A backend with the verbs of another one, and its capabilities, as `isinstance` sees them.

    Parameters
    ----------
    inner
        The backend that every call is forwarded to.

    Notes
    -----
    Override `around` to see every call, or a verb to change it. There are no locks.

    Examples
    --------
    >>> from lmkv.backends.wrapper import NullBackend
    >>> class Printing(WrapperBackend):
    ...     def around(self, verb, call):
    ...         print(verb)
    ...         return call()
    >>> Printing(NullBackend()).contains([bytes(32)])
    contains
    [False]
    """

    def __init__(self, inner: Backend) -> None:
        self.inner = inner
        # On the instance, because `isinstance` looks for the attribute and not every inner backend has it.
        if isinstance(inner, ListsKeys):
            self.list_keys = lambda: self.around("list_keys", inner.list_keys)
        if isinstance(inner, SizesChunks):
            self.stored_bytes = inner.stored_bytes
        if isinstance(inner, SharesRoom):
            self.reserve_bytes, self.release_bytes = inner.reserve_bytes, inner.release_bytes
            self.reclaim = lambda keys: self.around("reclaim", lambda: inner.reclaim(keys))
            self.list_all = lambda: self.around("list_all", inner.list_all)
        if isinstance(inner, RegistersMemory):
            self.register_memory = inner.register_memory
        if isinstance(inner, Shared):
            self.shared = inner.shared

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self.inner!r})"

    @property
    def name(self) -> str:
        return self.inner.name

    def around(self, verb: str, call: Callable[[], T]) -> T:
        """Make one call; all but `close` and plain attributes come here. `verb`: the method's name."""
        return call()

    def contains(self, keys: Sequence[ChunkKey]) -> list[bool]:
        return self.around("contains", lambda: self.inner.contains(keys))

    def read(self, key: ChunkKey, into: memoryview) -> Read:
        return self.around("read", lambda: self.inner.read(key, into))

    def write(self, chunk: Chunk) -> Written:
        return self.around("write", lambda: self.inner.write(chunk))

    def delete(self, keys: Sequence[ChunkKey]) -> None:
        self.around("delete", lambda: self.inner.delete(keys))

    def close(self) -> None:
        self.inner.close()


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
