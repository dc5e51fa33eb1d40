"""The limit of copies between scattered pages and host memory: numpy, which copies nothing but bytes."""

from __future__ import annotations

import math
import mmap
import threading
from collections.abc import Callable, Sequence

import numpy as np
import numpy.typing as npt
import torch
from attrs import frozen

Array = npt.NDArray[np.int64]


@frozen
class Pages:
    """The pages of a request beside lmkv: copied by numpy into an array that stands for their slots, and back.

    `rows`: of each layer, [block, word]. `slots`: [layer, page of the request, word], an array for each way, so that
    none is used more often than lmkv's slots. Its pages have 4 KiB as those of slots: arrays of numpy's own would have
    huge pages.
    """

    rows: list[Array]
    blocks: list[int]
    slots: tuple[Array, Array]

    @classmethod
    def of(cls, tensors: Sequence[torch.Tensor], blocks: list[int]) -> Pages:
        rows = [tensor.view(torch.int64).flatten(1).numpy() for tensor in tensors]
        shape = (len(rows), len(blocks), rows[0].shape[1])
        return cls(rows, blocks, (mapped(shape), mapped(shape)))

    def ways(self) -> dict[str, Callable[[], None]]:
        """Either direction, page by page and layer by layer."""
        one_by_one, by_layers = self.slots
        pages = [
            (row[block], one_by_one[layer, n])
            for layer, row in enumerate(self.rows)
            for n, block in enumerate(self.blocks)
        ]

        def gather() -> None:
            for page, place in pages:
                np.copyto(place, page)

        def scatter() -> None:
            for page, place in pages:
                np.copyto(page, place)

        def take() -> None:
            for row, part in zip(self.rows, by_layers, strict=True):
                np.take(row, self.blocks, axis=0, out=part, mode="clip")

        def put() -> None:
            for row, part in zip(self.rows, by_layers, strict=True):
                row[self.blocks] = part

        return {
            "one by one, store": gather,
            "one by one, retrieve": scatter,
            "by layers, store": take,
            "by layers, retrieve": put,
        }


def mapped(shape: tuple[int, ...]) -> Array:
    """An array that the kernel has mapped already."""
    found = np.frombuffer(mmap.mmap(-1, 8 * math.prod(shape)), np.int64).reshape(shape)
    found[:] = 1
    return found


def wait_until_populated() -> None:
    """Wait for the threads that map the slots of this process: a clock of CPU time counts what they do."""
    for thread in threading.enumerate():
        if thread.name == "lmkv-populate":
            thread.join()
