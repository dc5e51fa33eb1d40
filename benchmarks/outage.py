"""A remote store that dies, and then hangs, in the middle of load: what requests wait for beyond vLLM alone.

    python benchmarks/outage.py [--requests 200] [--server redis-server] [--quick] [--json]

Two users ask prompts of 1,000 tokens, one after the other, of an engine whose host memory holds three of them:
hits are reads of a Redis server on loopback. It is killed after a fifth of the requests, started again (empty)
after two, stopped without closing its connections after three, and goes on after four. The same requests are asked
of vLLM alone, which computes them all; with two users a prompt may wait for the other's in either. In float32:
outputs must be equal.
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

from attrs import define, field, frozen

from benchmarks._lmcache_server import free_ports
from benchmarks._timing import Row, arguments_of, finish
from lmkv.cli.measure.engines import ONE_PROCESS, VOCABULARY, EngineSpec, leave, open_engine
from lmkv.cli.measure.process import ChildProcess, Questions
from lmkv.cli.measure.small_model import SmallModel

USERS, PROMPTS, TOKENS, ANSWER = 2, 12, 1000, 2
PHASES = ("there", "killed", "back", "stopped", "back again")
ALONE, REDIS = "vLLM alone", "lmkv, Redis"
TARGET = 1.0
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


@frozen
class Load:
    requests: int

    def phase(self, number: int) -> str:
        """Of the `number`th request that is sent."""
        return PHASES[number * len(PHASES) // self.requests]

    def prompt(self, number: int) -> list[int]:
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


def run_engine(load: Load, name: str, folder: Path, program: str) -> None:
    """In the child: every user sends the next prompt as soon as its last one is answered."""
    questions = Questions()  # before vLLM prints anything
    from vllm import SamplingParams

    server = Server(program, free_ports(1)[0])
    server.start()

    llm = open_engine(spec(name, server.port), folder)
    engine = llm.llm_engine
    params = SamplingParams(temperature=0, max_tokens=ANSWER, ignore_eos=True, detokenize=False)
    warm = {"prompt_token_ids": random.Random(-1).choices(range(VOCABULARY), k=TOKENS)}
    llm.generate(warm, SamplingParams(max_tokens=1, detokenize=False), use_tqdm=False)

    def run() -> dict[str, Any]:
        ttfts, cached, outputs = [0.0] * load.requests, [0] * load.requests, [[0]] * load.requests
        sent = 0

        def send() -> None:
            nonlocal sent
            if name == REDIS and sent and load.phase(sent) != load.phase(sent - 1):
                server.enter(load.phase(sent))
            engine.add_request(str(sent), {"prompt_token_ids": load.prompt(sent)}, params)
            sent += 1

        for _ in range(USERS):
            send()
        while engine.has_unfinished_requests():
            for output in engine.step():
                if output.finished:
                    number = int(output.request_id.split("-")[0])
                    ttfts[number] = output.metrics.first_token_latency
                    cached[number] = output.num_cached_tokens or 0
                    outputs[number] = list(output.outputs[0].token_ids)
                    if sent < load.requests:
                        send()
        return {"ttfts": ttfts, "cached": cached, "outputs": outputs}

    for _ in questions:
        try:
            answer = run()
        finally:
            server.kill()
        questions.answer(answer)
    leave(llm)


def measured(load: Load, name: str, folder: Path, program: str) -> dict[str, Any]:
    command = [sys.executable, __file__, "--engine", name, "--folder", str(folder), "--server", program]
    command += ["--requests", str(load.requests)]
    with closing(ChildProcess(command, folder, ONE_PROCESS)) as child:
        found: dict[str, Any] = child.ask(0, 1800.0)
        child.leave()
    return found


def rows(load: Load, alone: dict[str, Any], redis: dict[str, Any]) -> list[Row]:
    if alone["outputs"] != redis["outputs"]:
        raise SystemExit("the outputs differ from those of vLLM alone")
    made = []
    for phase in PHASES:
        numbers = [number for number in range(load.requests) if load.phase(number) == phase]
        added = [redis["ttfts"][number] - alone["ttfts"][number] for number in numbers]
        hit = sum(redis["cached"][number] for number in numbers) / len(numbers)
        p99 = percentile(added, 0.99)
        made += [
            Row(f"{phase}: hit tokens of {TOKENS:,}, mean", hit, "tokens"),
            Row(f"{phase}: first token later than vLLM alone, p50", percentile(added, 0.5), "s"),
            Row(f"{phase}: first token later than vLLM alone, p99", p99, "s", target=TARGET, met=p99 <= TARGET),
        ]
    return made


def percentile(values: list[float], share: float) -> float:
    return sorted(values)[min(len(values) - 1, int(share * len(values)))]


def main() -> int:
    parser = arguments_of(__doc__, quick="fifty requests")
    parser.add_argument("--requests", type=int, default=200)
    parser.add_argument("--server", default=shutil.which("redis-server") or shutil.which("valkey-server"))
    for name in ("--engine", "--folder"):
        parser.add_argument(name, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if not options.server:
        parser.error("no redis-server and no valkey-server here: --server PATH")
    load = Load(50 if options.quick else options.requests)
    if options.engine:
        run_engine(load, options.engine, Path(options.folder), options.server)
    with tempfile.TemporaryDirectory(prefix="lmkv-outage-") as folder:
        alone, redis = (measured(load, name, Path(folder) / name[:4], options.server) for name in (ALONE, REDIS))
    return finish(rows(load, alone, redis), options.json)


if __name__ == "__main__":
    sys.exit(main())
