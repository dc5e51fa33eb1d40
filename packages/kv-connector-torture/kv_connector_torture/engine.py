"""`Engine`: a small engine of vLLM in this process, with too few blocks. `Pair`: two engines, one of which computes
prompts.
"""

from __future__ import annotations

import contextlib
import functools
import gc
import os
import sys
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from attrs import define, field

from kv_connector_torture.storage import free_ports

ENVIRONMENT = {
    "HF_HUB_OFFLINE": "1",
    "TRANSFORMERS_OFFLINE": "1",
    "VLLM_NO_USAGE_STATS": "1",
    "DO_NOT_TRACK": "1",
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
    "VLLM_CPU_NUM_OF_RESERVED_CPU": "0",
    # Threads that wait for each other cost such small models more than they bring.
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
    "OMP_NUM_THREADS": "1",
    # Trials are killed, with whatever they have registered.
    "PYTHONWARNINGS": "ignore::UserWarning:multiprocessing.resource_tracker",
    "TORCHDYNAMO_DISABLE": "1",
    "GLOO_SOCKET_IFNAME": "lo",
}
MAX_MODEL_LEN = 640
OPTIONS = {
    "dtype": "float32",
    "enforce_eager": True,
    "max_model_len": MAX_MODEL_LEN,
    "kv_cache_memory_bytes": 64 << 20,
    "block_size": 32,
    "max_num_seqs": 8,
    "skip_tokenizer_init": True,
    "seed": 0,
}


@contextlib.contextmanager
def engine(
    model: Path,
    options: Mapping[str, Any],
    connector: Mapping[str, Any] | None = None,
    make: Callable[[Any], Engine] | None = None,
) -> Iterator[Engine]:
    """Provide, for a `with` block, an engine of the model. `connector`: the content of vLLM's `kv_transfer_config`, or
    None. `make`: a function that makes the returned object from vLLM's engine; by default `Engine`.
    """
    _prepare_cpus()
    from vllm import EngineArgs
    from vllm.config import KVTransferConfig
    from vllm.v1.engine.llm_engine import LLMEngine

    given = {**OPTIONS, **options}
    if connector is not None:
        given["kv_transfer_config"] = KVTransferConfig(**connector)
    with _no_collection():
        made = LLMEngine.from_engine_args(EngineArgs(model=str(model), **given))
    try:
        yield (make or Engine)(made)
    finally:
        with _no_collection():
            made.engine_core.shutdown()
        del made
        gc.collect()


@contextlib.contextmanager
def _no_collection() -> Iterator[None]:
    """Keep vLLM from collecting garbage in a `with` block. Otherwise, eight collections for each engine take half of a
    trial's time.
    """
    names = ("collect", "freeze", "unfreeze")
    kept = {name: getattr(gc, name) for name in names}
    for name in names:
        setattr(gc, name, lambda *_: 0)
    try:
        yield
    finally:
        for name, function in kept.items():
            setattr(gc, name, function)


@functools.cache
def _prepare_cpus() -> None:
    """Change two functions of vLLM's platform for CPUs.

    Only the first engine looks through all modules for kernels to replace. It skips numba and llvmlite, which n-grams
    and connectors import, because looking through these modules would end the process. Workers are forked, so that they
    have the patches of `--around` and start at once.
    """
    from vllm.platforms.cpu import CpuPlatform

    replace = getattr(CpuPlatform, "register_triton_kernel_overrides", None)

    def replace_elsewhere() -> None:
        deadly = {name for name in sys.modules if name.partition(".")[0] in {"llvmlite", "numba"}}
        hidden = {name: sys.modules.pop(name) for name in deadly}
        try:
            assert replace is not None
            replace()
        finally:
            sys.modules.update(hidden)

    if replace is not None:
        CpuPlatform.register_triton_kernel_overrides = staticmethod(functools.cache(replace_elsewhere))
    update = CpuPlatform.check_and_update_config.__func__

    def update_and_fork(platform: type, config: Any) -> None:
        update(platform, config)
        os.environ["VLLM_WORKER_MULTIPROC_METHOD"] = "fork"

    CpuPlatform.check_and_update_config = classmethod(update_and_fork)


def for_this_device(cpu: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return the options `cpu` if vLLM runs on a CPU here, else no options."""
    from vllm.platforms import current_platform

    return cpu if current_platform.is_cpu() else {}


@define
class Engine:
    """An engine of vLLM, with the calls that a trial needs. `counts`: the numbers of `preemptions`, of
    `external_tokens` (tokens that connectors have loaded), and of `accepted_drafts`.
    """

    _engine: Any
    counts: Counter[str] = field(factory=Counter)

    def __attrs_post_init__(self) -> None:
        scheduler, core = self.scheduler, self._engine.engine_core
        if scheduler.vllm_config.speculative_config is not None:
            self.counts["accepted_drafts"] = 0
        preempt, get_output = scheduler._preempt_request, core.get_output

        def preempt_and_count(*args: Any, **more: Any) -> Any:
            self.counts["preemptions"] += 1
            return preempt(*args, **more)

        def get_output_and_count() -> Any:
            outputs = get_output()
            for output in outputs.outputs:
                stats = getattr(output, "prefill_stats", None)
                if loaded := getattr(stats, "num_external_cached_tokens", 0):
                    self.counts["external_tokens"] += loaded
            if drafts := getattr(outputs.scheduler_stats, "spec_decoding_stats", None):
                self.counts["accepted_drafts"] += drafts.num_accepted_tokens
            return outputs

        scheduler._preempt_request = preempt_and_count
        core.get_output = get_output_and_count

    @property
    def scheduler(self) -> Any:
        return self._engine.engine_core.engine_core.scheduler

    def ask(
        self,
        name: str,
        tokens: Sequence[int],
        max_tokens: int,
        *,
        salt: str = "",
        adapter: Path | None = None,
        transfer: dict[str, Any] | None = None,
    ) -> None:
        """Begin a request called `name`. The answer is greedy, with the log-probabilities of the two likeliest tokens.

        `adapter`: the folder of a LoRA adapter, or None. `transfer`: vLLM's kv_transfer_params, or None.
        """
        from vllm import SamplingParams
        from vllm.lora.request import LoRARequest
        from vllm.sampling_params import RequestOutputKind

        params = SamplingParams(
            temperature=0,
            max_tokens=max_tokens,
            ignore_eos=True,
            detokenize=False,
            logprobs=2,
            output_kind=RequestOutputKind.FINAL_ONLY,
            extra_args=None if transfer is None else {"kv_transfer_params": transfer},
        )
        prompt: dict[str, Any] = {"prompt_token_ids": list(tokens)}
        if salt:
            prompt["cache_salt"] = salt
        lora = None
        if adapter is not None:
            lora = LoRARequest(adapter.name, int(adapter.name.rpartition("-")[2]), str(adapter))
        self._engine.add_request(name, prompt, params, lora_request=lora)

    def all_counts(self) -> Counter[str]:
        return self.counts

    def step(self) -> list[Any]:
        """Run one step of the engine. Returns vLLM's outputs of the requests that have ended in this step."""
        return [output for output in self._engine.step() if output.finished]

    def abort(self, name: str) -> None:
        self._engine.abort_request([name])

    def reset(self, *, running: bool, connector: bool) -> None:
        """Empty vLLM's prefix cache. `running`: whether to preempt running requests first. `connector`: whether to
        empty the connector's cache as well.
        """
        # vLLM does the half of it and raises when a request holds blocks that are being filled.
        with contextlib.suppress(RuntimeError):
            self._engine.reset_prefix_cache(reset_running_requests=running, reset_connector=connector)

    def held(self) -> set[str]:
        """Return the names of the requests that have ended while vLLM still holds their blocks."""
        return {name for name, request in self.scheduler.requests.items() if request.is_finished()}

    def left(self) -> str:
        """Return a text that says how many blocks and requests vLLM still holds, or "" if there are none."""
        scheduler = self.scheduler
        pool, known = scheduler.kv_cache_manager.block_pool, len(scheduler.requests)
        # One block is vLLM's own.
        blocks = pool.num_gpu_blocks - 1 - pool.get_num_free_blocks()
        found = [f"{blocks} of vLLM's blocks are not free"] if blocks else []
        return " and ".join(found + ([f"{known} requests are still known"] if known else []))


def set_environment() -> None:
    """Set the environment variables that vLLM needs for trials. Variables that the user has set keep their values."""
    for name, value in ENVIRONMENT.items():
        os.environ.setdefault(name, value)


PREFILL_ENGINE = {"distributed_executor_backend": "mp"}
"""Options of the prefill engine. A process can have only one connector for vLLM's workers, so the workers of the
prefill engine get separate processes.
"""
_TO_PREFILL = {
    "do_remote_decode": True,
    "do_remote_prefill": False,
    "remote_engine_id": None,
    "remote_block_ids": None,
    "remote_host": None,
    "remote_port": None,
}


def new_side_channel() -> None:
    """Choose a free port on which the NIXL connector of the next engine listens."""
    from vllm import envs

    envs.disable_envs_cache()
    os.environ["VLLM_NIXL_SIDE_CHANNEL_PORT"] = str(free_ports(1)[0])


@define
class Pair(Engine):
    """A pair of engines. The engine `prefill` computes each request for one token. Then this engine, the decode engine,
    gets the request with the `kv_transfer_params` that `prefill` has returned.
    """

    prefill: Engine = field(kw_only=True)
    _waiting: dict[str, Callable[[Any], None]] = field(factory=dict)
    _cached: dict[str, int] = field(factory=dict)

    def ask(self, name: str, tokens: Sequence[int], max_tokens: int, **more: Any) -> None:
        def decode(returned: Any) -> None:
            super(Pair, self).ask(name, tokens, max_tokens, **more | {"transfer": returned})

        self._waiting[name] = decode
        self.prefill.ask(name, tokens, 1, **more | {"transfer": {**(more.get("transfer") or {}), **_TO_PREFILL}})

    def step(self) -> list[Any]:
        for output in self.prefill.step():
            if decode := self._waiting.pop(output.request_id, None):
                self._cached[output.request_id] = output.num_cached_tokens or 0
                decode(output.kv_transfer_params)
        return [self._with_hits_of_prefill(output) for output in super().step()]

    def _with_hits_of_prefill(self, output: Any) -> Any:
        """Replace the number of cached tokens in an output by the number that the prefill engine reported. Without
        this, the check of reported hits would fail, because the whole prompt may come from the prefill engine.
        """
        cached = self._cached.pop(output.request_id, 0)
        if (output.num_cached_tokens or 0) <= len(output.prompt_token_ids):
            output.num_cached_tokens = cached
        return output

    def abort(self, name: str) -> None:
        self._cached.pop(name, None)
        if self._waiting.pop(name, None):
            self.prefill.abort(name)
        else:
            super().abort(name)

    def reset(self, *, running: bool, connector: bool) -> None:
        self.prefill.reset(running=running, connector=connector)
        super().reset(running=running, connector=connector)

    def held(self) -> set[str]:
        return self.prefill.held() | super().held()

    def left(self) -> str:
        sides = {"prefill": self.prefill.left(), "decode": super().left()}
        return "; ".join(f"{side}: {left}" for side, left in sides.items() if left)

    def all_counts(self) -> Counter[str]:
        """Return the counts of the decode engine. Only the preemptions include those of the prefill engine."""
        return self.counts + Counter(preemptions=self.prefill.counts["preemptions"])
