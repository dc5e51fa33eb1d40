"""Compares the KV that a model has just computed for a chunk with the stored KV of the same chunk.

The same computation in another batch, or in steps of other sizes, gives slightly different numbers. docs/audits.md
lists the tolerances.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import lru_cache

import numpy as np
import numpy.typing as npt
import torch
from attrs import define, field, frozen

from lmkv.chunks.layout import KVLayout
from lmkv.memory.copier import DONE, ChunkCopy, Event
from lmkv.memory.device import Staging
from lmkv.memory.paged import PagedMemory
from lmkv.memory.slab import SlabMap

TOLERANCE = {
    torch.float32: 0.02,
    torch.float16: 0.1,
    torch.bfloat16: 0.2,
    torch.float8_e4m3fn: 0.25,
    torch.float8_e5m2: 0.35,
}
"""The largest `deviation` at which a page still counts as equal, by the dtype of its numbers. Other dtypes are not
compared.
"""
_RUN = 16
"""How many consecutive numbers form a run, the unit of comparison. All belong to the keys or values of one head."""
_ROUNDING, _LEAST = 4.0, 0.05
"""Lower bounds for the spread of a run: `_ROUNDING` rounding errors, and `_LEAST` times the page's median spread."""


@frozen
class Part:
    """Describes where the numbers of one layer are in the pages of a plane (an array with one page for each block).

    `plane`: the index of the plane. `offset`, `nbytes`: the range of bytes in each page. `dtype`: the type of the
    numbers. `strides`: the possible distances, in numbers, from a channel of one token to the same channel of the next
    token in a page.

    `loose`: the fraction of a page that may differ, because a rounding error may choose another expert of the model for
    a token. `source`: the model's dtype, which decides the rounding errors.
    """

    layer: str
    plane: int
    offset: int
    nbytes: int
    dtype: torch.dtype
    strides: tuple[int, ...] = (1,)
    loose: float = 0.0
    source: torch.dtype | None = None


@frozen
class Difference:
    """A chunk that differs from its stored copy on one rank. `layers`: names of the layers that differ. `copy`: the
    chunk's index in the list that was compared.

    `first`, `end`: the tokens of the chunk from the first to the last page that differs. `deviation`: the largest
    deviation of any page (see `deviation`). `blocks`: the blocks that differ; empty after a comparison of slots.
    """

    copy: int
    rank: int
    layers: tuple[str, ...]
    first: int
    end: int
    deviation: float
    blocks: tuple[int, ...] = ()


def deviation(
    computed: torch.Tensor,
    stored: torch.Tensor,
    strides: Sequence[int] = (1,),
    rounding: float = 0.0,
    loose: float = 0.0,
) -> torch.Tensor:
    """Return how far the computed and the stored numbers of each page differ: one number per page.

    `computed`, `stored`: tensors of shape [page, number]. The result of a page is the difference of the run (16
    consecutive numbers) that differs most. `loose`: the share of runs, 0 to 1, to ignore; the runs that differ most are
    ignored.

    The difference of a run is divided by the spread of the run: how much its computed numbers change from token to
    token. So a large mean of the numbers hides no difference. `strides`: see `Part`; with several strides, the smallest
    spread counts. `rounding`: the relative rounding error of the numbers. The result is 0 for equal pages and about 1
    for unrelated pages. If only one of two numbers is finite, the result is infinite.

    >>> page = torch.randn((1, 64), generator=torch.Generator().manual_seed(1))
    >>> other = page.clone()
    >>> other[0, 16:32] = page[0, 32:48]
    >>> deviation(page, page).item(), 0.5 < deviation(page, other).item() < 5
    (0.0, True)
    """
    unlike = (computed.isfinite() != stored.isfinite()).any(1)
    left, right = (numbers.float().nan_to_num(0, 0, 0) for numbers in (computed, stored))
    steps = [_steps(left, stride) for stride in strides if 2 * stride <= left.shape[1]] or [left]
    spread = torch.stack([_runs(step) / 2 for step in steps]).amin(0)
    scale = spread.sqrt() + _ROUNDING * rounding * _runs(left).sqrt()
    scale = torch.maximum(scale, _LEAST * scale.median(1, keepdim=True).values)
    found: torch.Tensor = _runs(left - right).sqrt() / scale.clamp(min=torch.finfo(torch.float32).tiny)
    farthest = found.sort(1).values[:, found.shape[1] - 1 - int(loose * found.shape[1])]
    return farthest.masked_fill(unlike, float("inf"))


def _runs(numbers: torch.Tensor) -> torch.Tensor:
    """Return the mean square of each run of 16 numbers: shape [page, run]. Zeros fill up the last run of a page."""
    squares = torch.nn.functional.pad(numbers.double().square(), (0, -numbers.shape[1] % _RUN))
    found: torch.Tensor = squares.unflatten(1, (-1, _RUN)).mean(2)
    return found


def _steps(numbers: torch.Tensor, stride: int) -> torch.Tensor:
    """Return the difference between each number and the number `stride` places later. The last `stride` differences of
    a page are repeated.
    """
    steps = numbers[:, stride:] - numbers[:, :-stride]
    return torch.cat([steps, steps[:, -stride:]], 1)


@frozen
class Comparison:
    """Compares computed chunks with stored chunks, both in slots of host memory, for one rank. Thread-safe.

    `tolerances`: for each dtype, the largest `deviation` at which a page counts as equal. Other dtypes are not
    compared.
    """

    _layout: KVLayout
    _slab: SlabMap
    _rank: int
    _parts: Sequence[Part]
    _tolerances: dict[torch.dtype, float] = field(factory=TOLERANCE.copy)

    def differences(self, copies: Sequence[ChunkCopy], stored: Sequence[int]) -> list[Difference]:
        """Compare each copy's slot with the slot at the same index of `stored`. Return the chunks that differ."""
        found = []
        for number, (copy, slot) in enumerate(zip(copies, stored, strict=True)):
            wrong = list(self._wrong(copy, slot))
            if wrong:
                layers, firsts, ends, deviations = zip(*wrong, strict=True)
                span = min(firsts), max(ends)
                found.append(Difference(number, self._rank, layers, *span, max(deviations)))
        return found

    def _wrong(self, copy: ChunkCopy, stored: int) -> Iterator[tuple[str, int, int, float]]:
        """Yield `(layer, first token, end, deviation)` for each layer that differs in the chunk."""
        for part in self._parts:
            tolerance = self._tolerances.get(part.dtype)
            if tolerance is not None and part.source is not None:
                tolerance = max(tolerance, self._tolerances.get(part.source, 0.0))
            found = self.measure(part, copy, stored) if tolerance is not None else None
            if found is None or tolerance is None:
                continue
            pages = (found > tolerance).nonzero().flatten().tolist()
            if pages:
                shape = self._layout.layers[part.plane]
                first, size = copy.runs[shape.group].first, self._layout.chunk_size // shape.pages_per_chunk
                yield part.layer, (first + pages[0]) * size, (first + pages[-1] + 1) * size, float(found.max())

    def measure(self, part: Part, copy: ChunkCopy, stored: int) -> torch.Tensor | None:
        """Return the `deviation` between the copy's slot and the slot `stored`, for each page with numbers of `part`.

        Return None if all these numbers are equal or the copy contains no such page.
        """
        computed, known = (
            _pages(self._layout, self._slab, self._rank, part, copy, slot) for slot in (copy.slot, stored)
        )
        if np.array_equal(computed, known):
            return None
        rounding = torch.finfo(part.dtype).eps
        pages = _numbers(computed, part.dtype), _numbers(known, part.dtype)
        return deviation(*pages, part.strides, rounding, part.loose)


def _pages(layout: KVLayout, slab: SlabMap, rank: int, part: Part, copy: ChunkCopy, slot: int) -> npt.NDArray[np.uint8]:
    """Return the bytes of `part` in each page of a copy, but read from `slot`: uint8 [page, byte]."""
    shape, (offset, nbytes) = layout.layers[part.plane], layout.span(rank, part.plane)
    run = copy.runs[shape.group]
    rows = slice(run.first, run.first + len(run.blocks)), slice(part.offset, part.offset + part.nbytes)
    return slab.array[slot, offset : offset + nbytes].reshape(-1, shape.page_bytes)[rows]


def _numbers(pages: npt.NDArray[np.uint8], dtype: torch.dtype) -> torch.Tensor:
    return torch.from_numpy(np.ascontiguousarray(pages)).view(dtype).float()


# -- by digests -------------------------------------------------------------------------------------------


Digests = list[list[torch.Tensor]]
"""For each part and each copy, a tensor of digests: int64 [page]."""

_WORDS = 1 << 20
"""Number of 32-bit words in one batch of pages: 4 MiB, which needs 20 MiB of scratch memory."""


def factors(row: int, count: int, device: torch.device) -> torch.Tensor:
    """Return `count` pseudorandom odd numbers, int64 [count], made with SplitMix64's mixing function. `row`: the
    seed.
    """
    mixed = torch.arange(1, count + 1, dtype=torch.int64, device=device) * -7046029254386353131 * (2 * row + 1)
    for shift, factor in ((30, -4658895280553007687), (27, -7723592293110705685)):
        mixed = (mixed ^ ((mixed >> shift) & ((1 << (64 - shift)) - 1))) * factor
    return mixed | 1


_page_factors = lru_cache(64)(factors)


def page_digests(rows: torch.Tensor, blocks: torch.Tensor) -> torch.Tensor:
    """Return a digest for each of the pages with an index in `blocks`: int64 [page]. `rows`: the pages, uint8 [block,
    byte].

    The digests are computed on the device of `rows`. A digest is the sum, modulo 2**64, of a page's 32-bit words, each
    multiplied by a factor that depends on the word's place in the page. Different pages have equal digests with a
    probability of about 2**-33.

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
class PendingDigests:
    """The digests that `ReadBack.begin` is computing. The digests are valid once `event` is reached."""

    event: Event
    found: torch.Tensor

    def query(self) -> bool:
        return self.event.query()

    def wait(self) -> None:
        self.event.wait()


@define(eq=False)
class ReadBack:
    """Computes digests of blocks in one rank's paged memory. `parts`: where the KV values of each layer lie in a
    block. `staging`: the staging memory of the rank's device; None for a CPU.
    """

    _memory: PagedMemory
    _layout: KVLayout
    _parts: Sequence[Part]
    _rank: int
    _staging: Staging | None

    def begin(self, copies: Sequence[ChunkCopy]) -> PendingDigests:
        """Begin to compute digests of the blocks of `copies`, after all work that is now queued on the stream of the
        model's computation.
        """
        pages = [(part, self._blocks(part, copies)) for part in self._parts]
        on_device = self._memory.device.type == "cuda"
        found = torch.empty(sum(len(blocks) for _, blocks in pages), dtype=torch.int64, pin_memory=on_device)

        def read() -> None:
            for (part, blocks), digests in zip(pages, found.split([len(blocks) for _, blocks in pages]), strict=True):
                rows = self._memory.rows[part.plane][:, part.offset : part.offset + part.nbytes]
                digests.copy_(page_digests(rows, blocks), non_blocking=True)

        if self._staging is None:
            read()
            return PendingDigests(DONE, found)
        compute = self._staging.device.stream(compute=True)
        compute.run(read)
        return PendingDigests(compute.record_event(), found)

    def _blocks(self, part: Part, copies: Sequence[ChunkCopy]) -> torch.Tensor:
        group = self._layout.layers[part.plane].group
        blocks = torch.tensor([block for copy in copies for block in copy.runs[group].blocks], dtype=torch.int64)
        return blocks.pin_memory() if self._memory.device.type == "cuda" else blocks

    def digests(self, reading: PendingDigests, copies: Sequence[ChunkCopy]) -> Digests:
        """Split the digests that `begin` has computed: return, for each of `parts`, one tensor for each copy."""
        groups = [self._layout.layers[part.plane].group for part in self._parts]
        sizes = [len(copy.runs[group].blocks) for group in groups for copy in copies]
        found = list(reading.found.split(sizes))
        return [found[at : at + len(copies)] for at in range(0, len(found), len(copies))]

    def of_slots(self, copies: Sequence[ChunkCopy], slab: SlabMap) -> Digests:
        """Return the digests of the copies' pages, read from the copies' slots in `slab`. Any thread may call this
        method.
        """
        return [[self._of_slot(part, copy, slab) for copy in copies] for part in self._parts]

    def _of_slot(self, part: Part, copy: ChunkCopy, slab: SlabMap) -> torch.Tensor:
        pages = torch.from_numpy(_pages(self._layout, slab, self._rank, part, copy, copy.slot))
        return page_digests(pages, torch.arange(len(pages)))

    def differences(self, copies: Sequence[ChunkCopy], found: Digests, known: Digests) -> list[Difference]:
        """Compare the digests `found` with the digests `known` of the same copies. Return the chunks that differ.

        A copy may have fewer pages in `found` than in `known`. Then only the pages in `found` are compared.
        """
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
        """Return `(first token, end, block)` for each page of the copy with an index in `pages`."""
        shape = self._layout.layers[part.plane]
        run, size = copy.runs[shape.group], self._layout.chunk_size // shape.pages_per_chunk
        return [((run.first + page) * size, (run.first + page + 1) * size, run.blocks[page]) for page in pages]
