"""vLLM engines to measure: their specification, and a child process for each that answers prompts.

`python -m lmkv.cli.measure.vllm_engines FOLDER` is such a process. vLLM is imported there only.
"""

from __future__ import annotations

import os
import random
import sys
from collections.abc import Mapping, Sequence
from importlib.metadata import entry_points
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn

from attrs import asdict, field, frozen

from lmkv.cli.measure.process import ChildProcess, Questions
from lmkv.cli.measure.small_model import SmallModel
from lmkv.cli.measure.timing import wait_until_settled

if TYPE_CHECKING:
    from vllm import LLM

CONNECTOR = "LMKVConnector"
CONNECTOR_MODULE = "lmkv.vllm.connector"
START_TIMEOUT = 900.0
SHARED_DEVICE = {"gpu_memory_utilization": 0.1}
"""Options of engines of which several share a device."""
HELD_S = 86_000.0
"""Seconds for which an engine with a lower tier keeps what is prefetched in host memory."""
VOCABULARY = 1000
"""Prompts are random ids below this: every model has these tokens."""
MAX_SOCKET_FOLDER = 70
"""Most characters of a folder's path: the names of vLLM's sockets follow it, and both together have a limit."""
ENVIRONMENT = {
    "DO_NOT_TRACK": "1",
    "HF_HUB_OFFLINE": "1",
    "TRANSFORMERS_OFFLINE": "1",
    "VLLM_NO_USAGE_STATS": "1",
    "VLLM_LOGGING_LEVEL": "ERROR",
    # By default vLLM reserves a core without a connector and none with one, which would flatter lmkv.
    "VLLM_CPU_NUM_OF_RESERVED_CPU": "0",
}
# The engine core in the process that is asked, or in one of its own, as vLLM does by default.
ONE_PROCESS = {"VLLM_ENABLE_V1_MULTIPROCESSING": "0"}
SEVERAL_PROCESSES = {"VLLM_ENABLE_V1_MULTIPROCESSING": "1"}


def _small_model(value: Any) -> Any:
    return SmallModel(**value) if isinstance(value, dict) else value


@frozen(kw_only=True)
class EngineSpec:
    """One vLLM engine. `model`: a name or a path, or a model with random weights to be written.

    `max_tokens`: longest request. `kv_bytes`: vLLM's KV space, None for its default.
    `prefix_caching`: vLLM's own; without it every repeated prompt is answered by the connector. `settings`:
    the connector's, None for an engine without a connector. `connector_module`: of one that vLLM does not know by name.
    `options`: further arguments of vLLM's `LLM`.
    """

    model: SmallModel | str = field(converter=_small_model)
    max_tokens: int
    kv_bytes: int | None = None
    prefix_caching: bool = False
    settings: Mapping[str, Any] | None = None
    connector: str = CONNECTOR
    connector_module: str | None = None
    options: Mapping[str, Any] = field(factory=dict)


def engine_specs(
    folder: Path,
    tokens: int,
    *,
    model: str | None = None,
    host_gib: float = 4.0,
    requests: int = 1,
    remote_url: str | None = None,
    dtype: str = "bfloat16",
) -> dict[str, EngineSpec]:
    """The engines that are compared, by name, for `requests` requests of `tokens` tokens at a time.

    `folder`: where a disk tier, or one in shared memory, stores its chunks. Without `model` a small one, with
    KV space for the requests, that computes in `dtype`. `remote_url`: of the engine that stores its chunks there.
    Host memory above a lower tier keeps what is prefetched, and nothing else.
    """
    small = SmallModel(dtype=dtype, max_position=max(32_768, 2 * tokens))
    kv_bytes = (requests + 2) * (tokens + 256) * small.kv_bytes_per_token

    def spec(settings: Mapping[str, Any] | None = None, *, prefix_caching: bool = False) -> EngineSpec:
        return EngineSpec(
            model=model or small,
            max_tokens=tokens,
            kv_bytes=None if model else kv_bytes,
            prefix_caching=prefix_caching,
            settings=settings,
        )

    host = {"max_local_cpu_size": host_gib}
    below = {"local_cpu": False, "prefetch_deadline": 30.0, "load_or_recompute": False, "pin_ttl": HELD_S, **host}
    disk = {"local_disk": str(folder / "kv"), "max_local_disk_size": 2 * host_gib, "disk_min_free": 0.0}
    shared = {"shared_memory": str(folder / "kv"), "max_shared_memory_size": 2 * host_gib}
    return {
        "nothing": spec(),
        "vllm prefix cache": spec(prefix_caching=True),
        "lmkv ram": spec(host),
        "lmkv ram, within the step": spec({"load_mode": "sync", **host}),
        "lmkv ram, between steps": spec({"load_mode": "async", **host}),
        "lmkv disk": spec({**below, **disk}),
        "lmkv shared memory": spec({**below, **shared}),
        "lmkv redis": spec({**below, "remote_url": remote_url}),
    }


# -- in the parent ----------------------------------------------------------------------------------------


@frozen(kw_only=True)
class Answer:
    """One request: its output, the seconds to its first token, and the tokens that were not computed.

    `sources`: tokens that were loaded, by tier. `load_gb_s`: the speed of the copy to the device, in 1e9
    bytes per second; `load_s` its seconds. `wait_s`: seconds that it waited for lower tiers before.
    """

    token_ids: tuple[int, ...] = field(converter=tuple)
    ttft_s: float
    hit_tokens: int
    load_gb_s: float | None = None
    load_s: float = 0.0
    wait_s: float = 0.0
    sources: Mapping[str, int] = field(factory=dict)


class EngineProcess(ChildProcess):
    """An engine in a process of its own, ready to answer.

    `folder`: for its log, its sockets and a small model. `python`: an interpreter of an environment with vLLM
    and the other imports of this module. Raises ChildFailedError.
    """

    def __init__(
        self, spec: EngineSpec, folder: Path, env: Mapping[str, str] = ONE_PROCESS, *, python: str = sys.executable
    ) -> None:
        # -P: nothing in the current folder is meant to be imported.
        super().__init__([python, "-P", "-m", __name__, str(folder)], folder, env)
        try:
            machine = self.ask(asdict(spec), START_TIMEOUT)
        except BaseException:
            self.kill()
            self.close()
            raise
        self.engine: str = machine["engine"]
        self.device: str = machine["device"]

    def send(self, seed: int, tokens: int, output_tokens: int = 1, *, prefetch: bool = False) -> Answer:
        """Send the random prompt of a seed, alone, and wait for its answer. `prefetch`: have host memory keep it."""
        return Answer(
            **self.ask({"seed": seed, "tokens": tokens, "output_tokens": output_tokens, "prefetch": prefetch})
        )


def fastest(answers: Sequence[Answer]) -> float:
    """The least seconds to the first token, because disturbances only add."""
    return min(answer.ttft_s for answer in answers)


def wait_until_written(folder: Path) -> None:
    """Wait until the disk tier in `folder` has written its chunks, if there is one."""
    kv = folder / "kv"
    if kv.exists():
        wait_until_settled(lambda: sum(1 for _ in kv.rglob("*")))


# -- in the child -----------------------------------------------------------------------------------------


def open_engine(spec: EngineSpec, folder: Path) -> LLM:
    """Start vLLM in this process. `folder`: for its sockets and a small model, which is written once."""
    for name, value in ENVIRONMENT.items():
        os.environ.setdefault(name, value)
    if len(str(folder)) <= MAX_SOCKET_FOLDER:
        # An engine that is killed leaves its sockets behind: here they are removed with the folder.
        os.environ.setdefault("VLLM_RPC_BASE_PATH", str(folder))
    from vllm import LLM

    own: dict[str, Any] = {"model": spec.model}
    if isinstance(spec.model, SmallModel):
        own = {"model": str(folder / "model"), "dtype": spec.model.dtype}
        if not (folder / "model").exists():
            spec.model.write(folder / "model", weights=spec.options.get("load_format") != "dummy")
    own |= {"enforce_eager": True, **spec.options}
    return LLM(
        skip_tokenizer_init=True,
        max_model_len=spec.max_tokens,
        kv_cache_memory_bytes=spec.kv_bytes,
        enable_prefix_caching=spec.prefix_caching,
        disable_log_stats=False,
        kv_transfer_config=_transfer_config(spec),
        **own,
    )


def _transfer_config(spec: EngineSpec) -> Any:
    if spec.settings is None:
        return None
    from vllm.config import KVTransferConfig

    by_name = spec.connector != CONNECTOR or entry_points(group="vllm.general_plugins", name="lmkv")
    return KVTransferConfig(
        kv_connector=spec.connector,
        kv_role="kv_both",
        kv_load_failure_policy="recompute",
        kv_connector_extra_config=dict(spec.settings),
        kv_connector_module_path=spec.connector_module or (None if by_name else CONNECTOR_MODULE),
    )


def ask(llm: LLM, seed: int, tokens: int, output_tokens: int, *, prefetch: bool) -> Answer:
    """Send one prompt alone. `prefetch`: lmkv is told to keep it in host memory.

    The time to the first token is vLLM's own figure, from the request's arrival to the token's, so that the
    tokens generated after it for the comparison of outputs cost nothing.
    """
    from vllm import SamplingParams

    prompt = random.Random(seed).choices(range(VOCABULARY), k=tokens)
    transfer = llm.llm_engine.vllm_config.kv_transfer_config
    reports = transfer is not None and transfer.kv_connector == CONNECTOR
    params = SamplingParams(
        temperature=0,
        max_tokens=output_tokens,
        ignore_eos=True,
        detokenize=False,
        extra_args={"kv_transfer_params": {"lmkv.report": True, "lmkv.prefetch": prefetch}} if reports else None,
    )
    [output] = llm.generate({"prompt_token_ids": prompt}, params, use_tqdm=False)
    report = (output.kv_transfer_params or {}).get("lmkv", {})
    seconds = report.get("load_seconds", 0.0)
    return Answer(
        token_ids=output.outputs[0].token_ids,
        ttft_s=output.metrics.first_token_latency,
        # Without lmkv's report: tokens that vLLM or another connector did not compute.
        hit_tokens=report.get("hit_tokens", output.num_cached_tokens or 0),
        load_gb_s=report["load_bytes"] / seconds / 1e9 if seconds else None,
        load_s=seconds,
        wait_s=report.get("wait_seconds", 0.0),
        sources=report.get("sources", {}),
    )


def leave(llm: LLM) -> NoReturn:
    """End vLLM and this process, without vLLM's shutdown hooks, which take several seconds."""
    llm.llm_engine.engine_core.shutdown()
    os._exit(0)


def _machine() -> dict[str, str]:
    import torch
    import vllm

    device = torch.cuda.get_device_name() if torch.cuda.is_available() else "cpu"
    return {"engine": f"vllm {vllm.__version__}", "device": device}


def main() -> None:
    questions = Questions()
    llm = open_engine(EngineSpec(**next(questions)), Path(sys.argv[1]))
    questions.answer(_machine())
    for question in questions:
        questions.answer(asdict(ask(llm, **question)))
    leave(llm)


if __name__ == "__main__":
    main()
