"""The layout of a chunk: the place of each byte in the chunk. The layout is the same in workers, host memory and files.

A chunk consists of whole pages of vLLM's paged memory, in the order `[rank][layer][page]`. lmkv copies pages without
knowing the format inside them, so any attention backend works.

A recurrent layer (such as Mamba) has no pages, but a state at the end of a chunk. Each state entry has a separate slot,
because most chunks need no states, and states would make a chunk several times as large.
"""

from __future__ import annotations

import hashlib
from functools import cached_property
from itertools import product

from attrs import field, frozen, validators

ALIGNMENT = 4096
"""Bytes of a memory page. Slots start and end at multiples of this number, as O_DIRECT requires."""


def align_up(nbytes: int, alignment: int = ALIGNMENT) -> int:
    return -(-nbytes // alignment) * alignment


@frozen
class LayerPages:
    """The pages of one layer in a chunk, on one rank. Layers that share pages count as one layer.

    Parameters
    ----------
    page_bytes
        Bytes of one block of the layer.
    pages_per_chunk
        Number of blocks of the layer in a chunk.
    group
        Index of the block table (vLLM: KV cache group) that addresses the layer.
    state
        0 for keys and values, which are part of every chunk. For a recurrent layer, the number of the state entry that
        contains the layer's states: 1 or more.

    Raises
    ------
    ValueError
        A size is below 1.

    Examples
    --------
    >>> LayerPages(page_bytes=4096, pages_per_chunk=16).nbytes
    65536
    """

    page_bytes: int = field(validator=validators.gt(0))
    pages_per_chunk: int = field(validator=validators.gt(0))
    group: int = 0
    state: int = 0

    @property
    def nbytes(self) -> int:
        return self.page_bytes * self.pages_per_chunk


@frozen(slots=False, repr=False)
class KVLayout:
    """The order of bytes in a chunk, and in each state entry (the states of recurrent layers at the end of a chunk).

    The order is `[rank][layer][page]`, without padding.

    `PagedMemory.layout` makes the layout of a rank's KV tensors.

    Parameters
    ----------
    chunk_size
        Tokens per chunk.
    layers
        The layers of one rank, in the order of the model.
    num_ranks
        Number of ranks. Each rank stores its own part of every chunk: all of `layers`, or only the first ones if a
        pipeline stage has fewer layers.

    Raises
    ------
    ValueError
        A size is below 1, or there are no layers.

    Examples
    --------
    >>> layout = KVLayout(chunk_size=256, layers=(LayerPages(6000, 16),) * 2)
    >>> layout
    <KVLayout: chunk_size=256, num_layers=2, num_ranks=1, chunk_bytes=192000>
    >>> layout.slot_bytes, layout.span(rank=0, layer=1)
    (192512, (96000, 96000))
    """

    chunk_size: int = field(validator=validators.gt(0))
    layers: tuple[LayerPages, ...] = field(validator=validators.min_len(1))
    num_ranks: int = field(default=1, validator=validators.gt(0))

    def __repr__(self) -> str:
        shape = f"num_layers={len(self.layers)}, num_ranks={self.num_ranks}"
        return f"<KVLayout: chunk_size={self.chunk_size}, {shape}, chunk_bytes={self.chunk_bytes}>"

    @property
    def digest(self) -> str:
        """Identifier of the layout, 16 hexadecimal digits. Equal layouts have equal identifiers in every process."""
        return hashlib.sha256(repr((self.chunk_size, self.layers, self.num_ranks)).encode()).hexdigest()[:16]

    @cached_property
    def layer_offsets(self) -> tuple[int, ...]:
        """Offset of each layer in bytes, inside a rank's part of the chunk. A recurrent layer's offset is inside the
        rank's part of the slot with the layer's states (the state entry).
        """
        ends: dict[int, int] = {}
        offsets = []
        for layer in self.layers:
            offsets.append(ends.get(layer.state, 0))
            ends[layer.state] = offsets[-1] + layer.nbytes
        return tuple(offsets)

    @cached_property
    def states(self) -> int:
        """Number of state entries (slots with recurrent layers' states) per chunk; 0 without recurrent layers."""
        return max(layer.state for layer in self.layers)

    @cached_property
    def _rank_bytes(self) -> tuple[int, ...]:
        kinds = range(self.states + 1)
        return tuple(sum(layer.nbytes for layer in self.layers if layer.state == kind) for kind in kinds)

    @property
    def rank_bytes(self) -> int:
        """Number of bytes that one rank stores in a chunk."""
        return self._rank_bytes[0]

    @property
    def chunk_bytes(self) -> int:
        return self.rank_bytes * self.num_ranks

    @property
    def sizes(self) -> tuple[int, ...]:
        """Sizes in bytes of a chunk, and then of each state entry (recurrent layers' states), for all ranks."""
        return tuple(nbytes * self.num_ranks for nbytes in self._rank_bytes)

    @property
    def slot_bytes(self) -> int:
        """The size of a slot in bytes, rounded up to whole memory pages. A slot has space for a chunk or for any state
        entry (states of recurrent layers).
        """
        return align_up(max(self.sizes))

    def pages_per_chunk(self, group: int) -> int:
        """Return the number of blocks per chunk in block table `group`."""
        return next(layer.pages_per_chunk for layer in self.layers if layer.group == group)

    def spans(self, tokens: int) -> list[slice]:
        """Return the byte ranges of a chunk that contain the pages of its first `tokens` tokens, one range per rank and
        layer.
        """
        found = []
        for rank, (number, layer) in product(range(self.num_ranks), enumerate(self.layers)):
            if layer.state:
                continue
            start, _ = self.span(rank, number)
            pages = -(-tokens * layer.pages_per_chunk // self.chunk_size)
            found.append(slice(start, start + pages * layer.page_bytes))
        return found

    def span(self, rank: int, layer: int) -> tuple[int, int]:
        """Return `(offset, nbytes)` of one layer of one rank inside a chunk. For a recurrent layer, the offset is
        inside the slot with the layer's states (the state entry).
        """
        segment = self._rank_bytes[self.layers[layer].state]
        return rank * segment + self.layer_offsets[layer], self.layers[layer].nbytes

    def segment(self, rank: int) -> tuple[int, int] | None:
        """Return `(offset, nbytes)` of a rank's part of each slot. Return None if there is only one rank, or if the
        model has recurrent layers, because slots with their states are divided differently.
        """
        return None if self.states or self.num_ranks == 1 else (rank * self.rank_bytes, self.rank_bytes)
