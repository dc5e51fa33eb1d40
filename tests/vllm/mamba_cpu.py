"""Mamba-2 on a CPU with vLLM's prefix cache, which vLLM 0.32 cannot do by itself: one of its kernels lacks a result.

On GPUs a prefill's last step exports the state at the prompt's last boundary from inside itself. The CPU's kernel
has no inner states, and the step ends with an IndexError. `exported` has a slow one that has them; `split` has vLLM's
scheduler end a step there instead, as it does for gated delta nets.
"""

from __future__ import annotations

import contextlib
import itertools
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest
import torch


@contextlib.contextmanager
def split() -> Iterator[None]:
    """Have engines made in here end a step at each boundary that has to have a state."""
    from vllm.model_executor.layers.mamba.mamba_mixer2 import MambaMixer2

    original = MambaMixer2.get_kv_cache_spec

    def without_inner_states(self: Any, vllm_config: Any) -> Any:
        spec = original(self, vllm_config)
        return replace(spec, num_prefill_checkpoint_blocks=0, prefill_checkpoint_alignment=None)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(MambaMixer2, "get_kv_cache_spec", without_inner_states)
        yield


@contextlib.contextmanager
def exported() -> Iterator[list[int]]:
    """Engines made in here export a state from inside a step, as on GPUs; the list grows by its place in the step."""
    from vllm.model_executor.layers.mamba import mamba_mixer2
    from vllm.model_executor.layers.mamba.ops import ssd_combined

    scan, exports = ssd_combined._mamba_chunk_scan_combined_fwd, []

    def scan_with_inner_states(
        x: Any,
        dt: Any,
        A: Any,  # noqa: N803 - vLLM's names
        B: Any,  # noqa: N803
        C: Any,  # noqa: N803
        chunk_size: int,
        out: Any,
        *,
        initial_states: Any = None,
        return_intermediate_states: bool = False,
        seq_idx: Any = None,
        cu_chunk_seqlens: Any = None,
        z: Any = None,
        **more: Any,
    ) -> Any:
        if not return_intermediate_states:
            given = {"initial_states": initial_states, "seq_idx": seq_idx, "cu_chunk_seqlens": cu_chunk_seqlens, "z": z}
            return scan(x, dt, A, B, C, chunk_size, out, **given, **more)
        more.pop("cu_seqlens", None)
        more.pop("last_chunk_indices", None)
        states, current = [], {}
        ends = cu_chunk_seqlens.tolist()
        for number, (start, end) in enumerate(itertools.pairwise(ends)):
            sequence = int(seq_idx[number])
            before = current.get(sequence, initial_states[sequence] if initial_states is not None else None)
            got = scan(
                x[start:end].contiguous(),
                dt[start:end].contiguous(),
                A,
                B[start:end].contiguous(),
                C[start:end].contiguous(),
                chunk_size,
                out[start:end],
                initial_states=None if before is None else before[None],
                cu_seqlens=torch.tensor([0, end - start], dtype=torch.int32),
                z=None if z is None else z[start:end],
                **more,
            )
            current[sequence] = got[0]
            states.append(got[0])
        return torch.stack(states)

    def store(
        checkpoint: Any,
        chunk_idx: Any,
        x: Any,
        conv_state: Any,
        chunk_states: Any,
        ssm_state: Any,
        query_start_loc: Any,
        *,
        state_len: int,
    ) -> None:
        for row, offset in enumerate(checkpoint.checkpoint_offsets.tolist()):
            if offset > 0:
                exports.append(offset)
                target, end = int(checkpoint.state_indices[row]), int(query_start_loc[row]) + offset
                conv_state[target, :, :state_len] = x[:, end - state_len : end]
                ssm_state[target] = chunk_states[int(chunk_idx[row])]

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(ssd_combined, "_mamba_chunk_scan_combined_fwd", scan_with_inner_states)
        patch.setattr(mamba_mixer2, "store_prefill_checkpoint", store)
        yield exports
