"""A remote store that dies, and then hangs, under load: how much longer requests wait than with vLLM alone.

    python benchmarks/outage.py [--requests 50] [--server redis-server] [--quick] [--json]

Two users ask prompts of 1,000 tokens, one after the other, of an engine whose host memory holds three of them:
hits are reads of a Redis server on loopback. After so many requests it is killed; after as many more it is started
again, empty; once hits are back, and after as many more, it is stopped without closing its connections; after as
many more it goes on, until hits are back. vLLM alone computes as many requests of the same prompts; with two users a
prompt may wait for the other's in either. In float32: outputs must be equal.
"""

from __future__ import annotations

import sys
from pathlib import Path

# Not this folder: its copy.py would stand in for the standard library's.
sys.path[0] = str(Path(__file__).resolve().parents[1])

import argparse
import random
import shutil
import signal
import socket
import subprocess
import tempfile
import time
from contextlib import closing, suppress
from typing import Any

from attrs import define, field

from benchmarks._lmcache_server import free_ports
from benchmarks._timing import Row, arguments_of, finish, percentile
from lmkv.cli.measure.process import ChildProcess, Questions
from lmkv.cli.measure.small_model import SmallModel
from lmkv.cli.measure.vllm_engines import ONE_PROCESS, VOCABULARY, EngineSpec, leave, open_engine

USERS, PROMPTS, TOKENS, ANSWER = 2, 12, 1000, 2
PHASES = ("there", "killed", "back", "stopped", "back again")
ALONE, REDIS = "vLLM alone", "lmkv, Redis"
TARGET = 1.5
"""Largest p99 of the first token beside vLLM alone's."""
START_TIMEOUT = 30.0


@define
class Server:
    """Redis on loopback, in memory only."""

    program: str
    port: int
    _process: subprocess.Popen[bytes] | None = field(init=False, default=None)

    def start(self) -> None:
        command = [self.program, "--bind", "127.0.0.1", "--port", str(self.port), "--save", "", "--appendonly", "no"]
        self._process = subprocess.Popen(command, stdout=subprocess.DEVNULL)
        deadline = time.monotonic() + START_TIMEOUT
        while time.monotonic() < deadline:
            with suppress(OSError), socket.create_connection(("127.0.0.1", self.port), 1.0):
                return
            time.sleep(0.01)
        raise SystemExit(f"{self.program} does not answer at port {self.port}")

    def enter(self, phase: str) -> None:
        """Do to it what the phase begins with."""
        if phase == "killed":
            self.kill()
        elif phase == "back":
            self.start()
        elif phase == "stopped":
            self._signal(signal.SIGSTOP)
        elif phase == "back again":
            self._signal(signal.SIGCONT)

    def _signal(self, number: int) -> None:
        assert self._process is not None
        self._process.send_signal(number)

    def kill(self) -> None:
        assert self._process is not None
        self._process.kill()
        self._process.wait()


@define
class Load:
    """Knows the phase, which lasts for so many answered requests and, with the server there, until a hit."""

    requests: int
    _phase: int = 0
    _answered: int = 0
    _hit: bool = False
    ended: bool = False

    @property
    def phase(self) -> str:
        return PHASES[self._phase]

    def answered(self, phase: str, *, hit: bool) -> bool:
        """Note an answer; whether another phase has begun with it."""
        self._answered += phase == self.phase
        self._hit |= hit and phase == self.phase
        enough = self._answered >= self.requests and (self._hit or self.phase in ("killed", "stopped"))
        if not enough or self._phase + 1 == len(PHASES):
            self.ended = enough
            return False
        self._phase, self._answered, self._hit = self._phase + 1, 0, False
        return True


def prompt(number: int) -> list[int]:
    return random.Random(number % PROMPTS).choices(range(VOCABULARY), k=TOKENS)


def spec(name: str, port: int) -> EngineSpec:
    model = SmallModel(layers=8, hidden=512)
    prompt = (TOKENS + 256) * model.kv_bytes_per_token
    settings = {"remote_url": f"redis://127.0.0.1:{port}", "max_local_cpu_size": 3 * prompt / 2**30}
    return EngineSpec(
        model=model,
        max_tokens=TOKENS + 64,
        kv_bytes=(USERS + 2) * prompt,
        settings={**settings, "load_or_recompute": False} if name == REDIS else None,
    )


def run_engine(requests: int, name: str, folder: Path, program: str) -> None:
    """In the child: every user sends the next prompt as soon as its last one is answered."""
    questions = Questions()  # before vLLM prints anything
    from vllm import SamplingParams

    server = Server(program, free_ports(1)[0])
    server.start()

    llm = open_engine(spec(name, server.port), folder)
    engine = llm.llm_engine
    params = SamplingParams(temperature=0, max_tokens=ANSWER, ignore_eos=True, detokenize=False)
    warm = {"prompt_token_ids": random.Random("no prompt of the load").choices(range(VOCABULARY), k=TOKENS)}
    llm.generate(warm, SamplingParams(max_tokens=1, detokenize=False), use_tqdm=False)

    def run() -> list[dict[str, Any]]:
        load, found = Load(requests), []
        asked: dict[str, str] = {}

        def send() -> None:
            number = len(asked)
            asked[str(number)] = load.phase
            engine.add_request(str(number), {"prompt_token_ids": prompt(number)}, params)

        began = time.perf_counter()
        for _ in range(USERS):
            send()
        while engine.has_unfinished_requests():
            for output in engine.step():
                if not output.finished:
                    continue
                name_of = output.request_id.split("-")[0]
                hit = output.num_cached_tokens or 0
                found.append(
                    {
                        "phase": asked[name_of],
                        "ttft": output.metrics.first_token_latency,
                        "hit": hit,
                        "seconds": time.perf_counter() - began,
                        "prompt": int(name_of) % PROMPTS,
                        "output": list(output.outputs[0].token_ids),
                    }
                )
                if name == ALONE:
                    load.answered(load.phase, hit=True)
                elif load.answered(asked[name_of], hit=hit > 0):
                    server.enter(load.phase)
                    began = time.perf_counter()
                if not load.ended:
                    send()
        return found

    for _ in questions:
        try:
            answer = run()
        finally:
            server.kill()
        questions.answer(answer)
    leave(llm)


def measured(requests: int, name: str, folder: Path, program: str) -> list[dict[str, Any]]:
    command = [sys.executable, __file__, "--engine", name, "--folder", str(folder), "--server", program]
    command += ["--requests", str(requests)]
    with closing(ChildProcess(command, folder, ONE_PROCESS)) as child:
        found: list[dict[str, Any]] = child.ask(0, 1800.0)
        child.leave()
    return found


def rows(alone: list[dict[str, Any]], redis: list[dict[str, Any]]) -> list[Row]:
    right = {each["prompt"]: each["output"] for each in alone}
    if any(each["output"] != right[each["prompt"]] for each in alone + redis):
        raise SystemExit("the outputs differ from those of vLLM alone")
    computed = percentile([each["ttft"] for each in alone], 0.5)
    longest = percentile([each["ttft"] for each in alone], 0.99)
    made = [Row("vLLM alone: first token, p50", computed, "s"), Row("vLLM alone: first token, p99", longest, "s")]
    for phase in PHASES:
        there = [each for each in redis if each["phase"] == phase]
        added = [each["ttft"] - computed for each in there]
        p99 = percentile([each["ttft"] for each in there], 0.99)
        made += [
            Row(f"{phase}: requests", len(there), "requests"),
            Row(f"{phase}: hit tokens of {TOKENS:,}, mean", sum(each["hit"] for each in there) / len(there), "tokens"),
            Row(f"{phase}: first token after vLLM alone's median, p50", percentile(added, 0.5), "s"),
            Row(f"{phase}: first token, p99", p99, "s", "vLLM alone's", p99 / longest, TARGET, p99 <= TARGET * longest),
        ]
        if hits := [each["seconds"] for each in there if each["hit"]]:
            made.append(Row(f"{phase}: first hit after", hits[0], "s"))
    return made


def main() -> int:
    parser = arguments_of(__doc__, quick="ten requests in each phase")
    parser.add_argument("--requests", type=int, default=50, help="in each phase")
    parser.add_argument("--server", default=shutil.which("redis-server") or shutil.which("valkey-server"))
    for name in ("--engine", "--folder"):
        parser.add_argument(name, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if not options.server:
        parser.error("no redis-server and no valkey-server here: --server PATH")
    requests = 10 if options.quick else options.requests
    if options.engine:
        run_engine(requests, options.engine, Path(options.folder), options.server)
    with tempfile.TemporaryDirectory(prefix="lmkv-outage-") as folder:
        alone, redis = (measured(requests, name, Path(folder) / name[:4], options.server) for name in (ALONE, REDIS))
    return finish(rows(alone, redis), options.json)


if __name__ == "__main__":
    sys.exit(main())
