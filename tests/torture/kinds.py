"""What lmkv is tried with beside the kit's own kinds: modes of lmkv and of vLLM, all with too little room.

python -m kv_connector_torture --kinds tests.torture.kinds:hybrids --connector @tests/torture/lmkv.json
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from typing import Any

from attrs import evolve

from kv_connector_torture import models
from kv_connector_torture.models import Kind
from tests.vllm import families, mamba_cpu, triton_cpu
from tests.vllm.drafts import DRAFTS, N_GRAMS
from tests.vllm.harness import pipelining

_DRAFTED = 3
"""Tokens that are drafted at a time."""
_SLOTS = {"gqa": 64, "windows": 48, "mla": 288, "recurrent": 16, "falcon": 16}
_SLOTS_OF_DRAFTS = {"n-grams": 16, "MTP, three modules": 576}
"""KiB of a chunk of 64 tokens, where it is not 32."""

_FALCON = {"hidden_size": 64, "intermediate_size": 64, "num_attention_heads": 2, "num_key_value_heads": 1}
_FALCON |= {"head_dim": 32, "num_hidden_layers": 2, "mamba_d_ssm": 64, "mamba_n_heads": 2}
_SIZES = {"vocab_size": 256, "max_position_embeddings": 1024}
# Without it vLLM keeps no state that lmkv could cache.
_STATES = {"enable_prefix_caching": True}
_MODELS = {
    **models.KINDS,
    "recurrent": evolve(models.KINDS["recurrent"], tortured=_STATES, around=mamba_cpu.exported),
    "falcon": Kind(lambda: families.falcon_h1(**_FALCON, **_SIZES), tortured=_STATES, around=mamba_cpu.split),
}


def _all(*around: Callable[[], AbstractContextManager[Any]]) -> Callable[[], AbstractContextManager[None]]:
    @contextlib.contextmanager
    def entered() -> Iterator[None]:
        with contextlib.ExitStack() as stack:
            for each in around:
                stack.enter_context(each())
            yield

    return entered


def _room(kib: int, ram: float, disk: float) -> dict[str, float]:
    """The tiers' sizes, for chunks of so many KiB."""
    return {"max_local_cpu_size": ram * kib / 2**20, "max_local_disk_size": disk * kib / 2**20}


def _tight(blocks: int, steps: int) -> dict[str, int]:
    """No schedule may choose larger ones."""
    return {"num_gpu_blocks_override": blocks, "max_num_batched_tokens": steps}


def _kind(
    name: str,
    blocks: int,
    steps: int,
    connector: dict[str, Any] | None = None,
    *,
    ram: float = 12.5,
    disk: float = 60.5,
    pipelined: bool = False,
    **tortured: Any,
) -> Kind:
    """`steps`: tokens of a step. `ram`, `disk`: chunks that the tiers have room for.

    `pipelined`: see `harness.pipelining`.
    """
    model = _MODELS[name]
    around = _all(model.around, pipelining) if pipelined else model.around
    tortured = {**_tight(blocks, steps), **model.tortured, **tortured}
    room = _room(_SLOTS[name], ram, disk)
    return evolve(model, tortured=tortured, around=around, connector={**room, **(connector or {})})


def _drafting(name: str) -> Kind:
    made = DRAFTS[name]
    # With MLA vLLM 0.32 computes prompts in one step on most CPUs, and with drafts it schedules no longer one.
    return Kind(
        write=functools.partial(_write_drafting, name),
        options=made.options,
        tortured=_tight(44, 1024 if made.options else 96),
        connector=_room(_SLOTS_OF_DRAFTS.get(name, 32), 12.5, 60.5),
    )


def _write_drafting(name: str, folder: Any) -> Any:
    path, drafts = DRAFTS[name].write(folder, _DRAFTED)
    return path, {"speculative_config": drafts}


KINDS = {
    "plain": _kind("gqa", 32, 96),
    "tiny steps, pipelined": _kind("gqa", 36, 40, pipelined=True),
    "no prefix cache, pipelined": _kind("gqa", 40, 200, ram=20.5, pipelined=True, enable_prefix_caching=False),
    "layer by layer": _kind("gqa", 32, 96, {"use_layerwise": True}, enable_prefix_caching=False),
    "windows": _kind("windows", 90, 70),
    "windows, pipelined": _kind("windows", 100, 130, ram=20.5, pipelined=True),
    "loads between steps": _kind(
        "gqa", 40, 128, connector={"prefetch_deadline": 2.0}, ram=4.5, disk=100.5, enable_prefix_caching=False
    ),
    "latent": _kind("mla", 66, 90, connector={"disk_write": "back"}),
    "hybrids: recurrent layers": _kind("recurrent", 34, 140, ram=30.5, disk=90.5),
    "hybrids: recurrent layers, pipelined": _kind("recurrent", 38, 200, ram=50.5, pipelined=True),
    "hybrids: recurrent in each layer, tiny steps": _kind("falcon", 60, 64, ram=24.5),
    "hybrids: recurrent in each layer, write-back": _kind("falcon", 60, 200, {"disk_write": "back"}, ram=24.5),
    "no CPU tier, second touch": _kind(
        "gqa", 32, 64, {"local_cpu": False, "disk_admission": "second_touch"}, pipelined=True
    ),
    **{f"drafts, {name}": _drafting(name) for name in DRAFTS},
}
if triton_cpu.is_wanted():
    _drafted: dict[str, Any] = {"speculative_config": N_GRAMS}
    for _name, _base in (
        ("hybrids: recurrent layers, n-grams", _kind("recurrent", 44, 140, ram=30.5, disk=90.5, **_drafted)),
        ("hybrids: recurrent in each layer, n-grams", _kind("falcon", 70, 200, ram=24.5, pipelined=True, **_drafted)),
    ):
        KINDS[_name] = evolve(_base, around=_all(_base.around, mamba_cpu.drafted))
