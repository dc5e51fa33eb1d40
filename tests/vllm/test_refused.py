"""Models that lmkv does not cache: it says why at the start, and never hits."""

from __future__ import annotations

import logging
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from lmkv.vllm.model import describe
from tests.tables import raised
from tests.vllm.families import Family, hrm_text
from tests.vllm.harness import configured, engine, external_hits, full_attention, kv_caches, prompt, side_of


def mamba() -> Any:
    from vllm.v1.kv_cache_interface import MambaSpec

    return MambaSpec(block_size=32, shapes=((4, 4),), dtypes=(torch.float32,))


def chunked_local() -> Any:
    from vllm.v1.kv_cache_interface import ChunkedLocalAttentionSpec

    return ChunkedLocalAttentionSpec(**FORM, attention_chunk_size=64)


def cross_attention() -> Any:
    from vllm.v1.kv_cache_interface import CrossAttentionSpec

    return CrossAttentionSpec(**FORM)


FORM = {"block_size": 32, "num_kv_heads": 2, "head_size": 64, "dtype": torch.float32}


def request_of(name: str, tokens: list[int]) -> Any:
    count = len(tokens)
    return SimpleNamespace(request_id=name, num_tokens=count, all_token_ids=tokens, num_prompt_tokens=count)


@pytest.mark.parametrize("make", [mamba, chunked_local, cross_attention])
def test_a_layer_that_keeps_no_prefix(model: Path, make: Callable[[], Any], caplog: pytest.LogCaptureFixture) -> None:
    """Beside a layer of full attention, as in mixtures."""
    with caplog.at_level(logging.WARNING, logger="lmkv"):
        connector = side_of("SCHEDULER", configured(model, {}), kv_caches(full_attention(), make()))
    assert any("the KV of this model is not cached" in record.getMessage() for record in caplog.records)
    request = request_of("r", list(range(1000)))
    connector.on_new_request(request)
    assert connector.get_num_new_matched_tokens(request, 0) == (0, False)
    connector.shutdown()


def test_a_device_without_copier(
    model: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Both sides say so once, and vLLM serves without lmkv: no task is ever made that would fail."""
    vllm_config = configured(model, {})
    monkeypatch.setattr(vllm_config.device_config, "device_type", "xpu")
    for role in ("SCHEDULER", "WORKER"):
        caplog.clear()
        with caplog.at_level(logging.WARNING, logger="lmkv"):
            connector = side_of(role, vllm_config, kv_caches(full_attention()))
            connector.register_kv_caches({})
        [record] = [found for found in caplog.records if found.name.startswith("lmkv")]
        assert "not a device of type 'xpu'" in record.getMessage()
        connector.shutdown()


def test_the_padding_of_a_page_is_no_part_of_it() -> None:
    """vLLM pads pages where layers of several sizes share memory; tensors are views of what is in them."""
    from lmkv.vllm.compat import kv_groups

    plain = full_attention()
    padded = full_attention(page_size_padded=2 * plain.page_size_bytes)
    assert padded.page_size_bytes == 2 * plain.page_size_bytes
    assert kv_groups(kv_caches(padded))[0].page_bytes == (plain.page_size_bytes,)


def test_a_prefix_whose_kv_depends_on_what_follows_it(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    folder = Family(hrm_text).write(tmp_path / "model")
    head = prompt(1, 512)
    prompts = [head + prompt(2, 300), head + prompt(3, 300)]
    options = {"kv_cache_memory_bytes": 256 << 20, "max_num_batched_tokens": 2048}
    with engine(folder, connector=None, **options) as plain:
        expected = [plain.ids([ids])[0] for ids in prompts]
    with caplog.at_level(logging.WARNING, logger="lmkv"), engine(folder, **options) as running:
        assert [running.ids([ids])[0] for ids in prompts] == expected
    assert any("attend to later tokens" in record.getMessage() for record in caplog.records)


def pooled(llm: Any, prompts: list[list[int]]) -> list[torch.Tensor]:
    outputs = [llm.embed([{"prompt_token_ids": ids}], use_tqdm=False)[0] for ids in prompts]
    return [torch.tensor(output.outputs.embedding) for output in outputs]


@pytest.mark.parametrize(("pooling", "cached"), [("MEAN", False), ("CLS", False), ("LAST", True)])
def test_embeddings_of_a_text_that_comes_again(
    model: Path, pooling: str, cached: bool, caplog: pytest.LogCaptureFixture
) -> None:
    """Pooling over all tokens computes each prompt whole: a hit would end the server."""
    from vllm.config import PoolerConfig

    options: dict[str, Any] = {"runner": "pooling", "convert": "embed", "enable_prefix_caching": None}
    options["skip_tokenizer_init"] = False
    options["pooler_config"] = PoolerConfig(seq_pooling_type=pooling)
    # Of no whole number of chunks, and two texts with a common beginning.
    prompts = [prompt(4, 747), prompt(4, 747), prompt(4, 600) + prompt(5, 147)]
    with engine(model, connector=None, **options) as plain:
        expected = pooled(plain.llm, prompts)
    with caplog.at_level(logging.INFO, logger="lmkv"), engine(model, **options) as running:
        found = pooled(running.llm, prompts[:1])
        running.forget_local()
        found += pooled(running.llm, prompts[1:])
    assert all(torch.allclose(ours, theirs, atol=1e-4) for ours, theirs in zip(found, expected, strict=True))
    said = [record.getMessage() for record in caplog.records]
    assert any("loads 746" in line for line in said) == cached, said
    assert any(f"with {pooling}/" in line and "not cached" in line for line in said) == (not cached), said


def test_a_request_that_needs_an_output_of_each_prompt_token(model: Path) -> None:
    """Log probabilities of the prompt are those of an engine without a connector, all of them, after a hit too."""
    from vllm import SamplingParams

    ids = prompt(6, 700)
    asked = SamplingParams(temperature=0, max_tokens=2, prompt_logprobs=0, detokenize=False)
    with engine(model, connector=None) as plain:
        [expected] = plain.llm.generate([{"prompt_token_ids": ids}], asked, use_tqdm=False)
    with engine(model) as running:
        running.run([ids])
        running.forget_local()
        looked_up = running.store.stats().primary.hits
        [found] = running.llm.generate([{"prompt_token_ids": ids}], asked, use_tqdm=False)
        assert running.store.stats().primary.hits == looked_up, "nothing is leased for what vLLM does not take"
        assert external_hits(running.again([ids])[0]) == 699
        running.assert_nothing_leaked()
    values = [
        [next(iter(each.values())).logprob for each in output.prompt_logprobs[1:]] for output in (found, expected)
    ]
    assert len(values[0]) == len(values[1]) == 699
    assert torch.allclose(torch.tensor(values[0]), torch.tensor(values[1]), atol=1e-4)


def is_refused(config: Any, reason: str, change: Callable[[Any], object]) -> None:
    """It is cached without the change."""
    assert describe(config, kv_caches(full_attention()), 256).ranks.total == 1
    change(config)
    raised(ValueError, reason, lambda: describe(config, kv_caches(full_attention()), 256))


def test_outputs_of_each_token_that_a_hit_lacks(model: Path) -> None:
    """Which experts a token was given to, vLLM knows of tokens that it has computed itself: a hit ended the engine."""

    def wants_them(config: Any) -> None:
        getattr(config, "aux_output_config", config.model_config).enable_return_routed_experts = True

    is_refused(configured(model), "--enable-return-routed-experts", wants_them)


def test_ranks_on_another_machine(model: Path) -> None:
    """They cannot map the memory that the scheduler's process has."""
    is_refused(
        configured(model),
        "on several machines and cannot share",
        lambda config: setattr(config.parallel_config, "nnodes", 2),
    )


def test_ranks_with_an_engine_each(model: Path) -> None:
    """As trainers start them with torchrun: no engine hears of the other ranks' copies."""
    config = configured(model)
    config.parallel_config.distributed_executor_backend = "external_launcher"

    def two(config: Any) -> None:
        config.parallel_config.tensor_parallel_size = config.parallel_config.world_size = 2

    is_refused(config, "each rank runs its own engine", two)


KNOWN_REFUSALS = {
    "kv_transfer.py": {"__post_init__", "hisparse_host_pool_gib"},
    "ec_transfer.py": {"__post_init__"},
    "vllm.py": {
        "__post_init__",
        "_verify_aux_output_compatibility",
        "_verify_kv_transfer_compat",
        "validate_mamba_cached_kernel",
    },
}
"""Functions of vLLM's configuration that raise because of a KV connector, by file. `plan.options` follows each."""


def test_what_vllm_refuses_beside_connectors_is_known() -> None:
    """vLLM refuses these features beside connectors. For a new one decide whether lmkv refuses it, and list it."""
    import ast
    import inspect

    import vllm.config

    found: dict[str, set[str]] = {}
    for path in sorted(Path(inspect.getfile(vllm.config)).parent.glob("*.py")):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.FunctionDef) and any(isinstance(each, ast.Raise) for each in ast.walk(node)):
                words = ast.unparse(node)
                if "connector" in words or "kv_transfer" in words:
                    found.setdefault(path.name, set()).add(node.name)
    assert {name: functions - KNOWN_REFUSALS.get(name, set()) for name, functions in found.items()} == {
        name: set() for name in found
    }


class Core:
    """As vLLM's engine core: it makes the scheduler side, and passes calls on to its workers."""

    def __init__(self, make: Callable[[], Any]) -> None:
        self.model_executor = self
        self.scheduler = make()

    def collective_rpc(self, call: Callable[[Any], str]) -> list[str]:
        return ["what the worker has loaded"]

    def reset_prefix_cache(self) -> bool:
        return True


def test_what_only_the_worker_refuses_is_answered_and_ends_the_orders(
    model: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """The scheduler has the first specification of a group, and orders what the worker cannot copy."""
    from vllm.v1.core.kv_cache_utils import generate_scheduler_kv_cache_config
    from vllm.v1.kv_cache_interface import SinkFullAttentionSpec, UniformTypeKVCacheSpecs
    from vllm.v1.outputs import KVConnectorOutput

    from lmkv.vllm.connector import LMKVConnectorMetadata

    vllm_config = configured(model, {"max_local_cpu_size": 0.1})
    specs = {"attention": full_attention(), "odd": SinkFullAttentionSpec(**FORM, sink_len=4)}
    config = kv_caches((specs, UniformTypeKVCacheSpecs(block_size=32, kv_cache_specs=specs)))
    theirs = generate_scheduler_kv_cache_config([config])
    core = Core(lambda: side_of("SCHEDULER", vllm_config, theirs))
    scheduler, worker = core.scheduler, side_of("WORKER", vllm_config, config)
    request = request_of("r", list(range(600)))
    planner = scheduler.sides.scheduler
    assert planner is not None
    scheduler.on_new_request(request)
    assert scheduler.get_num_new_matched_tokens(request, 0) == (0, False)
    tables = [list(range(1, 20))]
    planner.plan_step({"r": 600}, lambda _: tables)
    plan = planner.take_plan()
    assert plan.stores, "it takes the model for one that is cached"
    with caplog.at_level(logging.WARNING, logger="lmkv"):
        worker.bind_connector_metadata(LMKVConnectorMetadata(plan))
        worker.start_load_kv(None)
        worker.wait_for_save()
        meta = worker.build_connector_worker_meta()
        assert meta is not None
        scheduler.update_connector_output(KVConnectorOutput(kv_connector_worker_meta=meta))
    assert (
        "nothing is cached from now on: a worker cannot cache the model's KV: the KV of SinkFullAttentionSpec layers"
        in caplog.text
    )
    assert not planner.busy
    scheduler.on_new_request(request_of("s", [7] * 700))
    planner.plan_step({"s": 700}, lambda _: tables)
    assert not planner.take_plan().stores
    for side in (scheduler, worker):
        side.shutdown()
