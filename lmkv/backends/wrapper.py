"""`WrapperBackend`: forwards all to another backend; the base of instrumentation and fault injectors."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import TypeVar

from lmkv.outcomes import Read, Written
from lmkv.protocols import Backend, Chunk, ChunkKey, Listed, ListsKeys, Shared, SharesRoom, SizesChunks

T = TypeVar("T")


class WrapperBackend:
    """Has the verbs of `Backend` and exactly the capabilities of `inner`: `isinstance` tells the truth.

    Override `around` to see every call, or a verb of its own. A capability's verb is `_forward_<verb>` here:
    the public name exists only on wrappers of a backend that has it. Locks: none.
    """

    def __init__(self, inner: Backend) -> None:
        self.inner = inner
        # On the instance and not the class: protocols look for the attribute, and not every inner has it.
        if isinstance(inner, ListsKeys):
            self.list_keys = partial(self._forward_list_keys, inner)
        if isinstance(inner, SizesChunks):
            self.stored_bytes = inner.stored_bytes
        if isinstance(inner, SharesRoom):
            self.reserve_bytes, self.release_bytes = inner.reserve_bytes, inner.release_bytes
            self.reclaim = partial(self._forward_reclaim, inner)
            self.list_all = partial(self._forward_list_all, inner)
        if isinstance(inner, Shared):
            self.shared = inner.shared

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self.inner!r})"

    @property
    def name(self) -> str:
        return self.inner.name

    def around(self, verb: str, call: Callable[[], T]) -> T:
        """Every call but `close` and the cheap properties comes through here. `verb`: the method's name."""
        return call()

    def contains(self, keys: Sequence[ChunkKey]) -> list[bool]:
        return self.around("contains", lambda: self.inner.contains(keys))

    def read(self, items: Sequence[tuple[ChunkKey, memoryview]]) -> list[Read]:
        return self.around("read", lambda: self.inner.read(items))

    def write(self, chunks: Sequence[Chunk]) -> list[Written]:
        return self.around("write", lambda: self.inner.write(chunks))

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
