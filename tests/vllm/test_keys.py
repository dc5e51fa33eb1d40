"""Which engines share what is stored: vLLM's real configurations, changed in one place at a time."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from attrs import field, frozen

from lmkv.vllm.model import describe
from tests.tables import raised
from tests.vllm import families
from tests.vllm.drafts import DRAFTS
from tests.vllm.harness import BLOCK, configured

_YARN = {"rope_type": "yarn", "rope_theta": 10000.0, "factor": 2.0, "original_max_position_embeddings": 2048}


@frozen
class Engine:
    """Arguments of vLLM's engine, and what is changed in the configurations that it makes of them."""

    model: Callable[[], Any] = families.qwen3
    options: dict[str, Any] = field(factory=dict)
    change: Callable[[Any, Any], None] = lambda vllm_config, kv_cache_config: None
    chunk_size: int = 256


def namespace_of(engine: Engine, folder: Path) -> bytes:
    """The digest that chunk keys of such an engine grow from."""
    if not folder.exists():
        families.Family(engine.model).write(folder)
    options = {"dtype": "float32", "block_size": BLOCK, "max_model_len": 2048, **engine.options}
    vllm_config = configured(folder, **options)
    kv_cache_config = kv_cache_of(vllm_config)
    engine.change(vllm_config, kv_cache_config)
    return describe(vllm_config, kv_cache_config, engine.chunk_size).namespace.digest


def kv_cache_of(vllm_config: Any) -> Any:
    """vLLM's KV groups for a model whose layers are all alike."""
    from vllm.v1.kv_cache_interface import FullAttentionSpec, KVCacheConfig, KVCacheGroupSpec

    model, parallel, cache = vllm_config.model_config, vllm_config.parallel_config, vllm_config.cache_config
    spec = FullAttentionSpec(
        block_size=cache.block_size,
        num_kv_heads=model.get_num_kv_heads(parallel),
        head_size=model.get_head_size(),
        dtype=torch.uint8 if "fp8" in cache.cache_dtype else model.dtype,
    )
    layers = [f"model.layers.{number}.self_attn.attn" for number in range(model.get_num_layers(parallel))]
    return KVCacheConfig(100, [], [KVCacheGroupSpec(layers, spec)], kv_cache_layout="LBHNC")


def on(part: str, **values: Any) -> Callable[[Any, Any], None]:
    def change(vllm_config: Any, kv_cache_config: Any) -> None:
        for name, value in values.items():
            setattr(getattr(vllm_config, f"{part}_config"), name, value)

    return change


def on_pages(**values: Any) -> Callable[[Any, Any], None]:
    def change(vllm_config: Any, kv_cache_config: Any) -> None:
        (group,) = kv_cache_config.kv_cache_groups
        group.kv_cache_spec = dataclasses.replace(group.kv_cache_spec, **values)

    return change


def shaped(**changes: Any) -> Callable[[], Any]:
    return lambda: families.qwen3(**changes)


HIT = {
    "nothing": Engine(),
    "more requests at once": Engine(options={"max_num_seqs": 3}),
    "other prefill steps": Engine(options={"max_num_batched_tokens": 2048, "enable_chunked_prefill": True}),
    "a shorter context": Engine(options={"max_model_len": 1024}),
    "more KV space": Engine(options={"num_gpu_blocks_override": 777}),
    "no prefix cache": Engine(options={"enable_prefix_caching": False}),
    "eager": Engine(options={"enforce_eager": True}),
    "another seed for sampling": Engine(options={"seed": 5}),
    "another name to clients": Engine(options={"served_model_name": "x"}),
    "pages in more blocks": Engine(change=lambda _, kv_cache: setattr(kv_cache, "num_blocks", 7)),
}
MISS = {
    "revision": Engine(options={"revision": "other"}),
    "code revision": Engine(options={"code_revision": "other"}),
    "implementation": Engine(change=on("model", model_impl="transformers")),
    "dtype": Engine(options={"dtype": "bfloat16"}),
    "kv_cache_dtype": Engine(options={"kv_cache_dtype": "fp8"}),
    "quantization": Engine(change=on("model", quantization="awq")),
    "quantization's settings": Engine(change=on("model", quantization_config={"bits": 4})),
    "rope scaling": Engine(options={"hf_overrides": {"rope_parameters": _YARN}}),
    "rope theta": Engine(options={"hf_overrides": {"rope_parameters": {"rope_type": "default", "rope_theta": 7.0}}}),
    "any override": Engine(options={"hf_overrides": {"rms_norm_eps": 0.001}}),
    "layout": Engine(change=lambda _, kv_cache: setattr(kv_cache, "kv_cache_layout", "LBNHC")),
    "attention backend": Engine(change=on("attention", backend="TRITON_ATTN")),
    "backend of one kind": Engine(change=on("attention", backend_per_kind={"full": "TRITON_ATTN"})),
    "layers": Engine(shaped(num_hidden_layers=3)),
    "KV heads": Engine(shaped(num_key_value_heads=4)),
    "head size": Engine(shaped(head_dim=64)),
    "heads and their size, in as many bytes": Engine(change=on_pages(num_kv_heads=4, head_size=16, head_size_v=16)),
    "data type of pages, in as many bytes": Engine(change=on_pages(dtype=torch.int32)),
    "block size": Engine(options={"block_size": 2 * BLOCK}),
    "chunk size": Engine(chunk_size=512),
    "sliding window": Engine(shaped(sliding_window=96, use_sliding_window=True, max_window_layers=0)),
    "tensor parallel split": Engine(change=on("parallel", tensor_parallel_size=2)),
}


@pytest.fixture(scope="module")
def checkpoints(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("checkpoints")


@pytest.fixture(scope="module")
def plain(checkpoints: Path) -> bytes:
    return namespace_of(Engine(), checkpoints / "model")


def in_its_place(engine: Engine, checkpoints: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> bytes:
    """Under the path of the plain engine's checkpoint, so that the path alone separates nothing."""
    if engine.model == Engine().model:
        return namespace_of(engine, checkpoints / "model")
    monkeypatch.setattr("lmkv.vllm.model.source_of", lambda model_config: str(checkpoints / "model"))
    return namespace_of(engine, tmp_path / "model")


@pytest.mark.parametrize("name", HIT)
def test_engines_that_share(name: str, plain: bytes, checkpoints: Path) -> None:
    assert namespace_of(HIT[name], checkpoints / "model") == plain


@pytest.mark.parametrize("name", MISS)
def test_engines_that_do_not_share(
    name: str, plain: bytes, checkpoints: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert in_its_place(MISS[name], checkpoints, tmp_path, monkeypatch) != plain


def test_engines_that_fill_other_draft_modules_do_not_share(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Modules of MTP that an engine does not draft with have KV that nothing fills: drafts after a hit were refused."""
    model, config = DRAFTS["MTP, three modules"].write(tmp_path, 3)

    def fills(tokens: int) -> bytes:
        drafts = {**config, "model": str(model), "num_speculative_tokens": tokens}
        return namespace_of(Engine(options={"speculative_config": drafts}), model)

    found = {fills(tokens) for tokens in (1, 2, 3)}
    assert fills(3) in found
    monkeypatch.setattr("lmkv.vllm.compat.has_runner_v2", lambda vllm_config: True)
    assert len({*found, fills(2), fills(3)}) == 5


def test_another_model_id_does_not_share(plain: bytes, tmp_path: Path) -> None:
    assert namespace_of(Engine(), tmp_path / "a copy") != plain


def test_another_instruction_set_does_not_share(
    plain: bytes, checkpoints: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("torch.backends.cpu.get_cpu_capability", lambda: "another")
    assert namespace_of(Engine(), checkpoints / "model") != plain


def test_another_form_of_fp8_does_not_share(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """MI300 and NVIDIA's devices are both "cuda" to torch, and read the same 8 bits as other numbers."""
    on_device = Engine(change=lambda vllm_config, _: setattr(vllm_config.device_config, "device_type", "cuda"))
    found = []
    for fnuz in (False, True, False):
        monkeypatch.setattr("vllm.platforms.current_platform.is_fp8_fnuz", lambda fnuz=fnuz: fnuz)
        found.append(namespace_of(on_device, tmp_path / "model"))
    assert found[0] == found[2] != found[1]


def test_states_in_another_order_are_not_shared(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def with_states(vllm_config: Any, kv_cache_config: Any) -> None:
        from vllm.v1.kv_cache_interface import KVCacheGroupSpec, MambaSpec

        size = kv_cache_config.kv_cache_groups[0].kv_cache_spec.page_size_bytes
        shape = ((4, 4),)
        spec = MambaSpec(BLOCK, shape, (torch.float32,), mamba_cache_mode="align", page_size_padded=size)
        kv_cache_config.kv_cache_groups.append(KVCacheGroupSpec(["model.layers.9.mixer"], spec))
        vllm_config.cache_config.mamba_cache_mode = "align"

    found = []
    for order in ("SD", "DS", "SD"):
        monkeypatch.setenv("VLLM_SSM_CONV_STATE_LAYOUT", order)
        found.append(namespace_of(Engine(change=with_states), tmp_path / "model"))
    assert found[0] == found[2] != found[1]


def test_another_version_of_vllm_does_not_share(
    plain: bytes, checkpoints: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("lmkv.vllm.model.vllm_version", lambda: "0.99.0")
    assert namespace_of(Engine(), checkpoints / "model") != plain


def test_another_format_of_keys_does_not_share(
    plain: bytes, checkpoints: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("lmkv.chunks.namespace.FORMAT_VERSION", 99)
    assert namespace_of(Engine(), checkpoints / "model") != plain


@pytest.mark.parametrize("flag", [{"host_resident": True}, {"enable_kv_transfer": False}], ids=str)
def test_blocks_that_are_not_the_devices_own_are_refused(flag: dict[str, bool], checkpoints: Path) -> None:
    def change(vllm_config: Any, kv_cache_config: Any) -> None:
        for name, value in flag.items():
            setattr(kv_cache_config.kv_cache_groups[0], name, value)

    raised(ValueError, "outside its block tables", lambda: namespace_of(Engine(change=change), checkpoints / "model"))
