"""The Triton kernel in Triton's own interpreter: every byte, without a device."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.forked import python

pytest.importorskip("triton")

PROGRAM = """
import os
os.environ["TRITON_INTERPRET"] = "1"  # before Triton is imported

import numpy as np, torch
from lmkv.memory.device import Spans
from lmkv.memory.kernels import launch_move

rng = np.random.default_rng(1)
for nbytes, stride in ((8192, 8192), (24, 32), (9000, 9000), (4998, 5000), (5001, 5003), (12, 20)):
    source = torch.from_numpy(rng.integers(0, 256, 9 * stride, dtype=np.uint8))
    target = torch.zeros_like(source)
    expected = target.clone()
    order = rng.permutation(9)[:5]
    spans = Spans(
        source.data_ptr() + order.astype(np.int64) * stride,
        target.data_ptr() + np.sort(order).astype(np.int64) * stride,
        nbytes,
    )
    for old, new in zip(order, np.sort(order)):
        expected[new * stride : new * stride + nbytes] = source[old * stride : old * stride + nbytes]
    launch_move(torch.from_numpy(spans.sources), torch.from_numpy(spans.targets), nbytes, spans.word)
    assert torch.equal(target, expected), (nbytes, stride)
"""


def test_it_moves_what_it_is_told_and_nothing_else(tmp_path: Path) -> None:
    (tmp_path / "program.py").write_text(PROGRAM)
    python(tmp_path, "program.py")
