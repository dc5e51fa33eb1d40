"""Measures a hit on real vLLM: long prompts cold, and again once vLLM's own cache has evicted them."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import closing, contextmanager
from pathlib import Path
from typing import Any

from attrs import field, frozen, validators

from lmkv.cli.measure.small_model import SmallModel
from lmkv.cli.measure.vllm_engines import CONNECTOR, Answer, EngineProcess, EngineSpec, fastest

CHUNK_TOKENS = 256
ANSWER_TOKENS = 16
PROMPTS = 3
KV_ROOM = 1.1
"""vLLM's KV space in prompts: the two prompts between a prompt and its repetition evict all of it."""
LARGEST_BLOCK = 128
"""Tokens in a block of vLLM's KV space: 128 on a CPU, fewer on a GPU."""

Progress = Callable[[str], None]


@frozen(kw_only=True)
class Plan:
    """Parameters of a measurement. `connector=None` measures vLLM's own prefix cache, with KV space for every prompt.

    `options`: settings of lmkv, in place of the plan's own.
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
        """vLLM's KV space: little more than one prompt, so that each prompt evicts the one before it."""
        prompts = KV_ROOM if self.connector else KV_ROOM * (PROMPTS + 1)
        blocks = int(self.max_tokens * prompts) // LARGEST_BLOCK + 2
        return blocks * LARGEST_BLOCK * self.model.kv_bytes_per_token

    @property
    def settings(self) -> dict[str, Any]:
        """lmkv's settings: host memory for every prompt, so that lmkv evicts nothing."""
        prompts_gib = self.max_tokens * self.model.kv_bytes_per_token * (PROMPTS + 1) / 2**30
        ram = {"chunk_size": CHUNK_TOKENS, "local_cpu": True, "max_local_cpu_size": KV_ROOM * prompts_gib}
        return ram | dict(self.options)

    @property
    def spec(self) -> EngineSpec:
        return EngineSpec(
            model=self.model,
            max_tokens=self.max_tokens,
            kv_bytes=self.kv_bytes,
            prefix_caching=True,
            settings=self.settings if self.connector else None,
            connector=self.connector or CONNECTOR,
        )

    @property
    def expected_hit(self) -> float:
        """Tokens of a hit. The last token is always computed; another connector's hits may be whole chunks."""
        whole = (self.tokens - 1) // CHUNK_TOKENS * CHUNK_TOKENS
        return min(0.98 * (self.tokens - 1), whole) if self.connector else self.tokens - 1


@frozen(kw_only=True)
class Measurement:
    """`hit_tier`: where most of the hit was. `speedup`: of the last repetition over the cold prompts.

    `warm_ttft_s`: with the chunks in host memory. `disk_ttft_s`, `direct_io`: after a restart, from disk.
    `remote_ttft_s`: in another engine, from a remote store.
    """

    prompt_tokens: int
    hit_tokens: int
    hit_tier: str
    cold_ttft_s: float
    warm_ttft_s: float
    disk_ttft_s: float | None
    remote_ttft_s: float | None
    speedup: float
    outputs_equal: bool
    load_gb_s: float | None
    direct_io: bool | None
    engine: str
    device: str
    layers: int
    dtype: str
    hit_as_expected: bool

    @property
    def passed(self) -> bool:
        return self.hit_as_expected and self.outputs_equal


def measure_hit(plan: Plan, folder: Path, say: Progress = print) -> Measurement:
    """Run `plan`; the model and vLLM's log are written into `folder`."""
    with started(plan, folder, "starting vLLM on a small model with random weights", say) as engine:
        warm_up(engine, plan, PROMPTS, say)
        cold = ask_in_turn("cold", plan, engine, say)
        warm = ask_in_turn("warm", plan, engine, say)
        return summarize(plan, cold, warm, engine=engine.engine, device=engine.device)


@contextmanager
def started(plan: Plan, folder: Path, title: str, say: Progress) -> Iterator[EngineProcess]:
    """An engine that is ready to answer, ended afterwards."""
    say(title)
    with closing(EngineProcess(plan.spec, folder)) as engine:
        yield engine


def warm_up(engine: EngineProcess, plan: Plan, number: int, say: Progress) -> None:
    """Send another prompt first: costs of the first long one alone (buffers, kernels) would flatter lmkv."""
    say(f"warm-up: {plan.tokens:,} tokens")
    engine.send(number, plan.tokens)


def ask_in_turn(how: str, plan: Plan, engine: EngineProcess, say: Progress) -> list[Answer]:
    answers = []
    for number in range(PROMPTS):
        say(f"{how}: prompt {number + 1} of {PROMPTS}, {plan.tokens:,} tokens")
        answers.append(engine.send(number, plan.tokens, ANSWER_TOKENS))
    return answers


def summarize(
    plan: Plan,
    cold: Sequence[Answer],
    warm: Sequence[Answer],
    disk: Sequence[Answer] = (),
    remote: Sequence[Answer] = (),
    *,
    engine: str,
    device: str,
    direct_io: bool | None = None,
) -> Measurement:
    """The best of times, because disturbances only add to them; the worst of everything else."""
    repeated = disk or remote or warm
    cold_ttft_s, repeated_ttft_s = fastest(cold), fastest(repeated)
    hit_tokens = min(answer.hit_tokens for answer in repeated)
    counted = [answer.hit_tokens - (answer.sources.get("cpu", 0) if disk or remote else 0) for answer in repeated]
    return Measurement(
        prompt_tokens=plan.tokens,
        hit_tokens=hit_tokens,
        hit_tier=_main_tier(repeated) if hit_tokens else "none",
        cold_ttft_s=cold_ttft_s,
        warm_ttft_s=fastest(warm),
        disk_ttft_s=repeated_ttft_s if disk else None,
        remote_ttft_s=repeated_ttft_s if remote else None,
        speedup=cold_ttft_s / repeated_ttft_s,
        outputs_equal=same_outputs(cold, warm, repeated),
        load_gb_s=max((answer.load_gb_s for answer in repeated if answer.load_gb_s), default=None),
        direct_io=direct_io,
        engine=engine,
        device=device,
        layers=plan.model.layers,
        dtype=plan.model.dtype,
        hit_as_expected=min(hit_tokens, *counted) >= plan.expected_hit,
    )


def _main_tier(answers: Sequence[Answer]) -> str:
    tiers = Counter[str]()
    for answer in answers:
        tiers.update(answer.sources)
    return max(tiers, key=lambda tier: tiers[tier], default="vllm")


def same_outputs(*runs: Sequence[Answer]) -> bool:
    """Whether every run answered every prompt alike."""
    return len({tuple(answer.token_ids for answer in run) for run in runs}) == 1
