"""The Triton kernel that copies many equally long runs of bytes on the device."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

_BLOCK = 1024
_WORDS = {8: tl.int64, 4: tl.int32, 2: tl.int16, 1: tl.int8}


@triton.jit
def _move(sources, targets, length, WORD: tl.constexpr, BLOCK: tl.constexpr):  # type: ignore[no-untyped-def]  # noqa: N803
    """Copy runs of bytes on the device: program [i, j] copies BLOCK words of run i, from word j * BLOCK on."""
    run = tl.program_id(0)
    words = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    source = tl.load(sources + run).to(tl.pointer_type(WORD))
    target = tl.load(targets + run).to(tl.pointer_type(WORD))
    inside = words < length
    tl.store(target + words, tl.load(source + words, mask=inside), mask=inside)


def launch_move(sources: torch.Tensor, targets: torch.Tensor, nbytes: int, word: int) -> None:
    """Copy `nbytes` bytes from address `sources[i]` to address `targets[i]` for each index i, on the current stream.

    `sources`, `targets`: int64 [n]. `word`: 1, 2, 4 or 8 bytes; all addresses and `nbytes` are multiples of `word`.
    """
    length = nbytes // word
    grid = (len(sources), triton.cdiv(length, _BLOCK))
    _move[grid](sources, targets, length, WORD=_WORDS[word], BLOCK=_BLOCK)
