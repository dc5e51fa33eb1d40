"""Users who talk for several turns with one engine whose KV space is too small for all of them.

    python benchmarks/multiturn.py [--users 8] [--turns 10] [--quick] [--json] [--picture docs/multiturn.svg]
    python benchmarks/multiturn.py --drawn-from turns.json --picture docs/multiturn.svg

Each user sends a prompt, waits for the answer, and sends it all again with the next question behind it.
vLLM's own prefix cache is on in every engine: it forgets a user's KV while the others are served. The engines
run one after the other, each in a process of its own: vLLM alone, with lmkv in host memory, and with that and a
disk, host memory then being too small for all conversations as well. In float32: all outputs must be equal.
The picture needs matplotlib (`pip install "lmkv[plot]"`).
"""

from __future__ import annotations

import sys
from pathlib import Path

# Not this folder: its copy.py would stand in for the standard library's.
sys.path[0] = str(Path(__file__).resolve().parents[1])

import argparse
import json
import random
import statistics
import tempfile
import time
from contextlib import closing
from typing import Any

from attrs import frozen

from benchmarks._timing import Row, arguments_of, finish, machine
from lmkv.cli.measure.process import ChildProcess, Questions
from lmkv.cli.measure.report import Comparison, draw
from lmkv.cli.measure.small_model import SmallModel
from lmkv.cli.measure.vllm_engines import ONE_PROCESS, VOCABULARY, EngineSpec, leave, open_engine

QUESTION, ANSWER = 400, 24
"""Tokens that a turn adds to a conversation."""
IN_SPACE = 2.5
"""Conversations of full length that vLLM's KV space takes."""
TITLE = "Conversations"
ALONE, RAM, DISK = "vLLM alone", "lmkv, RAM", "lmkv, RAM and disk"


@frozen
class Load:
    users: int
    turns: int

    @property
    def tokens(self) -> int:
        """Tokens of the longest conversation."""
        return self.turns * (QUESTION + ANSWER)

    def question(self, user: int, turn: int) -> list[int]:
        return random.Random(user * 1000 + turn).choices(range(VOCABULARY), k=QUESTION)


def specs(load: Load, folder: Path) -> dict[str, EngineSpec]:
    model = SmallModel(layers=8, hidden=512, max_position=max(32_768, 2 * load.tokens))
    conversation = (load.tokens + 256) * model.kv_bytes_per_token
    everything = 1.2 * load.users * conversation / 2**30

    def spec(**settings: Any) -> EngineSpec:
        return EngineSpec(
            model=model,
            max_tokens=load.tokens + 16,
            kv_bytes=int(IN_SPACE * conversation),
            prefix_caching=True,
            settings=settings or None,
        )

    return {
        ALONE: spec(),
        RAM: spec(max_local_cpu_size=everything),
        DISK: spec(
            max_local_cpu_size=everything / 4,
            local_disk=str(folder / "kv"),
            max_local_disk_size=2 * everything,
            disk_min_free=0.0,
        ),
    }


def run_engine(load: Load, name: str, folder: Path) -> None:
    """In the child: all conversations at once, each turn as soon as the one before is answered."""
    questions = Questions()  # before vLLM prints anything
    from vllm import SamplingParams

    llm = open_engine(specs(load, folder)[name], folder)
    engine = llm.llm_engine
    params = SamplingParams(temperature=0, max_tokens=ANSWER, ignore_eos=True, detokenize=False)
    warm = {"prompt_token_ids": random.Random("no prompt of the load").choices(range(VOCABULARY), k=load.tokens)}
    llm.generate(warm, SamplingParams(max_tokens=1, detokenize=False), use_tqdm=False)

    def run() -> dict[str, Any]:
        talks: list[list[int]] = [[] for _ in range(load.users)]
        turns = [0] * load.users
        ttfts: list[float] = []
        cached = 0

        def send(user: int) -> None:
            talks[user] += load.question(user, turns[user])
            engine.add_request(f"{user}-{turns[user]}", {"prompt_token_ids": list(talks[user])}, params)

        started = time.perf_counter()
        for user in range(load.users):
            send(user)
        while engine.has_unfinished_requests():
            for output in engine.step():
                if not output.finished:
                    continue
                user = int(output.request_id.split("-")[0])
                talks[user] += output.outputs[0].token_ids
                ttfts.append(output.metrics.first_token_latency)
                cached += output.num_cached_tokens or 0
                turns[user] += 1
                if turns[user] < load.turns:
                    send(user)
        seconds = time.perf_counter() - started
        return {"seconds": seconds, "ttfts": ttfts, "cached": cached, "talks": talks}

    for _ in questions:
        questions.answer(run())
    leave(llm)


def measured(load: Load, name: str, root: Path) -> dict[str, Any]:
    folder = root / name.replace(" ", "-").replace(",", "")
    command = [sys.executable, __file__, "--engine", name, "--folder", str(folder)]
    command += ["--users", str(load.users), "--turns", str(load.turns)]
    with closing(ChildProcess(command, folder, ONE_PROCESS)) as child:
        found: dict[str, Any] = child.ask(0, 1800.0)
        child.leave()
    return found


def rows(load: Load, found: dict[str, dict[str, Any]]) -> list[Row]:
    made = []
    alone = found[ALONE]
    for name, one in found.items():
        mean, throughput = statistics.mean(one["ttfts"]), load.users * load.turns / one["seconds"]
        before, of = statistics.mean(alone["ttfts"]), None if name == ALONE else ALONE
        rate = load.users * load.turns / alone["seconds"]
        made += [
            Row(f"{name}: mean time to first token", mean, "s", of, of and mean / before),
            Row(f"{name}: throughput", throughput, "requests/s", of, of and throughput / rate),
            Row(f"{name}: prompt tokens not computed", one["cached"], "tokens"),
        ]
        if one["talks"] != alone["talks"]:
            raise SystemExit(f"{name}: its outputs differ from those of vLLM alone")
    return made


def comparisons(rows: list[Row]) -> list[Comparison]:
    """A chart for each thing that was measured, with a bar for each engine."""
    charts: dict[str, dict[str, float]] = {}
    units = {}
    for row in rows:
        engine, title = row.name.split(": ")
        charts.setdefault(title, {})[engine] = row.value
        units[title] = row.unit
    return [Comparison(title.capitalize(), units[title], bars, ALONE) for title, bars in charts.items()]


def draw_earlier(file: Path, picture: Path) -> int:
    """Draw an earlier run from the last line that it printed with --json."""
    found = json.loads(file.read_text().splitlines()[-1])
    draw(comparisons([Row(**row) for row in found["rows"]]), found["machine"], picture, title=TITLE)
    return 0


def main() -> int:
    parser = arguments_of(__doc__, quick="three users, three turns")
    parser.add_argument("--users", type=int, default=8)
    parser.add_argument("--turns", type=int, default=10)
    parser.add_argument("--picture", type=Path, help="where to draw the comparison, as SVG or PNG")
    parser.add_argument("--drawn-from", type=Path, help="what an earlier run printed with --json; measures nothing")
    parser.add_argument("--engine", help=argparse.SUPPRESS)
    parser.add_argument("--folder", type=Path, help=argparse.SUPPRESS)
    options = parser.parse_args()
    load = Load(3, 3) if options.quick else Load(options.users, options.turns)
    if options.drawn_from and not options.picture:
        parser.error("--drawn-from needs --picture")
    if options.engine:
        run_engine(load, options.engine, options.folder)
    if options.drawn_from:
        return draw_earlier(options.drawn_from, options.picture)
    with tempfile.TemporaryDirectory(prefix="lmkv-turns-") as folder:
        found = {name: measured(load, name, Path(folder)) for name in (ALONE, RAM, DISK)}
    result = rows(load, found)
    if options.picture:
        draw(comparisons(result), machine(), options.picture, title=TITLE)
    return finish(result, options.json)


if __name__ == "__main__":
    sys.exit(main())
