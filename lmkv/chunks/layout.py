"""Where each byte of a chunk lies: the one description that workers, slabs and files share.

A chunk is opaque: whole pages of vLLM's paged memory, laid out `[rank][layer][page]`. Nothing here knows
tokens inside a page, heads or dtypes, so that every attention backend's private page format is safe.
"""

from __future__ import annotations

from functools import cached_property
from itertools import accumulate

from attrs import field, frozen, validators

ALIGNMENT = 4096
"""Slots start and end on this boundary: a memory page, and what O_DIRECT wants."""


def align_up(nbytes: int, alignment: int = ALIGNMENT) -> int:
    return -(-nbytes // alignment) * alignment


@frozen
class LayerPages:
    """One layer's share of a chunk on one rank.

    `page_bytes`: bytes of one block of this layer. `pages_per_chunk`: blocks that make a chunk.
    `group`: which block table (KV cache group) addresses the layer.
    """

    page_bytes: int = field(validator=validators.gt(0))
    pages_per_chunk: int = field(validator=validators.gt(0))
    group: int = 0

    @property
    def nbytes(self) -> int:
        return self.page_bytes * self.pages_per_chunk


@frozen(slots=False)
class KVLayout:
    """Byte layout of a chunk of `chunk_size` tokens: `[rank][layer][page]`, no padding in between.

    `layers` describes one rank; all `num_ranks` ranks are alike.
    """

    chunk_size: int = field(validator=validators.gt(0))
    layers: tuple[LayerPages, ...] = field(validator=validators.min_len(1))
    num_ranks: int = field(default=1, validator=validators.gt(0))

    @cached_property
    def layer_offsets(self) -> tuple[int, ...]:
        """Offset of each layer inside a rank's segment, and the segment's length as the last item."""
        return (0, *accumulate(layer.nbytes for layer in self.layers))

    @property
    def rank_bytes(self) -> int:
        return self.layer_offsets[-1]

    @property
    def chunk_bytes(self) -> int:
        return self.rank_bytes * self.num_ranks

    @property
    def slot_bytes(self) -> int:
        """`chunk_bytes` rounded up, so that slots stay aligned."""
        return align_up(self.chunk_bytes)

    def pages_per_chunk(self, group: int) -> int:
        """Blocks of `group` that a chunk covers."""
        return next(layer.pages_per_chunk for layer in self.layers if layer.group == group)

    def span(self, rank: int, layer: int) -> tuple[int, int]:
        """`(offset, nbytes)` of one layer of one rank inside a chunk."""
        return rank * self.rank_bytes + self.layer_offsets[layer], self.layers[layer].nbytes
