"""Recurrent layers on a CPU with vLLM's prefix cache, and with drafts, for which vLLM 0.32 lacks some of its kernels.

On GPUs a prefill's last step exports the state of Mamba-2 at the prompt's last boundary from inside itself. The CPU's
kernel has no inner states, and the step ends with an IndexError. `exported` has a slow one that has them; `split` has
vLLM's scheduler end a step there instead, as it does for gated delta nets.

With drafts, kernels for GPUs alone move the states: `drafted` has slow ones that move the same bytes.
"""

from __future__ import annotations

import contextlib
import ctypes
import itertools
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch

from lmkv.vllm.plan import options


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


@contextlib.contextmanager
def drafted() -> Iterator[None]:
    """Engines made in here keep a state for each draft, and go on from that of the last one that was accepted."""
    from vllm.model_executor.layers.mamba import mamba_mixer2
    from vllm.triton_utils import HAS_TRITON
    from vllm.v1.worker.mamba_utils import MambaSpecDecodeGPUContext

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(options, "STATES_WITH_DRAFTS_ON_V1", True)
        if not HAS_TRITON:
            patch.setattr(MambaSpecDecodeGPUContext, "run_fused_precopy", _before_a_step)
            patch.setattr(MambaSpecDecodeGPUContext, "run_fused_postprocess", _after_a_step)
        patch.setattr(mamba_mixer2, "causal_conv1d_update", _convolve_drafts(mamba_mixer2.causal_conv1d_update))
        patch.setattr(mamba_mixer2, "selective_state_update", _update_drafts(mamba_mixer2.selective_state_update))
        yield


@contextlib.contextmanager
def resumed() -> Iterator[None]:
    """Engines made in here compute a preempted request's short step right.

    The V1 runner of vLLM 0.32 takes a few tokens behind the prompt for a token and its drafts.
    """
    from vllm.v1.worker.gpu_model_runner import GPUModelRunner

    reorder, build = GPUModelRunner._may_reorder_batch, GPUModelRunner._build_attention_metadata
    extended: set[str] = set()

    @contextlib.contextmanager
    def prefilling(batch: Any) -> Iterator[None]:
        """The requests that are `extended` look as if their prompts went on."""
        lengths, rows = batch.num_prompt_tokens, batch.req_id_to_index
        known = {name: int(lengths[rows[name]]) for name in extended & rows.keys()}
        for name in known:
            lengths[rows[name]] = np.iinfo(np.int32).max
        try:
            yield
        finally:
            # Their rows may be others now.
            for name, length in known.items():
                lengths[rows[name]] = length

    def reorder_batch(self: Any, scheduled: Any) -> None:
        drafts, counts = scheduled.scheduled_spec_decode_tokens, scheduled.num_scheduled_tokens
        extended.clear()
        extended.update(name for name, count in counts.items() if count > 1 and not drafts.get(name))
        with prefilling(self.input_batch):
            reorder(self, scheduled)

    def build_attention_metadata(self: Any, *given: Any, **more: Any) -> Any:
        with prefilling(self.input_batch):
            return build(self, *given, **more)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(GPUModelRunner, "_may_reorder_batch", reorder_batch)
        patch.setattr(GPUModelRunner, "_build_attention_metadata", build_attention_metadata)
        yield


def _before_a_step(
    context: Any, num_reqs: int, state_idx_gpu: Any, src_col_gpu: Any, token_bias_gpu: Any, idx_mapping: Any
) -> None:
    """As `precopy_mamba_align_fused_kernel`: the last state, into the block that the step writes."""
    assert idx_mapping is None
    for row in range(num_reqs):
        source, target = int(src_col_gpu[row]), int(state_idx_gpu[row])
        if source >= 0 and source != target:
            _move(context, row, source, target, int(token_bias_gpu[row]))


def _after_a_step(
    context: Any,
    num_reqs: int,
    num_accepted_tokens_gpu: Any,
    mamba_state_idx_gpu: Any,
    num_scheduled_tokens_gpu: Any,
    num_computed_tokens_gpu: Any,
    num_draft_tokens_gpu: Any,
) -> None:
    """As `postprocess_mamba_fused_kernel`: the state at the last boundary that was passed, into its block."""
    context.num_accepted_tokens_out[:num_reqs] = num_accepted_tokens_gpu[:num_reqs]
    for row in range(num_reqs):
        accepted, source = int(num_accepted_tokens_gpu[row]), int(mamba_state_idx_gpu[row])
        running = int(num_computed_tokens_gpu[row] + num_scheduled_tokens_gpu[row] - num_draft_tokens_gpu[row])
        boundary = (running + accepted - 1) // context.block_size * context.block_size
        if boundary < running:
            continue
        target = boundary // context.block_size - 1
        if source == target:
            context.num_accepted_tokens_out[row] = 1
        if source != target or boundary != running:
            _move(context, row, source, target, boundary - running)


def _move(context: Any, row: int, source: int, target: int, drafts: int) -> None:
    """As `_copy_mamba_state_block`: the state after so many drafts, of each layer, from one column to another."""
    from vllm.model_executor.layers.mamba.mamba_utils import is_conv_state_dim_first

    for index in range(context.num_states):
        table = int(context.block_table_ptrs[context.state_group_indices[index]])
        blocks = (ctypes.c_int32 * (1 << 20)).from_address(table + 4 * row * context.block_table_stride_req)
        base, stride = int(context.state_base_addrs[index]), int(context.state_block_strides[index])
        size, inner = int(context.state_elem_sizes[index]), int(context.state_inner_sizes[index])
        width = int(context.state_conv_widths[index])
        to = base + blocks[target] * stride
        if not width:
            ctypes.memmove(to, base + blocks[source + drafts] * stride, inner * size)
            continue
        assert not is_conv_state_dim_first(), "the other layout's rows are not contiguous"
        ctypes.memmove(to, base + blocks[source] * stride + drafts * inner * size, (width - drafts) * inner * size)


def _convolve_drafts(update: Any) -> Any:
    """The CPU's update with what it leaves out: drafts go on from the accepted ones, in a window as wide as both."""

    def updates(
        x: Any,
        conv_state: Any,
        weight: Any,
        bias: Any = None,
        activation: Any = None,
        *,
        num_accepted_tokens: Any = None,
        query_start_loc: Any = None,
        conv_state_indices: Any = None,
        **more: Any,
    ) -> Any:
        if num_accepted_tokens is None:
            given = {"query_start_loc": query_start_loc, "conv_state_indices": conv_state_indices}
            return update(x, conv_state, weight, bias, activation, **given, **more)
        out, before = torch.empty_like(x), weight.shape[1] - 1
        for row, (start, end) in enumerate(itertools.pairwise(query_start_loc.tolist())):
            if start == end:
                continue
            state, accepted = conv_state[int(conv_state_indices[row, 0])], int(num_accepted_tokens[row])
            tokens = x[start:end].T
            seen = torch.cat([state[:, accepted - 1 : accepted - 1 + before], tokens], dim=1)
            found = torch.nn.functional.conv1d(seen[None], weight[:, None], bias, groups=len(weight))[0]
            out[start:end] = (torch.nn.functional.silu(found) if activation else found).T
            window = torch.cat([state[:, accepted : accepted + before - 1], tokens], dim=1)
            state[:, : window.shape[1]] = window
        return out

    return updates


def _update_drafts(update: Any) -> Any:
    """The CPU's update, which goes on from the state before the first draft whatever was accepted."""

    def updates(
        states: Any,
        x: Any,
        dt: Any,
        A: Any,  # noqa: N803 - vLLM's names
        B: Any,  # noqa: N803
        C: Any,  # noqa: N803
        D: Any,  # noqa: N803
        dt_bias: Any,
        *,
        state_batch_indices: Any,
        out: Any,
        num_accepted_tokens: Any = None,
        cu_seqlens: Any = None,
        **more: Any,
    ) -> None:
        if num_accepted_tokens is None:
            given = {"state_batch_indices": state_batch_indices, "cu_seqlens": cu_seqlens, "out": out}
            update(states, x, dt, A, B, C, D, dt_bias, **given, **more)
            return
        times = torch.nn.functional.softplus(dt + dt_bias)
        into, outof = (each.repeat_interleave(x.shape[1] // each.shape[1], 1)[:, :, None] for each in (B, C))
        for row, (start, end) in enumerate(itertools.pairwise(cu_seqlens.tolist())):
            blocks = state_batch_indices[row].tolist()
            state = states[blocks[int(num_accepted_tokens[row]) - 1]].clone()
            for block, at in zip(blocks, range(start, end), strict=False):
                state = state * torch.exp(A * times[at, ..., None]) + into[at] * (times[at] * x[at])[..., None]
                out[at] = (state * outof[at]).sum(-1) + D * x[at]
                states[block] = state

    return updates


@contextlib.contextmanager
def scanned() -> Iterator[None]:
    """Engines made in here run Mamba-1, whose kernels vLLM lacks on a CPU, or has for other shapes."""
    from vllm.model_executor.layers.mamba import mamba_mixer

    forward, convolve = mamba_mixer.MambaMixer.forward_impl, mamba_mixer.causal_conv1d_update

    def convolve_rows(x: Any, *given: Any, **more: Any) -> Any:
        return convolve(x.contiguous(), *given, **more)

    def contiguous(self: Any, **given: Any) -> None:
        # With LoRA vLLM makes these contiguous; the CPU's products of matrices need that at some sizes.
        self.is_lora_enabled = True
        forward(self, **given)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(mamba_mixer.MambaMixer, "forward_impl", contiguous)
        patch.setattr(mamba_mixer, "selective_scan_fn", _scan)
        patch.setattr(mamba_mixer, "selective_state_update", _scan_on)
        patch.setattr(mamba_mixer, "causal_conv1d_update", convolve_rows)
        yield


def _scan(
    u: Any,
    states: Any,
    delta: Any,
    A: Any,  # noqa: N803 - vLLM's names
    B: Any,  # noqa: N803
    C: Any,  # noqa: N803
    D: Any,  # noqa: N803
    z: Any,
    delta_bias: Any,
    *,
    cache_indices: Any,
    has_initial_state: Any,
    query_start_loc: Any,
    **_: Any,
) -> Any:
    """As `selective_scan_fwd`; u, delta, z: [channel, token], B, C: [state, token], states: [block, channel, state]."""
    out = torch.empty_like(u)
    times = torch.nn.functional.softplus(delta + delta_bias[:, None])
    for row, (start, end) in enumerate(itertools.pairwise(query_start_loc.tolist())):
        block = int(cache_indices[row])
        state = states[block].clone() if has_initial_state[row] else torch.zeros_like(states[block])
        for at in range(start, end):
            state = state * torch.exp(A * times[:, at, None]) + (times[:, at] * u[:, at])[:, None] * B[:, at]
            out[:, at] = (state * C[:, at]).sum(-1) + D * u[:, at]
        states[block] = state
    return out * torch.nn.functional.silu(z)


def _scan_on(
    states: Any,
    x: Any,
    dt: Any,
    A: Any,  # noqa: N803 - vLLM's names
    B: Any,  # noqa: N803
    C: Any,  # noqa: N803
    D: Any,  # noqa: N803
    dt_bias: Any,
    *,
    z: Any,
    state_batch_indices: Any,
    out: Any,
    **_: Any,
) -> None:
    """As `selective_state_update`, of a token for each sequence; x, dt, z: [sequence, channel], B, C the same."""
    blocks, times = state_batch_indices.flatten(), torch.nn.functional.softplus(dt + dt_bias)
    state = states[blocks] * torch.exp(times[..., None] * A) + (times * x)[..., None] * B[:, None]
    states[blocks] = state
    out.copy_(((state * C[:, None]).sum(-1) + D * x) * torch.nn.functional.silu(z))
