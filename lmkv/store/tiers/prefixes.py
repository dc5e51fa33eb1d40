"""Finds the chunk that shares the longest run of tokens with the rest of a prompt."""

from __future__ import annotations

from bisect import bisect_left, insort
from collections.abc import Iterator

from attrs import define, field

from lmkv.protocols import ChunkKey

_TOKEN_BYTES = 4


@define(eq=False)
class PrefixIndex:
    """Chunks by their origin (see `KeyChain.origin`) and their tokens, as bytes. Not thread-safe."""

    _chunks: dict[bytes, list[tuple[bytes, ChunkKey]]] = field(init=False, factory=dict, repr=False)
    """For each origin, sorted by tokens, so that a neighbour has the longest common prefix."""

    def add(self, origin: bytes, tokens: bytes, key: ChunkKey) -> None:
        insort(self._chunks.setdefault(origin, []), (tokens, key))

    def discard(self, origin: bytes, tokens: bytes, key: ChunkKey) -> None:
        chunks = self._chunks[origin]
        del chunks[bisect_left(chunks, (tokens, key))]
        if not chunks:
            del self._chunks[origin]

    def longest(self, origin: bytes, tokens: bytes) -> tuple[ChunkKey, int]:
        """`(key, count)`: the chunk whose first `count` tokens are those of `tokens`; `(b"", 0)` if none is."""
        best, most = b"", 0
        chunks = self._chunks.get(origin, [])
        at = bisect_left(chunks, (tokens, b""))
        for found, key in chunks[max(0, at - 1) : at + 1]:
            count = _common(found, tokens)
            if count > most:
                best, most = key, count
        return best, most

    def shorter(self, origin: bytes, tokens: bytes) -> Iterator[ChunkKey]:
        """Keys of the chunks whose tokens are a true prefix of `tokens`, from the longest on."""
        chunks = self._chunks.get(origin, [])
        for found, key in reversed(chunks[: bisect_left(chunks, (tokens, b""))]):
            if not tokens.startswith(found):
                return
            yield key


def _common(left: bytes, right: bytes) -> int:
    """How many leading tokens are equal."""
    low, high = 0, min(len(left), len(right)) // _TOKEN_BYTES
    while low < high:
        middle = (low + high + 1) // 2
        if left.startswith(right[: middle * _TOKEN_BYTES]):
            low = middle
        else:
            high = middle - 1
    return low
