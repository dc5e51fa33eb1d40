"""`Trace`: the requests of a server, as the chunks that each of them used."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Sequence
from functools import cached_property
from typing import Final

from attrs import define, field

from lmkv.protocols import ChunkKey

_KEY_BYTES: Final = 16
_BLOCK_BYTES: Final = 64
_CHUNK_BYTES: Final = 1024
REQUEST_BLOCKS: Final = 8
"""Memory of a block of a request and of a chunk that no request had before, replays included; blocks that a request is
as large as."""


@define(eq=False)
class TraceRequest:
    """One request.

    `time`: seconds since the start of the trace. `keys`: its chunks, head first, the last one perhaps partial.
    `tokens`: length of its prompt. `output_tokens`: how many it generated. `session`: requests with the same one belong
    together; empty where the trace does not say.
    """

    time: float
    keys: list[ChunkKey]
    tokens: int
    output_tokens: int = 0
    session: str = ""


@define(eq=False, slots=False)
class Trace:
    """The requests of a server. `chunk_tokens`: tokens of a whole chunk."""

    name: str
    chunk_tokens: int
    requests: list[TraceRequest]

    @cached_property
    def accesses(self) -> int:
        return sum(len(request.keys) for request in self.requests)

    @cached_property
    def unique(self) -> int:
        """How many different chunks the requests use."""
        return len({key for request in self.requests for key in request.keys})

    @cached_property
    def tokens(self) -> int:
        return sum(request.tokens for request in self.requests)


@define(eq=False)
class Room:
    """Memory that one trace may take. `nbytes`: at most. Raises ValueError when that is exceeded."""

    nbytes: int
    blocks: int = 0
    chunks: int = 0

    def take(self, blocks: int, chunks: int = 0) -> None:
        """Count this much, before it is made."""
        self.blocks += blocks
        self.chunks += chunks
        if self.blocks * _BLOCK_BYTES + self.chunks * _CHUNK_BYTES > self.nbytes:
            raise ValueError(
                f"with this line the trace has {self.blocks:,} blocks of {_BLOCK_BYTES} bytes and {self.chunks:,} "
                f"different chunks of {_CHUNK_BYTES:,}, more than --memory: {self.nbytes / 2**30:.3g} GiB"
            )


@define(eq=False)
class KeyTable:
    """Makes keys that stand for a chunk and all before it, as lmkv's do. Equal keys are one object.

    Names in traces are often small numbers; keys are hashes, so that a sample by key is fair.
    """

    name: str
    room: Room
    _keys: dict[object, ChunkKey] = field(init=False, factory=dict)

    def key(self, of: object) -> ChunkKey:
        key = self._keys.get(of)
        if key is None:
            self.room.take(0, 1)
            digest = hashlib.blake2b(f"{self.name} {len(self._keys)}".encode(), digest_size=_KEY_BYTES)
            key = self._keys[of] = digest.digest()
        return key

    def chain(self, root: object, parts: Iterable[object]) -> list[ChunkKey]:
        """The keys of a chain whose chunks have this content, head first."""
        known, keys, parent = self._keys, [], root
        for part in parts:
            parent = known.get((parent, part)) or self.key((parent, part))
            keys.append(parent)
        return keys


def chunked(blocks: Sequence[object], per_chunk: int, *, partial: bool) -> Iterable[object]:
    """Group `per_chunk` blocks to a chunk; `partial`: the last may have fewer."""
    if per_chunk == 1:
        return blocks
    end = len(blocks) if partial else len(blocks) // per_chunk * per_chunk
    return (tuple(blocks[at : at + per_chunk]) for at in range(0, end, per_chunk))
