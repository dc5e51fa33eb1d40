"""The gain and the cost of storing generated tokens, for chats and agents whose templates keep or strip thinking.

    python benchmarks/decoded.py [--users 6] [--turns 5] [--quick] [--json]

Each user sends a prompt, waits for the answer, and sends it all again with a question or a tool's result behind it;
a template that strips thinking leaves the first part of each answer out. vLLM's KV space takes a third of the
conversations, and its own prefix cache is on. lmkv stores prompts only, or generated tokens too; each with host
memory for everything, and for a third of it. Beside it stands what a lazy store would write: the blocks that vLLM's
own cache evicts. All figures are counts: other programs that run do not change them.
"""

from __future__ import annotations

import sys
from pathlib import Path

# Not this folder: its copy.py would stand in for the standard library's.
sys.path[0] = str(Path(__file__).resolve().parents[1])

import argparse
import random
import tempfile
from contextlib import closing
from typing import Any

from attrs import frozen

from benchmarks._timing import Row, arguments_of, finish
from lmkv.cli.measure.process import ChildProcess, Questions
from lmkv.cli.measure.small_model import SmallModel
from lmkv.cli.measure.vllm_engines import ONE_PROCESS, VOCABULARY, EngineSpec, leave, open_engine

CHUNK = 128
"""Tokens: as many as a block of vLLM's has on CPUs."""
SHARES = {"ample": 1.2, "a third": 0.33}


@frozen
class Workload:
    """Tokens of each turn. `stripped`: whether the next prompt has none of the thinking."""

    question: int
    thinking: int
    answer: int
    stripped: bool = False

    def tokens(self, turns: int) -> int:
        """Tokens of the longest request."""
        return turns * (self.question + self.answer + (0 if self.stripped else self.thinking)) + self.thinking + 16


WORKLOADS = {
    "chat": Workload(200, 0, 300),
    "agent": Workload(600, 0, 80),
    "thinking agent, kept": Workload(600, 300, 80),
    "thinking agent, stripped": Workload(600, 300, 80, stripped=True),
}
PROMPTS, DECODED = "prompts", "decoded too"
ENGINES = (PROMPTS, DECODED)


def spec(workload: Workload, engine: str, share: str, users: int, turns: int) -> EngineSpec:
    longest = workload.tokens(turns)
    model = SmallModel(layers=2, hidden=128, max_position=max(32_768, 2 * longest))
    everything = users * longest * model.kv_bytes_per_token
    settings: dict[str, Any] = {"max_local_cpu_size": SHARES[share] * everything / 2**30, "chunk_size": CHUNK}
    settings |= {"save_decode_cache": engine == DECODED, "load_or_recompute": False}
    return EngineSpec(
        model=model,
        max_tokens=longest,
        kv_bytes=max(everything // 3, (longest + 1024) * model.kv_bytes_per_token),
        prefix_caching=True,
        settings=settings,
    )


def run_engine(workload: Workload, engine: str, share: str, users: int, turns: int, folder: Path) -> None:
    """In the child: all conversations at once, each turn as soon as the one before is answered."""
    questions = Questions()  # before vLLM prints anything
    from vllm import SamplingParams

    made = spec(workload, engine, share, users, turns)
    llm = open_engine(made, folder)
    core = llm.llm_engine
    evicted = evictions(core.engine_core.engine_core.scheduler.kv_cache_manager.block_pool)
    length = workload.thinking + workload.answer
    params = SamplingParams(temperature=0, max_tokens=length, ignore_eos=True, detokenize=False)

    def run() -> dict[str, Any]:
        talks: list[list[int]] = [[] for _ in range(users)]
        turn = [0] * users
        cached = asked = 0

        def send(user: int) -> None:
            nonlocal asked
            talks[user] += random.Random(user * 1000 + turn[user]).choices(range(VOCABULARY), k=workload.question)
            asked += len(talks[user])
            core.add_request(f"{user}-{turn[user]}", {"prompt_token_ids": list(talks[user])}, params)

        for user in range(users):
            send(user)
        while core.has_unfinished_requests():
            for output in core.step():
                if output.finished:
                    user = int(output.request_id.split("-")[0])
                    cached += output.num_cached_tokens or 0
                    talks[user] += output.outputs[0].token_ids[workload.thinking if workload.stripped else 0 :]
                    turn[user] += 1
                    if turn[user] < turns:
                        send(user)
        page = core.vllm_config.cache_config.block_size * made.model.kv_bytes_per_token
        lazy = len(evicted) * page
        return {"asked": asked, "cached": cached, "stored": stored_bytes(llm, made.model), "lazy": lazy}

    for _ in questions:
        questions.answer(run())
    leave(llm)


def evictions(block_pool: Any) -> set[Any]:
    """The hashes of the blocks that vLLM's own cache evicts from now on."""
    found: set[Any] = set()
    evict = block_pool._maybe_evict_cached_block

    def noted(block: Any, *more: Any) -> Any:
        found.update([block.block_hash] if block.block_hash is not None else ())
        return evict(block, *more)

    block_pool._maybe_evict_cached_block = noted
    return found


def stored_bytes(llm: Any, model: Any) -> int:
    """Bytes that were copied into host memory, evicted ones included."""
    stats = llm.llm_engine.engine_core.engine_core.scheduler.connector._scheduler.store.stats()
    return int((stats.primary.chunks + stats.primary.evictions) * CHUNK * model.kv_bytes_per_token)


def measured(name: str, engine: str, share: str, options: argparse.Namespace, root: Path) -> dict[str, Any]:
    folder = root / str(abs(hash((name, engine, share))))
    command = [sys.executable, __file__, "--arm", name, engine, share, "--folder", str(folder)]
    command += ["--users", str(options.users), "--turns", str(options.turns)]
    with closing(ChildProcess(command, folder, ONE_PROCESS)) as child:
        found: dict[str, Any] = child.ask(0, 1800.0)
        child.leave()
    return found


def main() -> int:
    parser = arguments_of(__doc__, quick="two workloads, two users, two turns")
    parser.add_argument("--users", type=int, default=6)
    parser.add_argument("--turns", type=int, default=5)
    parser.add_argument("--arm", nargs=3, help=argparse.SUPPRESS)
    parser.add_argument("--folder", type=Path, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.quick:
        options.users = options.turns = 2
    if options.arm:
        name, engine, share = options.arm
        run_engine(WORKLOADS[name], engine, share, options.users, options.turns, options.folder)
    rows = []
    with tempfile.TemporaryDirectory(prefix="lmkv-decoded-") as folder:
        for name in list(WORKLOADS)[: 2 if options.quick else None]:
            for share in SHARES:
                for engine in ENGINES:
                    found = measured(name, engine, share, options, Path(folder))
                    if engine == PROMPTS:
                        first = found
                    title = f"{name}, {share} room, {engine}"
                    print(f"{title}: {found}", file=sys.stderr, flush=True)
                    hit = found["cached"] / found["asked"]
                    rows.append(Row(f"{title}: prompt tokens not computed", hit, "of all"))
                    of = None if found is first else PROMPTS
                    rows.append(
                        Row(
                            f"{title}: stored",
                            found["stored"] / 2**20,
                            "MiB",
                            of,
                            of and found["stored"] / first["stored"],
                        )
                    )
                rows.append(Row(f"{name}, {share} room: evicted from the device", found["lazy"] / 2**20, "MiB"))
    return finish(rows, options.json)


if __name__ == "__main__":
    sys.exit(main())
