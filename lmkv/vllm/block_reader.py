"""`BlockReader`: reads chunks in shared memory straight into the blocks of paged memory on the host."""

from __future__ import annotations

import logging
import time
from collections.abc import Iterator, Sequence
from itertools import pairwise
from typing import Any

import numpy.typing as npt
from attrs import evolve

from lmkv.backends.disk.shared_memory import SharedMemoryBackend
from lmkv.chunks.hashing import TailKey
from lmkv.chunks.layout import KVLayout
from lmkv.errors import CorruptChunkError
from lmkv.memory.copier import ChunkCopy, check_copies
from lmkv.memory.cpu_copier import CPUCopier
from lmkv.memory.paged import PagedMemory
from lmkv.memory.slab import Slab
from lmkv.outcomes import Read, ReadStatus
from lmkv.protocols import ChunkKey
from lmkv.store.in_place import FilesRead
from lmkv.store.leases import IN_PLACE
from lmkv.store.tiers.tails import Payloads
from lmkv.vllm.metadata import CopyOrder

logger = logging.getLogger("lmkv.vllm")

_AT_ONCE = 32
"""Files that are open at a time."""
_SMALL = 16 << 10
"""Bytes. The kernel fills shorter pieces of memory more slowly than they are copied from a slot."""

_Chunk = tuple[ChunkKey, ChunkCopy]


class UnreadError(Exception):
    """A chunk in shared memory could not be read into its blocks."""


class BlockReader:
    """Reads files of the chunks of one rank whose layers have one block table. Not thread-safe.

    A chunk is verified once its blocks are filled, so nothing may use them before that.
    """

    def __init__(self, memory: PagedMemory, layout: KVLayout) -> None:
        self._memory, self._layout = memory, layout
        self._payloads = Payloads(layout.slot_bytes, layout.spans, layout.sizes)
        self._planes: list[npt.NDArray[Any]] = [row.numpy() for row in memory.rows]
        self._backend: SharedMemoryBackend | None = None
        self._slot = Slab(layout.slot_bytes, layout.slot_bytes)
        """Gets the pages of a file that have no block, and its padding; or all of them, where runs are small."""
        self._copier = CPUCopier(memory, layout, self._slot)

    def read(self, order: CopyOrder) -> FilesRead:
        """Fill the blocks of the order's files, up to the first that cannot be read. Raises nothing."""
        started, done, nbytes = time.monotonic(), 0, 0
        try:
            if self._backend is None:
                assert order.place is not None
                self._backend = SharedMemoryBackend.at(order.place)
            in_place = [copy for copy in order.copies if copy.slot == IN_PLACE]
            check_copies([copy._replace(slot=0) for copy in in_place], 1, self._memory.num_blocks)
            # A hit may end before the last chunks that were leased.
            chunks = list(zip(order.files, in_place, strict=False))
            read, at_once = (self._copied, 1) if self._has_small_runs(in_place) else (self._scattered, _AT_ONCE)
            while done < len(chunks):
                results = read(self._backend, chunks[done : done + at_once])
                good = [result for result in results if result.status is ReadStatus.HIT]
                nbytes += sum(self._payloads.nbytes(key) for key, _ in chunks[done : done + len(good)])
                done += len(good)
                if len(good) < len(results):
                    seconds = time.monotonic() - started
                    return self._failed(FilesRead(done, nbytes, seconds, chunks[done][0]), results[-1])
        except Exception as error:
            logger.exception("lmkv: chunks in shared memory could not be read")
            return FilesRead(done, nbytes, time.monotonic() - started, blind=repr(error))
        return FilesRead(done, nbytes, time.monotonic() - started)

    def _has_small_runs(self, copies: Sequence[ChunkCopy]) -> bool:
        """Whether the blocks of a layer are so small, and so scattered, that chunks are better copied from a slot."""
        tables = [copy.runs[0].blocks for copy in copies]
        blocks = sum(map(len, tables))
        steps = sum(after == before + 1 for table in tables for before, after in pairwise(table))
        planes = [plane.flags.c_contiguous for plane in self._planes]
        runs = blocks * len(planes) - steps * sum(planes)
        return blocks * sum(layer.page_bytes for layer in self._layout.layers) < runs * _SMALL

    @staticmethod
    def _failed(read: FilesRead, result: Read) -> FilesRead:
        if result.error is None:
            # Another process has evicted it.
            return read
        logger.warning("lmkv: %s", result.error)
        damaged = isinstance(result.error, CorruptChunkError)
        return evolve(read, error=str(result.error), damaged=damaged)

    def _scattered(self, backend: SharedMemoryBackend, chunks: Sequence[_Chunk]) -> list[Read]:
        """Read chunks into their blocks."""
        wanted = [(key, [*filter(len, self._parts(key, copy))]) for key, copy in chunks]
        return backend.read_scattered(wanted)

    def _copied(self, backend: SharedMemoryBackend, chunks: Sequence[_Chunk]) -> list[Read]:
        """Read one chunk into the slot, and copy it from there."""
        ((key, copy),) = chunks
        slot = self._slot.view(0)
        spans = self._layout.spans(key.tokens) if isinstance(key, TailKey) else [slice(0, self._payloads.nbytes(key))]
        results = backend.read_scattered([(key, [slot[span] for span in spans])])
        if results[0].status is ReadStatus.HIT:
            self._copier.load([copy._replace(slot=0)])
        return results

    def _parts(self, key: ChunkKey, copy: ChunkCopy) -> Iterator[memoryview]:
        """The memory to read the payload of a chunk into, in its order."""
        layout, unwanted, at = self._layout, self._slot.view(0), 0
        tokens = key.tokens if isinstance(key, TailKey) else layout.chunk_size
        # No part of it twice: several pieces are read before the first is verified.
        for plane, layer in zip(self._planes, layout.layers, strict=True):
            run, size = copy.runs[layer.group], layer.page_bytes
            pages = -(-tokens * layer.pages_per_chunk // layout.chunk_size)
            blocks = run.blocks[: pages - run.first]
            end = at + pages * size
            yield unwanted[at : at + run.first * size]
            yield from runs_of(plane, blocks)
            yield unwanted[at + (run.first + len(blocks)) * size : end]
            at = end
        yield unwanted[at : self._payloads.nbytes(key)]

    def close(self) -> None:
        if self._backend is not None:
            self._backend.close()


def runs_of(plane: npt.NDArray[Any], blocks: list[int]) -> Iterator[memoryview]:
    """The memory of these blocks, in one piece where they follow each other."""
    dense, at = plane.flags.c_contiguous, 0
    while at < len(blocks):
        end = at + 1
        while dense and end < len(blocks) and blocks[end] == blocks[end - 1] + 1:
            end += 1
        yield plane[blocks[at] : blocks[end - 1] + 1].reshape(-1).data
        at = end
