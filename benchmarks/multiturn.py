"""Users who talk for several turns with one engine whose KV space is too small for all of them.

    python benchmarks/multiturn.py [--users 8] [--turns 10] [--quick] [--json] [--picture docs/multiturn.svg]
    python benchmarks/multiturn.py --drawn-from turns.json --picture docs/multiturn.svg
    python benchmarks/multiturn.py --audits 20 [--rate 0.1] [--users 8] [--turns 10]

Each user sends a prompt, waits for the answer, and sends it all again with the next question behind it.
vLLM's own prefix cache is on in every engine: it forgets a user's KV while the others are served. The engines
run one after the other, each in a process of its own: vLLM alone, with lmkv in host memory, and with that and a
disk, host memory then being too small for all conversations as well. In float32: all outputs must be equal.
The picture needs matplotlib (`pip install "lmkv[plot]"`).

`--audits`: so many rounds, each with conversations of its own, of lmkv with and without audits, both in host memory.
Each audit costs the same whatever the rate is, so a higher rate shows the cost of a lower one, less its noise.
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

from benchmarks._timing import Row, arguments_of, finish, machine, turns
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
AUDITED = "lmkv, RAM, audited"
AUDIT_TARGET_RATE, AUDIT_TARGET = 0.01, 0.015
"""Share of the throughput that audits of so many hits may cost."""


@frozen
class Load:
    """`audits`: the share of hits that AUDITED audits."""

    users: int
    turns: int
    audits: float = 0.0

    @property
    def tokens(self) -> int:
        """Tokens of the longest conversation."""
        return self.turns * (QUESTION + ANSWER)

    def question(self, number: int, user: int, turn: int) -> list[int]:
        """Tokens of a user's question in the round of this number."""
        return random.Random((number * 1000 + user) * 1000 + turn).choices(range(VOCABULARY), k=QUESTION)


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
        AUDITED: spec(max_local_cpu_size=everything, audit_rate=load.audits),
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

    def run(number: int) -> dict[str, Any]:
        talks: list[list[int]] = [[] for _ in range(load.users)]
        done = [0] * load.users
        ttfts: list[float] = []
        cached = 0

        def send(user: int) -> None:
            talks[user] += load.question(number, user, done[user])
            engine.add_request(f"{user}-{done[user]}", {"prompt_token_ids": list(talks[user])}, params)

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
                done[user] += 1
                if done[user] < load.turns:
                    send(user)
        seconds = time.perf_counter() - started
        return {"seconds": seconds, "ttfts": ttfts, "cached": cached, "talks": talks}

    for number in questions:
        questions.answer(run(number))
    leave(llm)


def child_of(load: Load, name: str, root: Path) -> ChildProcess:
    folder = root / name.replace(" ", "-").replace(",", "")
    command = [sys.executable, __file__, "--engine", name, "--folder", str(folder)]
    command += ["--users", str(load.users), "--turns", str(load.turns), "--rate", str(load.audits)]
    return ChildProcess(command, folder, ONE_PROCESS)


def measured(load: Load, name: str, root: Path) -> dict[str, Any]:
    with closing(child_of(load, name, root)) as child:
        found: dict[str, Any] = child.ask(0, 1800.0)
        child.leave()
    return found


def audits(load: Load, rounds: int, root: Path) -> list[Row]:
    """Measure the cost of audits: both engines run in each round, in shuffled order."""
    with closing(child_of(load, RAM, root)) as plain, closing(child_of(load, AUDITED, root)) as audited:
        children = {RAM: plain, AUDITED: audited}
        found: dict[str, list[dict[str, Any]]] = {name: [] for name in children}
        for number, name in turns(children, rounds):
            found[name].append(children[name].ask(number))
        for child in children.values():
            child.leave()
    # The first conversations are those that warm the engines up.
    pairs = list(zip(found[RAM], found[AUDITED], strict=True))[1:]
    assert all(one["talks"] == other["talks"] for one, other in pairs), "answers differ"
    slower = statistics.median(other["seconds"] / one["seconds"] for one, other in pairs) - 1
    again = sum(one["cached"] - other["cached"] for one, other in pairs) / sum(one["cached"] for one, _ in pairs)
    scale = AUDIT_TARGET_RATE / again if again else 0.0
    return [
        Row("tokens of hits that audits computed again", 100 * again, "%"),
        Row("time that these audits took", 100 * slower, "%"),
        Row(
            "time that audits of one token in 100 would take",
            100 * slower * scale,
            "%",
            RAM,
            slower * scale,
            AUDIT_TARGET,
            slower * scale <= AUDIT_TARGET,
        ),
    ]


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
    parser.add_argument("--audits", type=int, metavar="ROUNDS", help="measure what audits cost, in so many rounds")
    parser.add_argument("--rate", type=float, default=0.1, help="share of the hits that --audits audits")
    parser.add_argument("--engine", help=argparse.SUPPRESS)
    parser.add_argument("--folder", type=Path, help=argparse.SUPPRESS)
    options = parser.parse_args()
    users, number = (3, 3) if options.quick else (options.users, options.turns)
    load = Load(users, number, options.rate)
    if options.drawn_from and not options.picture:
        parser.error("--drawn-from needs --picture")
    if options.engine:
        run_engine(load, options.engine, options.folder)
    if options.audits:
        with tempfile.TemporaryDirectory(prefix="lmkv-audits-") as folder:
            return finish(audits(load, options.audits, Path(folder)), options.json)
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
