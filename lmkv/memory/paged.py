"""Views the paged KV tensors of any attention backend as planes of bytes. A plane is an array of pages: uint8 [block,
page_bytes].

Only the attention backend knows the format inside a page. A block must be contiguous in each plane, but blocks of
several layers may be interleaved.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import torch

from lmkv.chunks.layout import KVLayout, LayerPages
from lmkv.errors import UsageError, short_repr


def block_rows(plane: torch.Tensor, name: str = "tensor") -> torch.Tensor:
    """Return a view of `plane`, a tensor of shape [block, ...], as uint8 [block, page_bytes]. `name`: the tensor's name
    in error messages.

    Raises UsageError if a block is not contiguous in memory, or if blocks overlap.
    """
    inner = sorted(zip(plane.stride()[1:], plane.shape[1:], strict=True))
    expected = 1
    for stride, size in inner:
        if size != 1 and stride != expected:
            raise UsageError(f"{name}: a block of shape {tuple(plane.shape[1:])} is not contiguous in memory")
        expected *= size
    if plane.shape[0] > 1 and plane.stride(0) < expected:
        raise UsageError(f"{name}: blocks overlap in memory")
    item = plane.element_size()
    rows = torch.empty(0, dtype=torch.uint8, device=plane.device)
    return rows.set_(
        plane.untyped_storage(),
        plane.storage_offset() * item,
        (plane.shape[0], expected * item),
        (plane.stride(0) * item, 1),
    )


def padded(row: torch.Tensor, page_bytes: int) -> torch.Tensor:
    """Return a view of a plane with longer pages: `page_bytes` bytes, including unused bytes after each page.

    `row`: the plane, uint8 [block, byte], which is returned unchanged if there are too few unused bytes.
    """
    blocks, stride = row.shape[0], row.stride(0)
    end = row.storage_offset() + (blocks - 1) * stride + page_bytes
    if row.shape[1] < page_bytes <= stride and end <= row.untyped_storage().nbytes():
        return row.as_strided((blocks, page_bytes), (stride, 1))
    return row


def planes(tensor: Any, block_axis: int) -> list[torch.Tensor]:
    """Return the planes of a layer's tensor, each of shape [block, ...]. `block_axis`: the axis of blocks. With 1, as
    in the shape [2, block, ...], each index of axis 0 gives a plane.
    """
    if block_axis not in (0, 1):
        raise UsageError(f"block_axis must be 0 or 1, not {short_repr(block_axis)}")
    if not isinstance(tensor, torch.Tensor) or tensor.dim() <= block_axis or not tensor.numel():
        raise UsageError(f"KV tensors need blocks along axis {block_axis}, but one is {_described(tensor)}")
    return list(tensor.unbind(0)) if block_axis else [tensor]


def _described(tensor: object) -> str:
    return f"of shape {tuple(tensor.shape)}" if isinstance(tensor, torch.Tensor) else f"a {type(tensor).__name__}"


class PagedMemory:
    """The KV tensors of one rank as *planes*: arrays with one page for each block. Call `PagedMemory.of` to make the
    object.

    Parameters
    ----------
    rows
        For each plane, a uint8 tensor of shape [num_blocks, page_bytes], as `block_rows` returns.
    groups
        For each plane, the index of the plane's block table; 0 by default.
    layers
        For each plane, the index of the plane's layer in the model; by default the index of the plane.
    fuse
        Whether to join planes with blocks that are next to each other in memory, as in vLLM's block-major layouts. A
        page then has the KV of all joined layers, and one copy moves this page.

    Raises
    ------
    UsageError
        There are no rows, or rows of one block table have different numbers of blocks.

    Notes
    -----
    `rows` share the memory of the tensors. `num_blocks` is the number of blocks of each block table. There are no
    locks, so computation and copies must not use the same blocks at the same time.

    Examples
    --------
    >>> kv = [torch.zeros((64, 2, 16, 8), dtype=torch.float16) for _ in range(4)]
    >>> memory = PagedMemory.of(kv)
    >>> memory
    <PagedMemory on cpu: 4 layers in 4 planes, blocks by table {0: 64}>
    >>> memory.layout(chunk_size=256, block_sizes=[16]).chunk_bytes == 16 * kv[0][0].nbytes * 4
    True
    """

    def __init__(
        self,
        rows: Sequence[torch.Tensor],
        groups: Sequence[int] | None = None,
        layers: Sequence[int] | None = None,
        *,
        fuse: bool = True,
    ) -> None:
        if not rows:
            raise UsageError("no KV tensors to register: give one for each layer")
        self.rows, self.groups = list(rows), list(groups or [0] * len(rows))
        self.num_blocks = _num_blocks(self.rows, self.groups)
        self.layers = [range(layer, layer + 1) for layer in layers or range(len(rows))]
        if fuse:
            self._fuse()

    @classmethod
    def of(cls, tensors: Iterable[torch.Tensor], *, block_axis: int = 0) -> PagedMemory:
        """Make paged memory of one tensor per layer, with one block table for all layers. Raises UsageError if a block
        is not contiguous in memory.

        `block_axis`: the axis of blocks in each tensor: 0, or 1 for the shape [2, block, ...].
        """
        rows = [
            (layer, block_rows(plane)) for layer, tensor in enumerate(tensors) for plane in planes(tensor, block_axis)
        ]
        return cls([row for _, row in rows], layers=[layer for layer, _ in rows])

    def __repr__(self) -> str:
        shape = f"{self.num_layers} layers in {len(self.rows)} planes, blocks by table {self.num_blocks}"
        return f"<PagedMemory on {self.device}: {shape}>"

    @property
    def device(self) -> torch.device:
        return self.rows[0].device

    @property
    def num_layers(self) -> int:
        return max(layers.stop for layers in self.layers)

    def layout(self, chunk_size: int, block_sizes: Sequence[int], num_ranks: int = 1) -> KVLayout:
        """Return the layout of chunks of this memory. `block_sizes`: the tokens per block of each block table."""
        layers = []
        for row, group in zip(self.rows, self.groups, strict=True):
            if chunk_size % block_sizes[group]:
                size = short_repr(block_sizes[group])
                raise UsageError(f"chunk_size {chunk_size} is not a multiple of the block size {size}")
            layers.append(LayerPages(row.shape[1], chunk_size // block_sizes[group], group))
        return KVLayout(chunk_size, tuple(layers), num_ranks)

    def _fuse(self) -> None:
        planes = list(zip(self.rows, self.groups, self.layers, strict=True))
        fused = planes[:1]
        for row, group, layers in planes[1:]:
            last, last_group, last_layers = fused[-1]
            if group == last_group and _adjoin(last, row):
                width = last.shape[1] + row.shape[1]
                wide = last.as_strided((last.shape[0], width), (last.stride(0), 1))
                fused[-1] = (wide, group, range(last_layers.start, layers.stop))
            else:
                fused.append((row, group, layers))
        self.rows, self.groups, self.layers = map(list, zip(*fused, strict=True))


def _num_blocks(rows: Sequence[torch.Tensor], groups: Sequence[int]) -> dict[int, int]:
    found: dict[int, int] = {}
    for row, group in zip(rows, groups, strict=True):
        if found.setdefault(group, len(row)) != len(row):
            raise UsageError(
                f"KV tensors of {found[group]} and of {len(row)} blocks cannot share a block table: a block "
                "must exist in every tensor of its table"
            )
    return found


def _adjoin(left: torch.Tensor, right: torch.Tensor) -> bool:
    return (
        left.stride(0) == right.stride(0)
        and left.shape[0] == right.shape[0]
        and left.untyped_storage().data_ptr() == right.untyped_storage().data_ptr()
        and left.storage_offset() + left.shape[1] == right.storage_offset()
        and left.shape[1] + right.shape[1] <= left.stride(0)
    )
