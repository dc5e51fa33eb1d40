"""The engines that a run goes through: small models of several kinds, all too tight, each another way."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from attrs import field, frozen

from tests.torture.conversations import VOCAB
from tests.vllm import families, mamba_cpu
from tests.vllm.drafts import DRAFTS, N_GRAMS, Drafts
from tests.vllm.families import Family
from tests.vllm.harness import Engine, engine, pipelining

CHUNK = 64
_DRAFTED = 3
"""Tokens that are drafted at a time."""
_SMALL = {"hidden_size": 64, "intermediate_size": 64, "vocab_size": VOCAB, "max_position_embeddings": 1024}
_HEADS = {"num_attention_heads": 2, "num_key_value_heads": 1, "head_dim": 32, "num_hidden_layers": 2}
_MIXED = {**_HEADS, "num_hidden_layers": 4, "mamba_num_heads": 4}
_MIXER = {"mamba_d_ssm": 64, "mamba_n_heads": 2}
_KINDS = ["sliding_attention", "sliding_attention", "full_attention"]

MODELS: dict[str, Family | Drafts] = {
    "gqa": Family(lambda: families.qwen3(**_SMALL, **_HEADS)),
    "hybrid": Family(lambda: families.gemma3(48, **_SMALL, **{**_HEADS, "num_hidden_layers": 3}, layer_types=_KINDS)),
    "mla": Family(
        lambda: families.deepseek_v2(**_SMALL, num_hidden_layers=2, first_k_dense_replace=2), families.REFERENCE_MLA
    ),
    "nemotron": Family(lambda: families.nemotron_h(**_SMALL, **_MIXED), vllm=mamba_cpu.exported),
    "falcon": Family(lambda: families.falcon_h1(**_SMALL, **_HEADS, **_MIXER), vllm=mamba_cpu.split),
    **DRAFTS,
}


@frozen
class Model:
    """A model on disk. `options`: of its engine. `drafts`: vLLM's `speculative_config`, or none.

    `target`: the same for models that say the same. `vllm`: as `Family` has it.
    """

    path: Path
    options: dict[str, Any]
    target: str
    drafts: dict[str, Any] | None = None
    vllm: Callable[[], contextlib.AbstractContextManager[None]] = contextlib.nullcontext


@frozen
class Variant:
    """`ram`, `disk`: chunks that the tiers have room for. `pipelined`: see `harness.pipelining`.

    `drafts`: vLLM's `speculative_config`, in place of the model's, on the V2 runner only.
    """

    model: str
    options: dict[str, Any]
    extra: dict[str, Any] = field(factory=dict)
    ram: float = 12.5
    disk: float = 60.5
    pipelined: bool = False
    drafts: dict[str, Any] | None = None


def _tight(blocks: int, step_tokens: int, **options: Any) -> dict[str, Any]:
    return {"num_gpu_blocks_override": blocks, "max_num_batched_tokens": step_tokens, **options}


VARIANTS = {
    "plain": Variant("gqa", _tight(32, 96)),
    "pipelined, tiny steps": Variant("gqa", _tight(36, 40), pipelined=True),
    "no prefix cache, pipelined": Variant(
        "gqa", _tight(40, 200, enable_prefix_caching=False), pipelined=True, ram=20.5
    ),
    "layer by layer": Variant("gqa", _tight(32, 96, enable_prefix_caching=False), {"use_layerwise": True}),
    "hybrid": Variant("hybrid", _tight(90, 70)),
    "loads between steps": Variant("gqa", _tight(40, 128), {"prefetch_deadline": 2.0}, ram=4.5, disk=100.5),
    "latent": Variant("mla", _tight(66, 90), {"disk_write": "back"}),
    "hybrid, pipelined": Variant("hybrid", _tight(100, 130), ram=20.5, pipelined=True),
    "hybrids: recurrent layers": Variant("nemotron", _tight(34, 140), ram=30.5, disk=90.5),
    "hybrids: recurrent layers, pipelined": Variant("nemotron", _tight(38, 200), ram=50.5, pipelined=True),
    "hybrids: recurrent in each layer, tiny steps": Variant("falcon", _tight(60, 64), ram=24.5),
    "hybrids: recurrent layers, write-back": Variant("falcon", _tight(60, 200), {"disk_write": "back"}, ram=24.5),
    "hybrids: recurrent layers, n-grams": Variant("nemotron", _tight(44, 140), ram=30.5, disk=90.5, drafts=N_GRAMS),
    "hybrids: recurrent in each layer, n-grams": Variant(
        "falcon", _tight(70, 200), ram=24.5, drafts=N_GRAMS, pipelined=True
    ),
    "no CPU tier, second touch": Variant(
        "gqa", _tight(32, 64), {"local_cpu": False, "disk_admission": "second_touch"}, pipelined=True
    ),
    # With MLA vLLM 0.32 computes prompts in one step on most CPUs, and with drafts it schedules no longer one.
    **{f"drafts, {kind}": Variant(kind, _tight(44, 1024 if DRAFTS[kind].options else 96)) for kind in DRAFTS},
}


def write_models(folder: Path) -> dict[str, Model]:
    return {name: _write(name, folder / name) for name in MODELS}


def _write(name: str, folder: Path) -> Model:
    made = MODELS[name]
    if isinstance(made, Family):
        return Model(made.write(folder), made.options, name, vllm=made.vllm)
    path, drafts = made.write(folder, _DRAFTED)
    return Model(path, made.options, made.target.__name__, drafts)


@contextlib.contextmanager
def reference(model: Model, **options: Any) -> Iterator[Engine]:
    """An engine without a connector and without drafts, with room for everything."""
    given = {"max_model_len": 640, "max_num_batched_tokens": 512, "max_num_seqs": 8, **model.options, **options}
    with model.vllm(), engine(model.path, connector=None, **given) as plain:
        yield plain


@contextlib.contextmanager
def tortured(variant: Variant, model: Model, disk: Path, slot_bytes: int, audits: float) -> Iterator[Engine]:
    """An engine of this variant over the disk tier in `disk`. `audits`: `audit_rate`."""
    extra = {
        "chunk_size": CHUNK,
        "max_local_cpu_size": variant.ram * slot_bytes / 2**30,
        "local_disk": str(disk),
        "max_local_disk_size": variant.disk * slot_bytes / 2**30,
        "disk_min_free": 0.0,
        "prefetch_deadline": 0.3,
        "pin_ttl": 0.5,
        "audit_rate": audits,
        **variant.extra,
    }
    options = {"max_model_len": 640, "max_num_seqs": 8, **model.options, **variant.options}
    drafts = variant.drafts or model.drafts
    if drafts is not None:
        options |= {"speculative_config": drafts, "disable_log_stats": False}
    with (
        model.vllm(),
        mamba_cpu.drafted() if variant.drafts is not None else contextlib.nullcontext(),
        pipelining() if variant.pipelined else contextlib.nullcontext(),
        engine(model.path, extra=extra, **options) as running,
    ):
        yield running


def slot_bytes(model: Model) -> int:
    """Bytes of one chunk in any engine of this model, its draft layers included."""
    from lmkv.vllm.model import describe

    drafts = {} if model.drafts is None else {"speculative_config": model.drafts}
    with reference(model, **drafts) as running:
        scheduler = running.scheduler
        return describe(scheduler.vllm_config, scheduler.kv_cache_config, CHUNK).layout.slot_bytes
