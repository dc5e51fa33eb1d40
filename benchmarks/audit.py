"""Audits of hits: how far honest runs deviate, which faults are found, and after how many hits.

    python -m benchmarks.audit honest [--family "GQA, Qwen3"] [--dtype float32] [--hits 10000] [--batch 16] [--loads]
    python -m benchmarks.audit faults [--family "GQA, Qwen3"] [--dtype float32] [--ranks 2] [--trials 20] [--block 128]
    python -m benchmarks.audit delay [--trials 1000]

`honest`: real vLLM runs a tiny model with random weights on CPUs, and every hit is audited. Prompts are stored by
prefills in one step and in several steps, alone and in batches, and by decoding. They are asked again in other batches
and steps. The rows show the largest deviations and the false alarms. With `--loads` every second hit is loaded, and
read back.

`faults`: the same engine. Each trial stores prompts, changes the stored bytes as one kind of fault does, and asks the
prompts again.

`delay`: no vLLM. One of a given number of hits is wrong, and lmkv's sampler draws hits until it draws a wrong hit.
"""

from __future__ import annotations

import argparse
import logging
import os
import random
import statistics
import sys
import tempfile
import time
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from attrs import define, field

from benchmarks.rounds import Row, arguments, finish, percentile
from lmkv.chunks.hashing import state_keys
from lmkv.memory.comparison import TOLERANCE, Comparison, Part
from lmkv.vllm.scheduler.audit import Sampler
from lmkv.vllm.scheduler.telemetry import Telemetry
from tests.vllm.families import _SMALL, FAMILIES, RECURRENT, Family, qwen3
from tests.vllm.harness import Engine, engine, prompt

CHUNK = 32
WIDE = {
    "hidden_size": 1024,
    "intermediate_size": 2816,
    "num_attention_heads": 16,
    "num_key_value_heads": 4,
    "head_dim": 64,
    "num_hidden_layers": 12,
}


def qwen2() -> Any:
    """Return a model with keys whose mean, in the first and the last layer, is far larger than their differences
    between tokens.
    """
    from transformers import Qwen2Config, Qwen2ForCausalLM

    model = Qwen2ForCausalLM(Qwen2Config(**_SMALL))
    for layer in (model.model.layers[0], model.model.layers[-1]):
        bias = layer.self_attn.k_proj.bias
        bias.data = 40 * torch.randn(bias.shape, generator=torch.Generator().manual_seed(1))
    return model


MODELS = {
    **FAMILIES,
    **RECURRENT,
    "GQA, Qwen3, 1,024 wide, 12 layers": Family(lambda: qwen3(**WIDE), own=12),
    "GQA, Qwen2, keys with a large mean": Family(qwen2),
}


class Forgets(dict[Any, Any]):
    """A mapping that stores nothing, so that lmkv audits every hit, even if the hit was audited before."""

    def __setitem__(self, key: Any, value: Any) -> None:
        pass


@define
class Seen:
    """The number of hits, chunks and states that audits compared, and the largest deviation by type of number."""

    counts: Counter[str] = field(factory=Counter)
    worst: dict[str, float] = field(factory=lambda: defaultdict(float))


@contextmanager
def watching() -> Iterator[Seen]:
    """Provide a `Seen` that notes every comparison of an audit and the outcome."""
    seen = Seen()
    measure, audited, compared = Comparison.measure, Telemetry.audited, Telemetry.compared
    audited_load = Telemetry.audited_load

    def measured(self: Comparison, part: Part, copy: Any, stored: int) -> torch.Tensor | None:
        found = measure(self, part, copy, stored)
        kind = "states" if self._layout.layers[part.plane].state else "KV"
        name = f"{kind}, {str(part.dtype).removeprefix('torch.')}"
        seen.worst[name] = max(seen.worst[name], 0.0 if found is None else float(found.max()))
        return found

    def counted(self: Telemetry, tokens: int, seconds: float) -> None:
        seen.counts["hits"] += 1
        audited(self, tokens, seconds)

    def loaded(self: Telemetry, *, wrong: bool, again: bool = False) -> None:
        seen.counts["loads, read again" if again else "loads"] += 1
        seen.counts["wrong loads"] += wrong
        audited_load(self, wrong=wrong, again=again)

    def ended(self: Telemetry, tiers: Any, wrong: Any, *, states: bool) -> None:
        seen.counts["states" if states else "chunks"] += len(tiers)
        seen.counts["wrong"] += len(wrong)
        compared(self, tiers, wrong, states=states)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Comparison, "measure", measured)
        patch.setattr(Telemetry, "audited", counted)
        patch.setattr(Telemetry, "compared", ended)
        patch.setattr(Telemetry, "audited_load", loaded)
        yield seen


@contextmanager
def served(
    family: Family, folder: Path, rate: float = 1.0, chunk: int = CHUNK, *, loads: bool = False, **options: Any
) -> Iterator[Engine]:
    settings = {
        "max_model_len": 1024 if family.unit < 500 else 2048,
        "max_num_batched_tokens": 256 if not family.unit else max(256, family.unit),
        "max_num_seqs": 16,
        "num_gpu_blocks_override": max(family.blocks, 400 if family.unit < 500 else 60),
        "block_size": chunk,
        "extra": {"chunk_size": chunk, "audit_rate": rate, "max_local_cpu_size": 0.5},
        **family.options,
        **options,
    }
    with family.vllm(), engine(folder, **settings) as running:
        if not loads:
            running.connector.sides.scheduler.audit._computed = Forgets()
        yield running


def ask(running: Engine, prompts: list[list[int]], max_tokens: int = 1) -> list[list[int]]:
    running.forget_local()
    answers = running.ids(prompts, max_tokens=max_tokens)
    while running.connector.sides.scheduler.busy:
        # As an engine core in a process of its own: until every comparison is reported.
        running.llm.llm_engine.step()
    return answers


def shuffled(rng: random.Random, running: Engine, prompts: list[list[int]], most: int) -> None:
    """Ask the prompts again, in another order and in batches of other sizes. `most`: largest number of prompts in a
    batch.
    """
    rng.shuffle(prompts)
    while prompts:
        count = min(most, rng.choice([1, 3, 16]))
        ask(running, prompts[:count])
        del prompts[:count]


def honest(args: argparse.Namespace) -> Iterator[Row]:
    family = MODELS[args.family]
    rng, ends = random.Random(args.seed), time.monotonic() + args.seconds
    unit = max(CHUNK, family.unit)
    dtype = {} if args.dtype is None else {"dtype": args.dtype}
    with tempfile.TemporaryDirectory() as folder:
        written = family.write(Path(folder))
        with watching() as seen, served(family, written, loads=args.loads, **dtype) as running:
            number = args.seed * 1_000_000
            while seen.counts["hits"] < args.hits and time.monotonic() < ends:
                number += 1000
                lengths = [rng.randrange(unit + 2, max(300, 2 * unit)) for _ in range(48)]
                first = [prompt(number + n, length) for n, length in enumerate(lengths)]
                answers: list[list[int]] = []
                while len(answers) < len(first):
                    count = min(args.batch, rng.choice([1, 5, 16]))
                    batch = first[len(answers) : len(answers) + count]
                    answers += ask(running, batch, max_tokens=rng.choice([1, 1, 40]))
                turns = [
                    ids + answer + prompt(number + 500 + n, rng.randrange(1, 60))
                    for n, (ids, answer) in enumerate(zip(first, answers, strict=True))
                ]
                for asked in ([list(ids) for ids in first], turns, [ids[: -len(ids) // 3] for ids in first]):
                    shuffled(rng, running, list(asked), args.batch)
            running.assert_nothing_leaked()
    title = f"{args.family}, {args.dtype or 'as it is'}"
    for name in ("hits", "chunks", "states", "loads", "loads, read again", "wrong", "wrong loads"):
        yield Row(f"{title}: {name}", seen.counts[name], "")
    for name, worst in sorted(seen.worst.items()):
        limit = TOLERANCE.get(getattr(torch, name.rpartition(", ")[2], None))
        met = None if limit is None else worst <= limit
        yield Row(f"{title}: {name}: largest deviation", worst, "", target=limit, met=met)


# -- faults --------------------------------------------------------------------------------------------


def slot(running: Engine, key: bytes, rank: int | None = None) -> Any:
    """Return the stored bytes of a chunk or state: the part of one rank, or of all ranks if `rank` is None."""
    row = running.store.slab.array[running.store._primary.entries[key].slot]
    layout = running.connector.sides.model.layout
    return row if rank is None else row[rank * layout.rank_bytes : (rank + 1) * layout.rank_bytes]


def keys_of(running: Engine, tokens: list[int]) -> list[bytes]:
    found: list[bytes] = running.connector.sides.scheduler.keys_of(tokens, None, {})
    return found[: len(tokens) // running.connector.sides.model.block_map.chunk_size]


def other_request(running: Engine, mine: list[bytes], theirs: list[bytes], at: int) -> None:
    slot(running, mine[at])[:] = slot(running, theirs[at])


def shifted(running: Engine, mine: list[bytes], theirs: list[bytes], at: int) -> None:
    slot(running, mine[at])[:] = slot(running, mine[at + 1])


def stale(running: Engine, mine: list[bytes], theirs: list[bytes], at: int) -> None:
    """Replace the first layer's part of a chunk by another prompt's KV, as if the slot had kept these bytes."""
    offset, nbytes = running.connector.sides.model.layout.span(0, 0)
    slot(running, mine[at])[offset : offset + nbytes] = slot(running, theirs[at])[offset : offset + nbytes]


def one_rank(running: Engine, mine: list[bytes], theirs: list[bytes], at: int) -> None:
    slot(running, mine[at], 1)[:] = slot(running, theirs[at], 1)


def state_alone(running: Engine, mine: list[bytes], theirs: list[bytes], at: int) -> None:
    """Replace the last chunk's KV before a state by the KV of another prompt. The state itself stays right."""
    slot(running, mine[-1])[:] = slot(running, theirs[-1])


def wrong_state(running: Engine, mine: list[bytes], theirs: list[bytes], at: int) -> None:
    """Replace the states after the last chunk by states of another prompt. The KV stays right."""
    count = running.connector.sides.model.block_map.states
    for own, other in zip(state_keys(mine[-1], count), state_keys(theirs[-1], count), strict=True):
        slot(running, own)[:] = slot(running, other)


def last_token(running: Engine, mine: list[bytes], theirs: list[bytes], at: int) -> None:
    """Replace the first chunk by a chunk that was computed with another last token."""
    slot(running, mine[0])[:] = slot(running, theirs[0])


Fault = Callable[[Engine, list[bytes], list[bytes], int], None]

KINDS: dict[str, Fault] = {
    "pages of another request": other_request,
    "a shifted chunk": shifted,
    "a stale slot: one layer of it": stale,
    "the last token of a chunk": last_token,
}
STATES: dict[str, Fault] = {"a state without its KV": state_alone, "KV without its state": wrong_state}


def trials(running: Engine, kind: str, make: Fault, seen: Seen, count: int, length: int, seed: int) -> Row:
    """Count in how many of `count` trials an audit finds the fault that `make` makes. A trial has one fault, and one
    hit with this fault.
    """
    found = 0
    rng = random.Random(seed)
    for trial in range(count):
        mine, theirs = prompt(seed + 2 * trial, length), prompt(seed + 2 * trial + 1, length)
        if make is last_token:
            size = running.connector.sides.model.block_map.chunk_size
            theirs = [*mine[: size - 1], theirs[size - 1], *theirs[size:]]
        ask(running, [mine])
        ask(running, [theirs])
        keys, others = keys_of(running, mine), keys_of(running, theirs)
        make(running, keys, others, rng.randrange(len(keys) - 1) if len(keys) > 1 else 0)
        before = seen.counts["wrong"]
        ask(running, [mine])
        found += seen.counts["wrong"] > before
    return Row(f"found of {count}: {kind}", found, "")


def other_weights(running: Engine, seen: Seen, count: int, noise: float, seed: int) -> Row:
    """Count how many audits find KV of other weights. `noise`: share by which the weights differ."""

    def change(model: Any) -> None:
        generator = torch.Generator().manual_seed(seed)
        with torch.no_grad():
            for name, parameter in model.named_parameters():
                if "norm" in name:
                    parameter.mul_(1 + noise * torch.randn(parameter.shape, generator=generator).to(parameter.dtype))

    found = 0
    prompts = [prompt(seed + trial, 200) for trial in range(count)]
    for ids in prompts:
        ask(running, [ids])
    stored = [[slot(running, key).copy() for key in keys_of(running, ids)] for ids in prompts]
    running.llm.apply_model(change)
    for ids, chunks in zip(prompts, stored, strict=True):
        # Other weights have other keys: only a fault puts their KV there.
        ask(running, [ids])
        for key, data in zip(keys_of(running, ids), chunks, strict=True):
            slot(running, key)[:] = data
        before = seen.counts["wrong"]
        ask(running, [ids])
        found += seen.counts["wrong"] > before
    return Row(f"found of {count}: KV of other weights, norms {noise:g} apart", found, "")


def faults(args: argparse.Namespace) -> Iterator[Row]:
    os.environ.update(VLLM_ALLOW_INSECURE_SERIALIZATION="1")
    family, recurrent = MODELS[args.family], args.family in RECURRENT
    ranks: dict[str, Any] = {}
    if args.ranks == 2:
        ranks = {"tensor_parallel_size": 2, "distributed_executor_backend": "mp"}
        os.environ.update(VLLM_CPU_OMP_THREADS_BIND="0|1", GLOO_SOCKET_IFNAME="lo")
    kinds: dict[str, Fault] = STATES if recurrent else {"one rank's part": one_rank} if ranks else KINDS
    length = 2 * family.unit + 20 if recurrent else max(200, 2 * args.block + 20)
    options = {} if recurrent else {"chunk": args.block, "dtype": args.dtype, **ranks}
    with (
        tempfile.TemporaryDirectory() as folder,
        watching() as seen,
        served(family, family.write(Path(folder)), **options) as running,
    ):
        for kind, make in kinds.items():
            yield trials(running, kind, make, seen, args.trials, length, 10_000 + 1000 * len(kind))
        for number, noise in enumerate((0.001, 0.01, 0.1, 0.3) if kinds is KINDS else ()):
            yield other_weights(running, seen, args.trials, noise, 900_000 + 1000 * number)


# -- delay ---------------------------------------------------------------------------------------------


def delay(args: argparse.Namespace) -> Iterator[Row]:
    """Yield the number of hits until a fault is found, if one of a given number of hits is wrong. Every audit of a
    wrong hit finds the fault.
    """
    rng = random.Random(args.seed)
    for faults_in in (10, 100, 1000, 10_000):
        for rate in (1.0, 0.1, 0.01, 0.001):
            sampler, hits = Sampler(rate, rng.random), []
            for _ in range(args.trials):
                wrong = 1
                while not sampler():
                    wrong += 1
                # Between two wrong hits are as many honest ones as chance has it.
                hits.append(sum(int(rng.expovariate(1 / faults_in)) + 1 for _ in range(wrong)))
            title = f"one wrong hit in {faults_in:,}, audits of 1 in {1 / rate:,.0f}"
            yield Row(f"{title}: found after, median", statistics.median(hits), "hits")
            yield Row(f"{title}: of 95 in 100 within", percentile(hits, 0.95), "hits")


def main() -> int:
    parser = arguments(__doc__, quick="a hundredth of the hits, a tenth of the trials")
    parser.add_argument("what", choices=("honest", "faults", "delay"))
    parser.add_argument("--family", default="GQA, Qwen3")
    parser.add_argument("--dtype")
    for name, value in {"--hits": 10_000, "--batch": 16, "--ranks": 1, "--block": CHUNK, "--seed": 0}.items():
        parser.add_argument(name, type=int, default=value)
    parser.add_argument("--seconds", type=float, default=400)
    parser.add_argument("--trials", type=int, help="20 by default, 1000 of delay")
    parser.add_argument("--loads", action="store_true")
    options = parser.parse_args()
    options.trials = options.trials or (1000 if options.what == "delay" else 20)
    if options.quick:
        options.hits, options.trials = options.hits // 100, max(1, options.trials // 10)
    logging.getLogger("lmkv.vllm").setLevel(logging.CRITICAL)
    return finish({"honest": honest, "faults": faults, "delay": delay}[options.what](options), options)


if __name__ == "__main__":
    sys.exit(main())
