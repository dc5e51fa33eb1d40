"""Remote stores in trouble: the cost and gain of waiting for a slow store, and a store that dies and hangs under load.

    python -m benchmarks.troubles waits [--rounds 12] [--server redis-server] [--quick] [--json] [--write FILE]
    python -m benchmarks.troubles outage [--requests 50] [--server redis-server] [--quick] [--json] [--write FILE]

waits: prompts are only in Redis, behind a proxy with a given speed: as fast as possible, a third of the time to compute
the prompt, three times that time, or no bytes at all. In each round vLLM alone and lmkv answer every prompt once.
Waiting must never be worse than computing, and hits that save time must not be lost. In the first round, which does not
count, lmkv learns the speeds.

outage: two users send prompts of 1,000 tokens, one after the other. The engine has host memory for three prompts, so
hits are reads of a Redis server. There are `--requests` requests in each phase. After the first phase the server is
killed. After the second phase it starts again, empty. When there are hits again, and after another phase, the server is
stopped without closing its connections. After the next phase it continues, until there are hits again. vLLM alone
computes the same number of requests with the same prompts. All engines use float32, so that outputs must be equal.
"""

from __future__ import annotations

import argparse
import math
import shutil
import signal
import socket
import statistics
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from contextlib import ExitStack, closing, suppress
from functools import partial
from pathlib import Path

from attrs import define, evolve, field

from benchmarks.peers import RedisServer
from benchmarks.rounds import Row, arguments, beside, compared, finish, percentile, turns
from benchmarks.users import Load, Round, Users
from lmkv.cli.engines import EngineProcess, EngineSpec
from lmkv.cli.small_model import SmallModel

MODELS = {"fast model": SmallModel(layers=4, hidden=256), "slow model": SmallModel(layers=12, hidden=1024)}
STORES = {"fast store": 0.0, "normal store": 1 / 3, "slow store": 3.0, "store that hangs": math.inf}
"""The time to transfer a prompt's bytes, as a multiple of the time to compute the prompt."""
TOKENS, PROMPTS = 2048, 2
ALONE, LMKV = "vLLM alone", "lmkv"
WORST, PAYS, OUTAGE_TARGET = 1.1, 0.75, 1.5
PIECE, BACK = 16 << 10, 60.0
"""Number of bytes that the proxy passes on at once, and seconds within which hits must be back."""
LOAD = Load(users=2, turns=1, question=1000, answer=2, at_once=2, pool=12)


@define
class Proxy:
    """Passes connections on to `port`. All answers together have `bytes_per_second`."""

    port: int
    bytes_per_second: float = math.inf
    listener: socket.socket = field(factory=lambda: socket.create_server(("127.0.0.1", 0)))
    _lock: threading.Lock = field(factory=threading.Lock)
    _sent_until: float = 0.0

    def start(self) -> int:
        """Start the proxy, and return the port to connect to."""
        threading.Thread(target=self._accept, daemon=True).start()
        return int(self.listener.getsockname()[1])

    def _accept(self) -> None:
        with suppress(OSError):
            while True:
                near, far = self.listener.accept()[0], socket.create_connection(("127.0.0.1", self.port))
                for one in (near, far):
                    one.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
                threading.Thread(target=self._pass, args=(near, far, False), daemon=True).start()
                threading.Thread(target=self._pass, args=(far, near, True), daemon=True).start()

    def _pass(self, source: socket.socket, target: socket.socket, slowly: bool) -> None:
        with suppress(OSError), closing(source), closing(target):
            while data := source.recv(PIECE):
                while slowly and not self.bytes_per_second:
                    time.sleep(0.01)
                if slowly and math.isfinite(self.bytes_per_second):
                    time.sleep(self._wait(len(data)))
                target.sendall(data)

    def _wait(self, nbytes: int) -> float:
        """Return the seconds until the line has sent all earlier bytes; 0 below a millisecond, because no sleep is
        that exact.
        """
        with self._lock:
            now = time.monotonic()
            self._sent_until = max(self._sent_until, now) + nbytes / self.bytes_per_second
            return left if (left := self._sent_until - now) > 1e-3 else 0.0


def waiting_spec(model: SmallModel, port: int | None) -> EngineSpec:
    prompt = (TOKENS + 256) * model.kv_bytes_per_token
    settings = {
        "remote_url": f"redis://127.0.0.1:{port}",
        "local_cpu": False,
        "max_local_cpu_size": (PROMPTS + 2) * prompt / 2**30,
        "chunk_size": 64,
        "remote_timeout": 5.0,
    }
    return EngineSpec(
        model=model, max_tokens=TOKENS + 64, kv_bytes=2 * prompt, settings=None if port is None else settings
    )


def waits(options: argparse.Namespace) -> Iterator[Row]:
    rounds = 1 + (3 if options.quick else options.rounds)
    for model in list(MODELS)[: 1 if options.quick else None]:
        for store, share in STORES.items():
            found = waited(MODELS[model], share, rounds, options.server)
            targets = {LMKV: PAYS if share < 1 else WORST}
            title = f"{model}, {store}"
            seconds = {name: [ttft for ttft, _ in each[PROMPTS:]] for name, each in found.items()}
            yield from compared(f"{title}, first token", "s", seconds, ALONE, targets)
            longest, computed = max(seconds[LMKV]), statistics.median(seconds[ALONE])
            yield beside(f"{title}, longest first token", longest, "s", f"{ALONE}, median", computed)
            hits = statistics.mean(hit for _, hit in found[LMKV][PROMPTS:])
            yield Row(f"{title}, hit of {TOKENS:,} tokens, mean", hits, "tokens")


def waited(model: SmallModel, share: float, rounds: int, program: str) -> dict[str, list[tuple[float, int]]]:
    """Return the first-token times and hits of each engine, in the order of the rounds."""
    with ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="lmkv-troubles-")))
        server = RedisServer(program)
        server.start()
        stack.callback(server.kill)
        proxy = Proxy(server.port)
        stack.callback(proxy.listener.close)
        engines = {
            name: stack.enter_context(
                closing(EngineProcess(waiting_spec(model, port), folder / name.replace(" ", "-")))
            )
            for name, port in ((ALONE, None), (LMKV, proxy.start()))
        }
        for engine in engines.values():
            engine.send(PROMPTS, TOKENS)
        stored = [engines[LMKV].send(seed, TOKENS) for seed in range(PROMPTS)]
        if any(answer.hit_tokens for answer in stored):
            raise SystemExit("a prompt was not computed when it was stored")
        computed = statistics.median(answer.ttft_s for answer in stored)
        time.sleep(2.0)
        nbytes = TOKENS * model.kv_bytes_per_token
        proxy.bytes_per_second = 0.0 if math.isinf(share) else nbytes / (share * computed) if share else math.inf
        found: dict[str, list[tuple[float, int]]] = {name: [] for name in engines}
        for number, name in turns(engines, rounds):
            for seed, right in enumerate(stored):
                answer = engines[name].send(seed, TOKENS)
                found[name].append((answer.ttft_s, answer.hit_tokens))
                if answer.token_ids != right.token_ids:
                    raise SystemExit(f"round {number}: {name} answers otherwise than before")
        for engine in engines.values():
            engine.leave()
        return found


# -- outage -----------------------------------------------------------------------------------------------


def outage_spec(port: int | None) -> EngineSpec:
    model = SmallModel(layers=8, hidden=512)
    prompt = (LOAD.question + 256) * model.kv_bytes_per_token
    settings = {"remote_url": f"redis://127.0.0.1:{port}", "max_local_cpu_size": 3 * prompt / 2**30}
    return EngineSpec(
        model=model,
        max_tokens=LOAD.question + 64,
        kv_bytes=(LOAD.users + 2) * prompt,
        settings=None if port is None else {**settings, "load_or_recompute": False},
    )


def outage(options: argparse.Namespace) -> Iterator[Row]:
    load = evolve(LOAD, turns=5 if options.quick else options.requests // LOAD.users)
    server = RedisServer(options.server)
    phases = {"there": server.start, "killed": server.kill, "back": server.start}
    phases |= {"stopped": partial(server.signal, signal.SIGSTOP), "going on": partial(server.signal, signal.SIGCONT)}
    found: dict[str, tuple[Round, float | None]] = {}
    with tempfile.TemporaryDirectory(prefix="lmkv-troubles-") as folder:
        with closing(Users(outage_spec(None), Path(folder, "alone"))) as engine:
            engine.run(LOAD, 0)
            alone = engine.run(load, 0)
            engine.leave()
        right = {prompt_of(load, which): answer for which, answer in alone.answers.items()}
        server.start()
        with closing(Users(outage_spec(server.port), Path(folder, "lmkv"))) as engine:
            try:
                for number in range(6):
                    engine.run(LOAD, number)
                for phase, enter in phases.items():
                    if phase != "there":
                        enter()
                    found[phase] = asked(engine, load, hits=phase not in ("killed", "stopped"))
                    wrong = [w for w, answer in found[phase][0].answers.items() if answer != right[prompt_of(load, w)]]
                    if wrong:
                        raise SystemExit(f"{phase}: the outputs of {wrong} differ from those of vLLM alone")
                engine.leave()
            finally:
                server.kill()
    median, longest = (percentile(alone.ttfts, share) for share in (0.5, 0.99))
    yield Row("vLLM alone: first token, p50", median, "s")
    for phase, (each, first) in found.items():
        yield Row(f"{phase}: hit of {LOAD.question:,} tokens, mean", each.cached / len(each.ttfts), "tokens")
        yield beside(f"{phase}: first token, p50", percentile(each.ttfts, 0.5), "s", ALONE, median)
        p99 = percentile(each.ttfts, 0.99)
        yield beside(f"{phase}: first token, p99", p99, "s", f"{ALONE}, p99", longest, OUTAGE_TARGET)
        if first is not None:
            yield Row(f"{phase}: first hit after", first, "s")


def prompt_of(load: Load, which: str) -> tuple[int, ...]:
    """Return the prompt of a request. `which`: the name of the request in the answers of round 0."""
    user, turn = map(int, which.split("-")[:2])
    return tuple(load.prompt(0, user, [], turn))


def asked(engine: Users, load: Load, *, hits: bool) -> tuple[Round, float | None]:
    """Send the requests of a phase. If `hits` are expected, wait for the first hit before, and also return the
    seconds of this wait.
    """
    began, number = time.monotonic(), 0
    while hits and time.monotonic() < began + BACK:
        if engine.run(LOAD, number).cached:
            return engine.run(load, 0), time.monotonic() - began
        number += 1
    if hits:
        raise SystemExit(f"no hit within {BACK:.0f} s")
    return engine.run(load, 0), None


def main() -> int:
    parser = arguments(__doc__, quick="three rounds of one model; ten requests in each phase")
    parser.add_argument("what", choices=("waits", "outage"))
    parser.add_argument("--rounds", type=int, default=12)
    parser.add_argument("--requests", type=int, default=50, help="in each phase")
    parser.add_argument("--server", default=shutil.which("redis-server") or shutil.which("valkey-server"))
    options = parser.parse_args()
    if not options.server:
        parser.error("no redis-server and no valkey-server here: --server PATH")
    return finish((waits if options.what == "waits" else outage)(options), options)


if __name__ == "__main__":
    sys.exit(main())
