"""Reads back what copies have left in paged memory, by plain indexing: another way than copiers write it.

Pages are compared by digests of 64 bits, so that neither blocks nor chunks cross the bus or wait in host memory.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache

import numpy as np
import torch
from attrs import define, frozen

from lmkv.chunks.layout import KVLayout
from lmkv.memory.comparison import Difference, Part
from lmkv.memory.copier import DONE, ChunkCopy, Event
from lmkv.memory.device import Staging
from lmkv.memory.paged import PagedMemory
from lmkv.memory.slab import SlabMap

Digests = list[list[torch.Tensor]]
"""For each part and each copy: int64 [page]."""

_WORDS = 1 << 20
"""Words of 32 bits whose digests are computed together: 4 MiB, for which 20 MiB are needed."""


def factors(row: int, count: int, device: torch.device) -> torch.Tensor:
    """`count` odd numbers, int64, that have nothing to do with each other (the mixing step of SplitMix64)."""
    mixed = torch.arange(1, count + 1, dtype=torch.int64, device=device) * -7046029254386353131 * (2 * row + 1)
    for shift, factor in ((30, -4658895280553007687), (27, -7723592293110705685)):
        mixed = (mixed ^ ((mixed >> shift) & ((1 << (64 - shift)) - 1))) * factor
    return mixed | 1


_page_factors = lru_cache(64)(factors)


def page_digests(rows: torch.Tensor, blocks: torch.Tensor) -> torch.Tensor:
    """A digest of each of the pages `blocks`, int64 [page], of `rows`, uint8 [block, byte], on their device.

    Each word of 32 bits is multiplied by a factor of its place, and the products are added up modulo 2**64: pages that
    differ have equal digests with a probability of about 2**-33.

    >>> rows = torch.arange(32, dtype=torch.uint8).reshape(4, 8)
    >>> one, other, again = page_digests(rows, torch.tensor([0, 3, 0])).tolist()
    >>> one == again, one == other
    (True, False)
    """
    width = -(-rows.shape[1] // 4)
    found = [torch.empty(0, dtype=torch.int64, device=rows.device)]
    for some in blocks.to(rows.device, non_blocking=True).split(max(1, _WORDS // width)):
        pages = rows[some]
        if rows.shape[1] % 4:
            pages = torch.nn.functional.pad(pages, (0, 4 * width - rows.shape[1]))
        words = pages.view(torch.int32).to(torch.int64)
        found.append((words * _page_factors(1, width, rows.device)).sum(1))
    return torch.cat(found)


@frozen
class Reading:
    """The digests of all pages that were read, one after the other, once `event` is reached."""

    event: Event
    found: torch.Tensor

    def query(self) -> bool:
        return self.event.query()

    def wait(self) -> None:
        self.event.wait()


@define(eq=False)
class ReadBack:
    """Reads one rank's paged memory. `parts`: of its pages, by layer. `staging`: of its device, None for a CPU."""

    _memory: PagedMemory
    _layout: KVLayout
    _parts: Sequence[Part]
    _rank: int
    _staging: Staging | None

    def begin(self, copies: Sequence[ChunkCopy]) -> Reading:
        """Read the blocks of copies after all computation, and all loads that it waits for, launched until now."""
        pages = [(part, self._blocks(part, copies)) for part in self._parts]
        on_device = self._memory.device.type == "cuda"
        found = torch.empty(sum(len(blocks) for _, blocks in pages), dtype=torch.int64, pin_memory=on_device)

        def read() -> None:
            for (part, blocks), digests in zip(pages, found.split([len(blocks) for _, blocks in pages]), strict=True):
                rows = self._memory.rows[part.plane][:, part.offset : part.offset + part.nbytes]
                digests.copy_(page_digests(rows, blocks), non_blocking=True)

        if self._staging is None:
            read()
            return Reading(DONE, found)
        compute = self._staging.device.stream(compute=True)
        compute.run(read)
        return Reading(compute.mark(), found)

    def _blocks(self, part: Part, copies: Sequence[ChunkCopy]) -> torch.Tensor:
        group = self._layout.layers[part.plane].group
        blocks = torch.tensor([block for copy in copies for block in copy.runs[group].blocks], dtype=torch.int64)
        return blocks.pin_memory() if self._memory.device.type == "cuda" else blocks

    def digests(self, reading: Reading, copies: Sequence[ChunkCopy]) -> Digests:
        """A reading that has ended, by part and copy."""
        groups = [self._layout.layers[part.plane].group for part in self._parts]
        sizes = [len(copy.runs[group].blocks) for group in groups for copy in copies]
        found = list(reading.found.split(sizes))
        return [found[at : at + len(copies)] for at in range(0, len(found), len(copies))]

    def of_slots(self, copies: Sequence[ChunkCopy], slab: SlabMap) -> Digests:
        """The digests of the pages that copies have taken from their slots. On any thread."""
        return [[self._of_slot(part, copy, slab) for copy in copies] for part in self._parts]

    def _of_slot(self, part: Part, copy: ChunkCopy, slab: SlabMap) -> torch.Tensor:
        shape, (offset, nbytes) = self._layout.layers[part.plane], self._layout.span(self._rank, part.plane)
        run = copy.runs[shape.group]
        pages = torch.from_numpy(slab.array[copy.slot, offset : offset + nbytes]).view(-1, shape.page_bytes)
        numbers = torch.arange(run.first, run.first + len(run.blocks))
        return page_digests(pages[:, part.offset : part.offset + part.nbytes], numbers)

    def differences(self, copies: Sequence[ChunkCopy], found: Digests, known: Digests) -> list[Difference]:
        """The copies whose pages are not those that are known, of which there may be more."""
        differ = []
        for number, copy in enumerate(copies):
            layers, pages = list[str](), list[tuple[int, int, int]]()
            for part, mine, theirs in zip(self._parts, found, known, strict=True):
                wrong = (mine[number] != theirs[number][: len(mine[number])]).nonzero().flatten().tolist()
                if wrong:
                    layers.append(part.layer)
                    pages += self._tokens(part, copy, wrong)
            if layers:
                firsts, ends, blocks = zip(*pages, strict=True)
                names, places = tuple(dict.fromkeys(layers)), tuple(dict.fromkeys(blocks))
                differ.append(Difference(number, self._rank, names, min(firsts), max(ends), np.inf, places))
        return differ

    def _tokens(self, part: Part, copy: ChunkCopy, pages: Sequence[int]) -> list[tuple[int, int, int]]:
        """`(first token, end, block)` of each of these pages of a copy."""
        shape = self._layout.layers[part.plane]
        run, size = copy.runs[shape.group], self._layout.chunk_size // shape.pages_per_chunk
        return [((run.first + page) * size, (run.first + page + 1) * size, run.blocks[page]) for page in pages]
