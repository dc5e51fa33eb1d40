"""Real vLLM engines for tests: in this process, small, one at a time, closed for certain."""

from __future__ import annotations

import atexit
import contextlib
import functools
import gc
import os
import random
from collections.abc import Callable, Iterator, Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest

from lmkv.protocols import Clock
from lmkv.store.tiered import TieredStore
from lmkv.testing import ManualClock
from lmkv.vllm.compat import vllm_version
from tests.kit import LIMIT

ENVIRONMENT = {
    "HF_HUB_OFFLINE": "1",
    "TRANSFORMERS_OFFLINE": "1",
    "VLLM_NO_USAGE_STATS": "1",
    "DO_NOT_TRACK": "1",
    "VLLM_CONFIGURE_LOGGING": "0",
    "VLLM_CPU_NUM_OF_RESERVED_CPU": "0",
}

BREAKS_COPIES = "TEST_BREAKS_COPIES"
"""Environment: path of a file with a rank and "store" or "load", while that rank's copies are to fail (`breakable`)."""
BINDING = "VLLM_CPU_OMP_THREADS_BIND"
TELLS_SOURCES = not vllm_version().startswith(("0.29", "0.30", "0.31")) if find_spec("vllm") else False
"""Whether vLLM counts the tokens that were not computed by the tier that they came from."""
BLOCK = 32
CHUNK = 256


def prompt(seed: int, length: int) -> list[int]:
    """`length` token ids that depend on nothing but the arguments."""
    rng = random.Random(seed)
    return [rng.randrange(5, 1000) for _ in range(length)]


def has_fp8() -> bool:
    """Whether this processor has what vLLM's CPU build needs for KV in fp8."""
    import torch

    return torch.cpu._is_avx512_supported() or torch.cpu._is_amx_tile_supported()


@contextlib.contextmanager
def engine(
    model: Path, connector: str | None = "LMKVConnector", clock: Clock | None = None, **overrides: Any
) -> Iterator[Engine]:
    """A vLLM engine in this process. `extra`, `kv_role` and `kv_load_failure_policy` go to the connector.

    `clock`: all that lmkv's scheduler side knows of time. One that stands still lets nothing be late or slow.
    """
    os.environ.update(ENVIRONMENT, VLLM_ENABLE_V1_MULTIPROCESSING="0")
    replace_kernels_once()
    inspect_models_here()
    from vllm import LLM
    from vllm.config import KVTransferConfig

    transfer: dict[str, Any] = {
        "kv_role": overrides.pop("kv_role", "kv_both"),
        "kv_load_failure_policy": overrides.pop("kv_load_failure_policy", "recompute"),
        "kv_connector_extra_config": {"max_local_cpu_size": 0.25, **overrides.pop("extra", {})},
    }
    transfer.update(overrides.pop("transfer", {}))
    options: dict[str, Any] = {
        "dtype": "float32",
        "enforce_eager": True,
        "max_model_len": 2048,
        "kv_cache_memory_bytes": 17 << 20,
        "enable_prefix_caching": True,
        "skip_tokenizer_init": True,
        "block_size": BLOCK,
        "seed": 0,
        **overrides,
    }
    if connector is not None:
        options["kv_transfer_config"] = KVTransferConfig(kv_connector=connector, **transfer)
    if str(options.get("kv_cache_dtype", "")).startswith("fp8") and not has_fp8():
        pytest.skip("vLLM's CPU build has fp8 KV only on processors with AVX-512 or AMX")
    with one_thread():
        with timed_by(clock) if clock is not None else contextlib.nullcontext(), no_collection():
            llm = LLM(model=str(model), **options)
        try:
            yield Engine(llm)
        finally:
            with no_collection():
                llm.llm_engine.engine_core.shutdown()
            del llm
            gc.collect()


def configured(model: Path, extra: dict[str, Any] | None = None, **options: Any) -> Any:
    """vLLM's configuration of an engine, with lmkv as its connector if there are settings of lmkv's."""
    os.environ.update(ENVIRONMENT)
    from vllm.config import KVTransferConfig
    from vllm.engine.arg_utils import EngineArgs

    if extra is not None:
        transfer: dict[str, Any] = {"kv_load_failure_policy": "recompute", "kv_connector_extra_config": extra}
        options["kv_transfer_config"] = KVTransferConfig("LMKVConnector", kv_role="kv_both", **transfer)
    return EngineArgs(model=str(model), skip_tokenizer_init=True, **options).create_engine_config()


def full_attention(**changes: Any) -> Any:
    """vLLM's specification of such a layer."""
    os.environ.update(ENVIRONMENT)
    import torch
    from vllm.v1.kv_cache_interface import FullAttentionSpec

    return FullAttentionSpec(
        **{"block_size": 32, "num_kv_heads": 2, "head_size": 64, "dtype": torch.float32, **changes}
    )


def kv_caches(*specs: Any, num_blocks: int = 100) -> Any:
    """vLLM's configuration of KV caches, with a block table for each specification, or for layers' names and one."""
    from vllm.v1.kv_cache_interface import KVCacheConfig, KVCacheGroupSpec

    named = [spec if isinstance(spec, tuple) else ([f"{n}.layer"], spec) for n, spec in enumerate(specs)]
    return KVCacheConfig(num_blocks, [], [KVCacheGroupSpec([*names], spec) for names, spec in named])


def side_of(role: str, vllm_config: Any, caches: Any) -> Any:
    """The connector's side, SCHEDULER or WORKER, as vLLM makes it."""
    from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorRole

    from lmkv.vllm.connector import LMKVConnector

    return LMKVConnector(vllm_config, KVConnectorRole[role], caches)


@functools.cache
def replace_kernels_once() -> None:
    """Have only the first engine look through all modules for kernels that vLLM's CPU build replaces.

    Every engine would, and dies of llvmlite's modules, which an engine with n-grams imports.
    """
    from vllm.platforms.cpu import CpuPlatform

    # vLLM 0.29 replaces none.
    replace = getattr(CpuPlatform, "register_triton_kernel_overrides", None)
    if replace is not None:
        CpuPlatform.register_triton_kernel_overrides = staticmethod(functools.cache(replace))


@functools.cache
def inspect_models_here() -> None:
    """Have vLLM look at the class of a model in this process, which is about to import it.

    vLLM starts a process for each class that it has not seen before, which takes 9 seconds to import vLLM.
    """
    from vllm.model_executor.models import registry

    assert hasattr(registry, "_run_in_subprocess"), "this vLLM inspects models otherwise"
    registry._run_in_subprocess = lambda look: look()


@functools.cache
def freeze_modules() -> None:
    """Take the modules of vLLM and torch out of garbage collection: a collection visits only engines then."""
    gc.collect()
    gc.freeze()
    # Triton's bindings complain of whatever is left when the process has ended.
    atexit.register(gc.unfreeze)


@contextlib.contextmanager
def no_collection() -> Iterator[None]:
    """Keep vLLM from collecting garbage: eight times in an engine's life took two thirds of its start and shutdown."""
    freeze_modules()
    with pytest.MonkeyPatch.context() as patch:
        for name in ("collect", "freeze", "unfreeze"):
            patch.setattr(gc, name, lambda *_: 0)
        yield


@contextlib.contextmanager
def one_thread() -> Iterator[None]:
    """Have engines that are made in here compute with one thread. vLLM takes all cores, whatever torch was set to.

    Threads that wait for each other on a busy machine cost such small models far more than they bring.
    """
    import torch

    threads = torch.get_num_threads()
    torch._C.set_num_threads(1)
    try:
        with pytest.MonkeyPatch.context() as patch:
            if BINDING not in os.environ:
                patch.setenv(BINDING, "nobind")
            yield
    finally:
        torch._C.set_num_threads(threads)


@contextlib.contextmanager
def timed_by(clock: Clock) -> Iterator[None]:
    """Have engines that are made in here take the time from this clock."""
    from lmkv.vllm.scheduler.context import SchedulerOptions

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("lmkv.build.TieredStore", functools.partial(TieredStore, clock=clock))
        patch.setattr(SchedulerOptions, "of", functools.partial(SchedulerOptions.of, clock=clock))
        yield


@contextlib.contextmanager
def pipelining() -> Iterator[None]:
    """Engines made in here schedule each step before the one before it has ended, as on devices.

    vLLM switches its asynchronous scheduler off on CPUs, as not required; their workers can do with it.
    """
    from vllm.platforms.cpu import CpuPlatform

    update = CpuPlatform.check_and_update_config.__func__

    def switched_on(platform: type, config: Any) -> None:
        update(platform, config)
        config.scheduler_config.async_scheduling = True

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(CpuPlatform, "check_and_update_config", classmethod(switched_on))
        yield


def parameters(max_tokens: int = 8, *, logprobs: int | None = None, **params: Any) -> Any:
    """vLLM's parameters of a request for a greedy answer of so many tokens. `params`: `kv_transfer_params`."""
    from vllm import SamplingParams

    extra = {"kv_transfer_params": params} if params else None
    return SamplingParams(
        temperature=0, max_tokens=max_tokens, ignore_eos=True, detokenize=False, logprobs=logprobs, extra_args=extra
    )


def generated(outputs: Sequence[Any]) -> list[list[int]]:
    """The token ids of each answer."""
    return [list(output.outputs[0].token_ids) for output in outputs]


class Engine:
    """An `LLM` with the calls that tests need."""

    def __init__(self, llm: Any) -> None:
        self.llm = llm
        self._begun: dict[str, list[int]] = {}

    def run(
        self,
        prompts: Sequence[list[int]],
        *,
        max_tokens: int = 8,
        salts: Sequence[str] | None = None,
        params: dict[str, Any] | None = None,
        logprobs: int | None = None,
    ) -> list[Any]:
        """Generate greedily for all prompts at once; vLLM's RequestOutputs in the order of the prompts."""
        sampling = parameters(max_tokens, logprobs=logprobs, **{"lmkv.report": True, **(params or {})})
        requests = [
            {"prompt_token_ids": ids, **({"cache_salt": salts[index]} if salts else {})}
            for index, ids in enumerate(prompts)
        ]
        outputs: list[Any] = self.llm.generate(requests, sampling, use_tqdm=False)
        return outputs

    def ids(self, prompts: Sequence[list[int]], **options: Any) -> list[list[int]]:
        """Only the generated token ids."""
        return generated(self.run(prompts, **options))

    def again(self, prompts: Sequence[list[int]], **options: Any) -> list[Any]:
        """The same as `run`, where vLLM has forgotten all that it had: hits can only come from the connector."""
        self.forget_local()
        return self.run(prompts, **options)

    def repeats(self, prompts: Sequence[list[int]], hits: list[int], **options: Any) -> list[list[int]]:
        """The answers, which are the same again, when so many tokens of each prompt are loaded."""
        cold, warm = self.ids(prompts, **options), self.again(prompts, **options)
        assert generated(warm) == cold, "after a hit there are other answers"
        found = list(map(external_hits, warm))
        assert found == hits, f"hits of {found} tokens instead of {hits}"
        self.assert_nothing_leaked()
        return cold

    def begin(self, ids: list[int], tokens: int, lora: Any = None) -> Callable[[int], list[int]]:
        """Add a request. Each call makes steps until its answer has so many tokens, and returns it; others go on."""
        found, name = list[int](), str(len(self._begun))
        self._begun[name] = found
        self.llm.llm_engine.add_request(name, {"prompt_token_ids": ids}, parameters(tokens), lora_request=lora)

        def has(count: int) -> list[int]:
            while len(found) < count:
                self.step()
            return found

        return has

    def step(self) -> None:
        """One step of all requests that have begun."""
        for output in self.llm.llm_engine.step():
            self._begun[output.request_id][:] = output.outputs[0].token_ids

    def forget_local(self) -> None:
        """Empty vLLM's own prefix cache, so that hits can only come from the connector."""
        assert self.llm.reset_prefix_cache()

    @contextlib.contextmanager
    def failing(self, verb: str = "load") -> Iterator[None]:
        """The worker's copies of this kind fail in here, and there are some."""
        broken: list[object] = []

        def breaks(*orders: object, **_: object) -> None:
            broken.append(orders)
            raise OSError(f"injected: this {verb} breaks")

        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(self.worker.copier, verb, breaks)
            yield
        assert broken, f"there was no {verb}"

    @contextlib.contextmanager
    def preemptions(self) -> Iterator[list[str]]:
        """The ids of requests that are preempted in here, one for each time."""
        preempted: list[str] = []
        original = self.scheduler._preempt_request

        def noted(request: Any, *rest: Any, **more: Any) -> Any:
            preempted.append(request.request_id)
            return original(request, *rest, **more)

        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(self.scheduler, "_preempt_request", noted)
            yield preempted

    @property
    def scheduler(self) -> Any:
        return self.llm.llm_engine.engine_core.engine_core.scheduler

    @property
    def connector(self) -> Any:
        """The scheduler side's connector."""
        return self.scheduler.connector

    @property
    def store(self) -> Any:
        return self.connector.sides.scheduler.store

    @property
    def states(self) -> int:
        """Entries of lmkv's for the states of each boundary."""
        return int(self.connector.sides.model.block_map.states)

    @property
    def worker(self) -> Any:
        """The worker side of the connector."""
        from vllm.distributed.kv_transfer import get_kv_transfer_group

        return get_kv_transfer_group()._worker

    @property
    def worker_model(self) -> Any:
        """What the worker side makes of the model."""
        from vllm.distributed.kv_transfer import get_kv_transfer_group

        return get_kv_transfer_group()._model

    @property
    def accepted_drafts(self) -> int:
        """Drafts accepted since the engine's start, as vLLM counts them; `disable_log_stats` must be False."""
        name = "vllm:spec_decode_num_accepted_tokens"
        return int(sum(metric.value for metric in self.llm.get_metrics() if metric.name == name))

    def assert_nothing_leaked(self) -> None:
        """No lease, reservation or job is left once no request is running."""
        assert self.store.drain(LIMIT), "copies to lower tiers end"
        stats = self.store.stats()
        assert (stats.leased, stats.writing, stats.loading) == (0, 0, 0)
        assert not self.connector.sides.scheduler.busy
        assert not self.connector.sides.scheduler.requests


CHUNK_BYTES = CHUNK * 4096
"""Bytes of a chunk of the test model: 256 tokens, 4 layers, 2 KV heads of 64, keys and values, float32."""


@contextlib.contextmanager
def over_disk(model: Path, folder: Path, *, ram_chunks: float = 256, **options: Any) -> Iterator[Engine]:
    """An engine that has listed its disk, and writes all it has before its end. It waits for it as long as that takes:

    no time passes.
    """
    extra = {
        "local_disk": f"file://{folder}",
        "max_local_disk_size": 1.0,
        "max_local_cpu_size": ram_chunks * CHUNK_BYTES / 2**30,
        "disk_min_free": 0.0,
        **options.pop("extra", {}),
    }
    with engine(model, clock=ManualClock(), extra=extra, **options) as running:
        assert running.store.wait_indexed(LIMIT)
        yield running
        assert running.store.drain(LIMIT)


def external_hits(output: Any) -> int:
    """Tokens of a request that the connector loaded."""
    return int(output.kv_transfer_params["lmkv"]["hit_tokens"])
