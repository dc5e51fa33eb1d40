"""The cost and the gain of waiting for a tier: slow, normal and fast stores, models that compute slowly and fast.

    python benchmarks/waits.py [--rounds 12] [--server redis-server] [--quick] [--json]

Prompts lie in Redis alone, behind a proxy that passes its bytes on at a given speed: as fast as it can, in a third of
the time that computing the prompt takes, in three times that time, or not at all. In each round every prompt is asked
once, of vLLM alone and of lmkv. Waiting must never be worse than computing, and hits that pay must not be lost. The
first round teaches lmkv the speeds, and is shown apart.
"""

from __future__ import annotations

import sys
from pathlib import Path

# Not this folder: its copy.py would stand in for the standard library's.
sys.path[0] = str(Path(__file__).resolve().parents[1])

import math
import shutil
import socket
import statistics
import tempfile
import threading
import time
from collections.abc import Iterator
from contextlib import closing, contextmanager, suppress

from attrs import define, field

from benchmarks._lmcache_server import free_ports
from benchmarks._timing import Row, arguments_of, finish, turns
from benchmarks.outage import Server
from lmkv.cli.measure.small_model import SmallModel
from lmkv.cli.measure.vllm_engines import Answer, EngineProcess, EngineSpec

MODELS = {"fast model": SmallModel(layers=4, hidden=256), "slow model": SmallModel(layers=12, hidden=1024)}
STORES = {"fast store": 0.0, "normal store": 1 / 3, "slow store": 3.0, "store that hangs": math.inf}
"""Seconds for a prompt's bytes, in seconds that it takes to compute."""
TOKENS, PROMPTS = 2048, 2
ALONE = "vLLM alone"
WORST = 1.1
PAYS = 0.75
PIECE = 16 << 10


@define
class Proxy:
    """Passes connections on to `port`; answers at `bytes_per_second`, all of them together."""

    port: int
    bytes_per_second: float = math.inf
    listener: socket.socket = field(factory=lambda: socket.create_server(("127.0.0.1", 0)))
    _lock: threading.Lock = field(factory=threading.Lock)
    _sent_until: float = 0.0

    def start(self) -> int:
        """The port to connect to."""
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
        """Seconds until the line has sent all bytes before; none below a millisecond, which no sleep keeps to."""
        with self._lock:
            now = time.monotonic()
            self._sent_until = max(self._sent_until, now) + nbytes / self.bytes_per_second
            return left if (left := self._sent_until - now) > 1e-3 else 0.0


@contextmanager
def redis_behind_proxy(program: str) -> Iterator[tuple[Proxy, int]]:
    server = Server(program, free_ports(1)[0])
    server.start()
    proxy = Proxy(server.port)
    try:
        yield proxy, proxy.start()
    finally:
        proxy.listener.close()
        server.kill()


def spec(model: SmallModel, port: int | None) -> EngineSpec:
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


@contextmanager
def engines_of(model: SmallModel, port: int, folder: Path) -> Iterator[dict[str, EngineProcess]]:
    with (
        closing(EngineProcess(spec(model, None), folder / "alone")) as alone,
        closing(EngineProcess(spec(model, port), folder / "lmkv")) as ours,
    ):
        yield {ALONE: alone, "lmkv": ours}


def measured(model: SmallModel, share: float, rounds: int, program: str, folder: Path) -> dict[str, list[Answer]]:
    """Answers of each engine, those of the first round first."""
    with redis_behind_proxy(program) as (proxy, port), engines_of(model, port, folder) as engines:
        for engine in engines.values():
            engine.send(PROMPTS, TOKENS)
        stored = [engines["lmkv"].send(seed, TOKENS) for seed in range(PROMPTS)]
        if any(answer.hit_tokens for answer in stored):
            raise SystemExit("a prompt was not computed when it was stored")
        computed = statistics.median(answer.ttft_s for answer in stored)
        time.sleep(2.0)
        nbytes = TOKENS * model.kv_bytes_per_token
        proxy.bytes_per_second = 0.0 if math.isinf(share) else nbytes / (share * computed) if share else math.inf
        found: dict[str, list[Answer]] = {name: [] for name in engines}
        for number, name in turns(list(engines), rounds):
            found[name] += [engines[name].send(seed, TOKENS) for seed in range(PROMPTS)]
            for each, right in zip(found[name][-PROMPTS:], stored, strict=True):
                if each.token_ids != right.token_ids:
                    raise SystemExit(f"round {number}: {name} answers otherwise than before")
        for engine in engines.values():
            engine.leave()
        return found


def rows(model: str, store: str, share: float, found: dict[str, list[Answer]]) -> Iterator[Row]:
    alone = [answer.ttft_s for answer in found[ALONE]]
    computed = statistics.median(alone)
    ours = found["lmkv"]
    first, rest = ours[:PROMPTS], ours[PROMPTS:]
    ratio = statistics.median(answer.ttft_s for answer in rest) / computed
    target = PAYS if share < 1 else WORST
    yield Row(f"{model}, {store}: {ALONE}", computed, "s")
    yield Row(
        f"{model}, {store}: lmkv, median",
        ratio * computed,
        "s",
        of=ALONE,
        ratio=ratio,
        target=target,
        met=ratio <= target,
    )
    for name, seconds in (("first", first[0].ttft_s), ("longest later", max(answer.ttft_s for answer in rest))):
        yield Row(f"{model}, {store}: lmkv, {name}", seconds, "s", of=ALONE, ratio=seconds / computed)
    yield Row(
        f"{model}, {store}: hits, share of tokens", statistics.mean(each.hit_tokens / TOKENS for each in rest), ""
    )


def main() -> int:
    parser = arguments_of(__doc__, quick="four rounds")
    parser.add_argument("--rounds", type=int, default=12)
    parser.add_argument("--server", default=shutil.which("redis-server") or shutil.which("valkey-server"))
    options = parser.parse_args()
    if not options.server:
        parser.error("no redis-server and no valkey-server here: --server PATH")
    rounds, made = 4 if options.quick else options.rounds, []
    for model, shape in MODELS.items():
        for store, share in STORES.items():
            with tempfile.TemporaryDirectory(prefix="lmkv-waits-") as folder:
                found = measured(shape, share, rounds, options.server, Path(folder))
            made += rows(model, store, share, found)
    return finish(made, options.json)


if __name__ == "__main__":
    sys.exit(main())
