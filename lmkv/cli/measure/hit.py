"""Measure on real vLLM what a hit saves: long prompts cold, then again once vLLM has forgotten them.

Needs vLLM; everything heavy is imported when `measure` runs.
"""

from __future__ import annotations

import os
import random
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from importlib.metadata import entry_points
from pathlib import Path
from typing import TYPE_CHECKING, Any

from attrs import asdict, field, frozen, validators

from lmkv.cli.measure.small_model import SmallModel

if TYPE_CHECKING:
    from vllm import LLM

CONNECTOR = "LMKVConnector"
CONNECTOR_MODULE = "lmkv.vllm.connector"
CHUNK_TOKENS = 256
ANSWER_TOKENS = 16
PROMPTS = 3
KV_ROOM = 1.1
"""vLLM's KV space in prompts: the two prompts between a prompt and its repetition leave nothing of it."""
LARGEST_BLOCK = 128
"""Tokens in a block of vLLM's KV space: 128 on a CPU, fewer on a GPU."""

ENVIRONMENT = {
    "DO_NOT_TRACK": "1",
    "HF_HUB_OFFLINE": "1",
    "TRANSFORMERS_OFFLINE": "1",
    "VLLM_NO_USAGE_STATS": "1",
    "VLLM_LOGGING_LEVEL": "ERROR",
    # One process: no start-up of workers, and nothing between the clock and the engine.
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
    # Left alone, vLLM sets a core aside without a connector and none with one, which would flatter lmkv.
    "VLLM_CPU_NUM_OF_RESERVED_CPU": "0",
}

Progress = Callable[[str], None]


@frozen(kw_only=True)
class Plan:
    """What to run. `connector=None` measures vLLM's own prefix cache, given room for every prompt.

    `options`: settings of lmkv that matter more than the plan's own.
    """

    tokens: int = field(default=8000, validator=validators.ge(2 * CHUNK_TOKENS))
    model: SmallModel = field(factory=SmallModel)
    connector: str | None = CONNECTOR
    options: Mapping[str, Any] = field(factory=dict)

    @property
    def max_tokens(self) -> int:
        return self.tokens + ANSWER_TOKENS

    @property
    def kv_bytes(self) -> int:
        """vLLM's KV space: little more than one prompt, so that the others drive it out."""
        prompts = KV_ROOM if self.connector else KV_ROOM * (PROMPTS + 1)
        blocks = int(self.max_tokens * prompts) // LARGEST_BLOCK + 2
        return blocks * LARGEST_BLOCK * self.model.kv_bytes_per_token

    @property
    def settings(self) -> dict[str, Any]:
        """lmkv's settings: host memory with room for every prompt; eviction is not what is measured."""
        prompts_gb = self.max_tokens * self.model.kv_bytes_per_token * (PROMPTS + 1) / 2**30
        ram = {"chunk_size": CHUNK_TOKENS, "local_cpu": True, "max_local_cpu_size": KV_ROOM * prompts_gb}
        return ram | dict(self.options)

    @property
    def reachable_hit(self) -> int:
        """The last token is always computed, and hits are whole chunks."""
        return (self.tokens - 1) // CHUNK_TOKENS * CHUNK_TOKENS

    @property
    def expected_hit(self) -> float:
        return min(0.98 * (self.tokens - 1), self.reachable_hit)

    def prompt(self, number: int) -> list[int]:
        """Prompts 0 to PROMPTS - 1 are measured; higher numbers warm the engine up."""
        return random.Random(number).choices(range(self.model.vocab), k=self.tokens)


@frozen(kw_only=True)
class Answer:
    """One request: what came out, how soon, and what did not have to be computed.

    `sources`: tokens that were loaded, by the tier that had them.
    """

    token_ids: tuple[int, ...]
    ttft_s: float
    hit_tokens: int
    load_gb_s: float | None
    sources: Mapping[str, int]


@frozen(kw_only=True)
class Machine:
    """What a figure was measured on."""

    engine: str
    device: str


@frozen(kw_only=True)
class Measurement:
    prompt_tokens: int
    hit_tokens: int
    cold_ttft_s: float
    warm_ttft_s: float
    speedup: float
    outputs_equal: bool
    load_gb_s: float | None
    engine: str
    device: str
    layers: int
    dtype: str
    hit_as_expected: bool

    @property
    def passed(self) -> bool:
        return self.hit_as_expected and self.outputs_equal

    def as_dict(self) -> dict[str, Any]:
        return asdict(self)


def measure(plan: Plan, folder: Path, say: Progress = print) -> Measurement:
    """Run `plan` with a model written into `folder`, which is made if missing."""
    prepare_environment()
    say("writing a small model with random weights")
    plan.model.write(folder)
    say("starting vLLM")
    with running_engine(plan, folder) as llm:
        return run_prompts(plan, llm, say)


def prepare_environment() -> None:
    """Offline, quiet and in one process, unless the caller's environment says otherwise."""
    for name, value in ENVIRONMENT.items():
        os.environ.setdefault(name, value)


@contextmanager
def running_engine(plan: Plan, folder: Path) -> Iterator[LLM]:
    from vllm import LLM

    llm = LLM(
        model=str(folder),
        skip_tokenizer_init=True,
        dtype=plan.model.dtype,
        max_model_len=plan.max_tokens,
        kv_cache_memory_bytes=plan.kv_bytes,
        enable_prefix_caching=True,
        enforce_eager=True,
        disable_log_stats=False,
        kv_transfer_config=transfer_config(plan),
    )
    try:
        yield llm
    finally:
        llm.llm_engine.engine_core.shutdown()


def describe_machine() -> Machine:
    """To be called where vLLM runs."""
    import torch
    import vllm

    device = torch.cuda.get_device_name() if torch.cuda.is_available() else "cpu"
    return Machine(engine=f"vllm {vllm.__version__}", device=device)


def transfer_config(plan: Plan) -> Any:
    if plan.connector is None:
        return None
    from vllm.config import KVTransferConfig

    installed = entry_points(group="vllm.general_plugins", name="lmkv")
    return KVTransferConfig(
        kv_connector=plan.connector,
        kv_role="kv_both",
        kv_load_failure_policy="recompute",
        kv_connector_extra_config=plan.settings,
        kv_connector_module_path=None if installed else CONNECTOR_MODULE,
    )


def run_prompts(plan: Plan, llm: LLM, say: Progress) -> Measurement:
    def send(number: int) -> Answer:
        return ask(llm, plan.prompt(number))

    # As long as the others: what the first long prompt alone pays (buffers, kernels) would flatter lmkv.
    say(f"warm-up: {plan.tokens:,} tokens")
    send(PROMPTS)
    cold = ask_in_turn("cold", plan, send, say)
    return compare(plan, cold, ask_in_turn("warm", plan, send, say))


def ask_in_turn(how: str, plan: Plan, send: Callable[[int], Answer], say: Progress) -> list[Answer]:
    answers = []
    for number in range(PROMPTS):
        say(f"{how}: prompt {number + 1} of {PROMPTS}, {plan.tokens:,} tokens")
        answers.append(send(number))
    return answers


def ask(llm: LLM, prompt: list[int]) -> Answer:
    """Send one prompt alone.

    The time to the first token is vLLM's own figure, from the request's arrival to the token's, so that the
    tokens generated after it for the comparison of outputs cost nothing.
    """
    from vllm import SamplingParams

    params = SamplingParams(
        temperature=0,
        max_tokens=ANSWER_TOKENS,
        ignore_eos=True,
        detokenize=False,
        extra_args={"kv_transfer_params": {"lmkv.report": True}},
    )
    [output] = llm.generate({"prompt_token_ids": prompt}, params, use_tqdm=False)
    with_connector = llm.llm_engine.vllm_config.kv_transfer_config is not None
    report = (output.kv_transfer_params or {}).get("lmkv", {})
    load_seconds = report.get("load_seconds", 0.0)
    return Answer(
        token_ids=tuple(output.outputs[0].token_ids),
        ttft_s=output.metrics.first_token_latency,
        # `num_cached_tokens` alone would count what vLLM's own prefix cache still held.
        hit_tokens=report.get("hit_tokens", 0) if with_connector else output.num_cached_tokens,
        load_gb_s=report["load_bytes"] / load_seconds / 1e9 if load_seconds else None,
        sources=report.get("sources", {}),
    )


def compare(plan: Plan, cold: list[Answer], warm: list[Answer]) -> Measurement:
    """The best of times, cold as warm, since a disturbance only ever adds; the worst of everything else."""
    cold_ttft_s, warm_ttft_s = fastest(cold), fastest(warm)
    hit_tokens = min(answer.hit_tokens for answer in warm)
    rates = [answer.load_gb_s for answer in warm if answer.load_gb_s is not None]
    return Measurement(
        prompt_tokens=plan.tokens,
        hit_tokens=hit_tokens,
        cold_ttft_s=cold_ttft_s,
        warm_ttft_s=warm_ttft_s,
        speedup=cold_ttft_s / warm_ttft_s,
        outputs_equal=same_outputs(cold, warm),
        load_gb_s=max(rates, default=None),
        layers=plan.model.layers,
        dtype=plan.model.dtype,
        hit_as_expected=hit_tokens >= plan.expected_hit,
        **asdict(describe_machine()),
    )


def fastest(answers: Iterable[Answer]) -> float:
    return min(answer.ttft_s for answer in answers)


def same_outputs(*runs: Sequence[Answer]) -> bool:
    """Whether every run answered every prompt alike."""
    return len({tuple(answer.token_ids for answer in run) for run in runs}) == 1
