"""Conversations with a model that has recurrent layers: the hit and the first token of each turn, and the kept bytes.

    python -m benchmarks.recurrent [--conversations 3] [--turns 6] [--interval 0] [--quick]
    python -m benchmarks.recurrent --edits [--conversations 3] [--turns 6] [--quick]

The model is a small Nemotron-H in float32 on vLLM's CPU build. Each conversation runs three times, each time with a
separate salt: with vLLM's own prefix cache alone, with lmkv alone (vLLM's cache is emptied before each turn), and
without any cache. `--interval`: lmkv's `state_interval`.

`--edits`: conversations about a long document with lmkv alone, in steps of a chunk. Every second turn changes a part of
the earlier conversation. The rows show the hits and the kept bytes for several values of `state_interval`. They are
counts, which are the same on any machine.
"""

from __future__ import annotations

import argparse
import random
import statistics
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from attrs import define, field

from benchmarks.rounds import Row, arguments, compared, finish
from tests.vllm import mamba_cpu
from tests.vllm.families import MAX_POSITION, Family, nemotron_h
from tests.vllm.harness import Engine, engine, external_hits

QUESTION, ANSWER = 330, 60
OWN, LMKV, NONE = "vLLM's own cache", "lmkv alone", "neither"
PARAMS: dict[str, dict[str, Any]] = {
    OWN: {"lmkv.skip_load": True, "lmkv.skip_save": True},
    LMKV: {},
    NONE: {"lmkv.skip_load": True, "lmkv.skip_save": True},
}
SIZES = {
    "hidden_size": 512,
    "intermediate_size": 1024,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "head_dim": 64,
    "hybrid_override_pattern": "M-M*" * 3,
    "num_hidden_layers": 12,
    "mamba_num_heads": 16,
    "mamba_head_dim": 64,
    "ssm_state_size": 32,
}


@define
class Arm:
    """The figures of each turn except the first: seconds to the first token, tokens of the hit, and tokens of the
    turn before.
    """

    seconds: list[float] = field(factory=list)
    hits: list[int] = field(factory=list)
    before: list[int] = field(factory=list)


def converse(running: Engine, arm: str, number: int, turns: int, into: Arm) -> list[list[int]]:
    """Run one conversation, and return its answers."""
    rng, history, answers = random.Random(number), [], []
    for turn in range(turns):
        history += [rng.randrange(5, 1000) for _ in range(QUESTION)]
        salt = f"{arm} {number} {turn if arm == NONE else ''}"
        if arm != OWN:
            running.forget_local()
        started = time.perf_counter()
        (output,) = running.run([history], max_tokens=1, salts=[salt], params=PARAMS[arm])
        seconds = time.perf_counter() - started
        if turn:
            into.seconds.append(seconds)
            into.hits.append(external_hits(output) if arm == LMKV else output.num_cached_tokens)
            into.before.append(len(history) - QUESTION)
        (whole,) = running.run([history], max_tokens=ANSWER, salts=[salt], params=PARAMS[arm])
        answers.append(list(whole.outputs[0].token_ids))
        history += answers[-1]
    return answers


DOCUMENT, STEP = 1500, 64
INTERVALS = (1, 0, 4, 8, 16, 10_000)


def edit(running: Engine, number: int, turns: int) -> tuple[int, int]:
    """Run one conversation with edits. Return the tokens of its later turns that were hit, and the tokens that each
    turn shares with an earlier turn.
    """
    rng, seen, hits, shared = random.Random(number), list[list[int]](), 0, 0
    history = [rng.randrange(5, 1000) for _ in range(DOCUMENT)]
    for turn in range(turns):
        if turn and turn % 2 == 0:
            history = history[: rng.randrange(DOCUMENT // 2, len(history))]
        history = history + [rng.randrange(5, 1000) for _ in range(QUESTION)]
        running.forget_local()
        (output,) = running.run([history], max_tokens=ANSWER, salts=[str(number)])
        if turn:
            hits += external_hits(output)
            shared += max(common(history, other) for other in seen)
        history = history + list(output.outputs[0].token_ids)
        seen.append(history)
    return hits, shared


def common(one: list[int], other: list[int]) -> int:
    """Return the number of tokens at the beginning that both lists have in common."""
    return next((at for at, pair in enumerate(zip(one, other, strict=False)) if pair[0] != pair[1]), len(other))


def compare_intervals(conversations: int, turns: int) -> Iterator[Row]:
    with tempfile.TemporaryDirectory(prefix="lmkv-recurrent-") as folder, mamba_cpu.exported():
        model = Family(nemotron_h).write(Path(folder) / "model")
        room = {"max_model_len": MAX_POSITION, "max_num_batched_tokens": STEP, "kv_cache_memory_bytes": 64 << 20}
        for interval in INTERVALS:
            extra = {"max_local_cpu_size": 0.25, "load_or_recompute": False, "state_interval": interval}
            with engine(model, extra=extra, **room) as running:
                found = [edit(running, number, turns) for number in range(conversations)]
                running.run([[9] * 9])
                stats = running.store.stats().primary
            name, shared = f"state_interval {interval}", sum(shared for _, shared in found)
            yield Row(f"of what was said before hit, {name}", sum(hits for hits, _ in found) / shared, "")
            yield Row(f"slots of states for one of KV, {name}", stats.states / stats.chunks, "")


def conversations(options: argparse.Namespace) -> Iterator[Row]:
    arms = {name: Arm() for name in (OWN, LMKV, NONE)}
    with tempfile.TemporaryDirectory(prefix="lmkv-recurrent-") as folder, mamba_cpu.exported():
        model = Family(lambda: nemotron_h(**SIZES)).write(Path(folder) / "model")
        extra = {"max_local_cpu_size": 1.0, "load_or_recompute": False, "state_interval": options.interval}
        room = {"max_model_len": MAX_POSITION, "max_num_batched_tokens": 1024, "kv_cache_memory_bytes": 512 << 20}
        with engine(model, extra=extra, **room) as running:
            running.run([[7] * 700], max_tokens=2)
            before = running.store.stats().primary
            for number in range(options.conversations):
                answers = [converse(running, name, number, options.turns, arm) for name, arm in arms.items()]
                assert answers[0] == answers[1] == answers[2], "the outputs differ"
            running.run([[9] * 9])
            after, slot = running.store.stats().primary, running.connector.sides.model.layout.slot_bytes
            yield Row("tokens of a chunk", running.connector.sides.model.block_map.chunk_size, "tokens")
    yield from compared("first token of a later turn", "s", {name: arm.seconds for name, arm in arms.items()}, OWN)
    for name, arm in arms.items():
        left = [of - hit for of, hit in zip(arm.before, arm.hits, strict=True)]
        yield Row(f"of the turns before not hit, {name}", statistics.median(left), "tokens")
        share = sum(arm.hits) / sum(of + QUESTION for of in arm.before)
        yield Row(f"share of a later turn's prompt hit, {name}", share, "")
    for what, count in (("KV", after.chunks - before.chunks), ("states", after.states - before.states)):
        yield Row(f"{what} kept for a conversation", count * slot / options.conversations / 2**20, "MiB")


def main() -> int:
    parser = arguments(__doc__, quick="one conversation of three turns")
    parser.add_argument("--conversations", type=int, default=3)
    parser.add_argument("--turns", type=int, default=6)
    parser.add_argument("--interval", type=int, default=0)
    parser.add_argument("--edits", action="store_true")
    options = parser.parse_args()
    if options.quick:
        options.conversations, options.turns = 1, 3
    found = compare_intervals(options.conversations, options.turns) if options.edits else conversations(options)
    return finish(found, options)


if __name__ == "__main__":
    sys.exit(main())
