"""`WrapperBackend`: forwards to another backend, as a base for instrumentation and fault injection."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import TypeVar

from lmkv.outcomes import Read, Written
from lmkv.protocols import Backend, Chunk, ChunkKey, Listed, ListsKeys, RegistersMemory, Shared, SharesRoom, SizesChunks

T = TypeVar("T")


class WrapperBackend:
    """A backend with the verbs and the capabilities of another one, as `isinstance` sees them, too.

    Parameters
    ----------
    inner
        The backend that every call is forwarded to.

    Notes
    -----
    Override `around` to see every call, or a verb to change it. The verb of a capability is `_forward_<verb>`
    here: only wrappers of a backend that has it get the public name. There are no locks.

    Examples
    --------
    >>> from lmkv.backends.null import NullBackend
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
            self.list_keys = partial(self._forward_list_keys, inner)
        if isinstance(inner, SizesChunks):
            self.stored_bytes = inner.stored_bytes
        if isinstance(inner, SharesRoom):
            self.reserve_bytes, self.release_bytes = inner.reserve_bytes, inner.release_bytes
            self.reclaim = partial(self._forward_reclaim, inner)
            self.list_all = partial(self._forward_list_all, inner)
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

    def _forward_list_keys(self, inner: ListsKeys) -> Iterator[list[Listed]]:
        return self.around("list_keys", inner.list_keys)

    def _forward_reclaim(self, inner: SharesRoom, keys: Sequence[ChunkKey]) -> int:
        return self.around("reclaim", lambda: inner.reclaim(keys))

    def _forward_list_all(self, inner: SharesRoom) -> Iterator[list[Listed]]:
        return self.around("list_all", inner.list_all)
