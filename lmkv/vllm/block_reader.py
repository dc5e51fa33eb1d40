"""`BlockReader`: reads chunks in shared memory straight into the blocks of paged memory on the host."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from typing import Any

import numpy as np
import numpy.typing as npt

from lmkv.backends.disk.shared_memory import SharedMemoryBackend
from lmkv.chunks.layout import KVLayout, align_up
from lmkv.errors import BackendError, CorruptChunkError
from lmkv.memory.copier import ChunkCopy, check_copies
from lmkv.memory.paged import PagedMemory
from lmkv.outcomes import Read, ReadStatus
from lmkv.protocols import ChunkKey
from lmkv.store.leases import IN_PLACE
from lmkv.vllm.metadata import CopyOrder

logger = logging.getLogger("lmkv.vllm")


_AT_ONCE = 32
"""Files that are open at a time."""


class UnreadError(Exception):
    """Files of chunks could not be read into their blocks. `blind`: why none can be, "" if others may."""

    def __init__(self, keys: list[ChunkKey], blind: str) -> None:
        super().__init__(f"{len(keys)} chunks in shared memory could not be read")
        self.keys, self.blind = keys, blind


class BlockReader:
    """Reads files of the chunks of one rank whose layers have one block table. Not thread-safe.

    A chunk is verified once its blocks are filled, so nothing may use them before that.
    """

    def __init__(self, memory: PagedMemory, layout: KVLayout) -> None:
        self._layout = layout
        self._planes: list[npt.NDArray[Any]] = [row.numpy() for row in memory.rows]
        self._num_blocks = memory.num_blocks
        self._unwanted = np.empty(layout.slot_bytes, np.uint8).data
        """As long as a payload: its pages that have no block, and its padding, are read into this."""
        self._backend: SharedMemoryBackend | None = None

    def read(self, order: CopyOrder) -> list[ChunkCopy]:
        """Fill the blocks of the order's files; returns its other copies.

        Raises `UnreadError`, also after some blocks were filled, and UsageError for blocks that do not exist.
        """
        in_place = [copy for copy in order.copies if copy.slot == IN_PLACE]
        check_copies([copy._replace(slot=0) for copy in in_place], 1, self._num_blocks)
        # A hit may end before the last chunks that were leased.
        wanted = [
            (file.key, list(self._parts(file.tokens, copy))) for file, copy in zip(order.files, in_place, strict=False)
        ]
        for at in range(0, len(wanted), _AT_ONCE):
            results = self._read(order, wanted[at : at + _AT_ONCE])
            if results[-1].status is not ReadStatus.HIT:
                raise self._unread(wanted[at + len(results) - 1][0], results[-1])
        return [copy for copy in order.copies if copy.slot != IN_PLACE]

    def _read(self, order: CopyOrder, wanted: list[tuple[ChunkKey, list[memoryview]]]) -> list[Read]:
        try:
            if self._backend is None:
                assert order.place is not None
                self._backend = SharedMemoryBackend.at(order.place)
            return self._backend.read_scattered(wanted)
        except BackendError as error:
            return [Read.failed(error)]

    @staticmethod
    def _unread(key: ChunkKey, result: Read) -> UnreadError:
        if result.error is None:
            # Another process has evicted it.
            return UnreadError([key], "")
        logger.warning("lmkv: %s", result.error)
        return UnreadError([key], "" if isinstance(result.error, CorruptChunkError) else str(result.error))

    def _parts(self, tokens: int, copy: ChunkCopy) -> Iterator[memoryview]:
        """The memory to read the payload of a chunk of `tokens` tokens into, in its order."""
        layout, at = self._layout, 0
        # No part of it twice: several pieces are read before the first is verified.
        for plane, layer in zip(self._planes, layout.layers, strict=True):
            run, size = copy.runs[layer.group], layer.page_bytes
            pages = -(-tokens * layer.pages_per_chunk // layout.chunk_size)
            blocks = run.blocks[: pages - run.first]
            end = at + pages * size
            yield self._unwanted[at : at + run.first * size]
            yield from _runs(plane, blocks)
            yield self._unwanted[at + (run.first + len(blocks)) * size : end]
            at = end
        if tokens == layout.chunk_size:
            # Whole chunks are stored as whole memory pages.
            yield self._unwanted[at : align_up(at)]

    def close(self) -> None:
        if self._backend is not None:
            self._backend.close()


def _runs(plane: npt.NDArray[Any], blocks: list[int]) -> Iterator[memoryview]:
    """The memory of these blocks, in one piece where they follow each other."""
    dense, at = plane.flags.c_contiguous, 0
    while at < len(blocks):
        end = at + 1
        while dense and end < len(blocks) and blocks[end] == blocks[end - 1] + 1:
            end += 1
        yield plane[blocks[at] : blocks[end - 1] + 1].reshape(-1).data
        at = end
