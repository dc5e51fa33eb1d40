"""How much callers without a token slow the engine: steps per second beside each attack on the agent API.

    python benchmarks/agent_attack.py [--seconds 4] [--rounds 5] [--quick] [--json]

A loop in the server's process stands for the engine: each step computes in Python for a while and then waits, 5 ms in
all. Attackers are another process of the lowest priority, so that what they take is the interpreter, not the cores.
Each round measures the loop alone and beside each attack; ratios are medians over the rounds.
"""

from __future__ import annotations

import sys
from pathlib import Path

# Not this folder: its copy.py would stand in for the standard library's.
sys.path[0] = str(Path(__file__).resolve().parents[1])

import os
import random
import socket
import statistics
import subprocess
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager, suppress

from benchmarks._timing import Row, arguments_of, finish
from lmkv.agent.address import Address
from lmkv.agent.http import application
from lmkv.agent.server import AgentServer
from lmkv.agent.service import CacheService
from lmkv.backends.cpu import CPUPinnedBackend
from lmkv.chunks.hashing import chunk_keys
from lmkv.policies import LRU
from lmkv.protocols import Tier
from lmkv.store.tiered import TieredStore

TOKEN = "benchmark"
STEP, COMPUTED = 0.005, 0.002
"""Seconds of a step, and how many of them are Python."""
THREADS, IDLE = 8, 500
TARGET = 1.2
BLOCK = 1 << 16
JSON = b"Host: x\r\nContent-Type: application/json\r\n"
POST = b"POST /v1/lookup HTTP/1.1\r\n" + JSON
GET = b"GET /openapi.json HTTP/1.1\r\nHost: x\r\n\r\n"
Sent = Callable[[socket.socket], None]


# -- attacks: what one connection sends, until it is closed ------------------------------------------------


def endless(beginning: bytes, more: bytes) -> Sent:
    def send(connection: socket.socket) -> None:
        connection.sendall(beginning)
        while True:
            connection.sendall(more)

    return send


def answered(request: bytes) -> Sent:
    """One request after the other; with each answer read."""

    def send(connection: socket.socket) -> None:
        while True:
            connection.sendall(request)
            if not connection.recv(BLOCK):
                raise ConnectionError

    return send


def idle(connection: socket.socket) -> None:
    connection.sendall(b"GET / HTTP/1.1\r\nX: ")
    connection.recv(1)


ATTACKS: dict[str, tuple[int, Sent]] = {
    "endless header": (THREADS, endless(b"GET / HTTP/1.1\r\nX: ", b"a" * BLOCK)),
    "endless path": (THREADS, endless(b"GET /", b"a" * BLOCK)),
    "many headers": (THREADS, endless(b"GET / HTTP/1.1\r\n", b"X: a\r\n" * 10_000)),
    "idle connections": (IDLE, idle),
    "refused requests": (THREADS, answered(POST + b"Content-Length: 2\r\n\r\n{}")),
    "pages": (THREADS, answered(GET)),
    "pipelined requests": (THREADS, endless(b"", GET * 1000)),
    "huge bodies": (THREADS, endless(POST + b"Content-Length: 1000000000000\r\n\r\n", b"a" * BLOCK)),
    "chunked bodies": (THREADS, endless(POST + b"Transfer-Encoding: chunked\r\n\r\n", b"1\r\na\r\n" * 10_000)),
    "chunked bodies of pages": (
        THREADS,
        endless(b"GET / HTTP/1.1\r\nHost: x\r\nTransfer-Encoding: chunked\r\n\r\n", b"1\r\na\r\n" * 10_000),
    ),
}


def attack(name: str, port: int) -> None:
    """Attack for ever, in a process of its own."""
    os.nice(19)
    threads, send = ATTACKS[name]

    def again_and_again() -> None:
        while True:
            with suppress(OSError), socket.create_connection(("127.0.0.1", port), 60) as connection:
                send(connection)

    for _ in range(threads):
        threading.Thread(target=again_and_again, daemon=True).start()
    print("attacking", flush=True)
    threading.Event().wait()


@contextmanager
def attacked(name: str, port: int) -> Iterator[None]:
    child = subprocess.Popen([sys.executable, __file__, "--attack", name, str(port)], stdout=subprocess.PIPE)
    try:
        assert child.stdout is not None
        child.stdout.readline()
        yield
    finally:
        child.kill()
        child.wait()


# -- what is measured --------------------------------------------------------------------------------------


def steps(seconds: float) -> float:
    """Steps per second of an engine's loop."""
    begin, done = time.monotonic(), 0
    while time.monotonic() < begin + seconds:
        # So much computing, however long it takes beside others.
        until = time.thread_time() + COMPUTED
        while time.thread_time() < until:
            pass
        time.sleep(STEP - COMPUTED)
        done += 1
    return done / (time.monotonic() - begin)


def measured(names: list[str], seconds: float, rounds: int, url: str) -> list[Row]:
    port = int(url.rpartition(":")[2])
    ratios: dict[str, list[float]] = {name: [] for name in names}
    for _ in range(rounds):
        for name in random.sample(names, len(names)):
            alone = steps(seconds / 2)
            with attacked(name, port):
                steps(seconds / 4)
                beside = steps(seconds)
            alone = statistics.mean((alone, steps(seconds / 2)))
            ratios[name].append(alone / beside)
    rows = []
    for name in names:
        ratio = statistics.median(ratios[name])
        beside = f"steps alone, of those beside: {name}"
        rows.append(Row(beside, ratio, "", target=TARGET, met=ratio <= TARGET))
    return rows


def main() -> int:
    if sys.argv[1:2] == ["--attack"]:
        attack(sys.argv[2], int(sys.argv[3]))
    parser = arguments_of(__doc__, quick="one round of a second")
    parser.add_argument("--seconds", type=float, default=4.0, help="of each measurement")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--only", choices=ATTACKS, help="one attack")
    options = parser.parse_args()
    seconds, rounds = (1.0, 1) if options.quick else (options.seconds, options.rounds)
    store = TieredStore(Tier(CPUPinnedBackend(64 << 12, 4096), LRU()))

    def keys_of(tokens: list[int], *_: object) -> list[bytes]:
        return chunk_keys(tokens, root=bytes(32), chunk_size=4)

    service = CacheService(store, keys_of, lambda text, _: list(text.encode()), chunk_size=4, pin_ttl=60)
    with closing(store), closing(AgentServer(lambda: application(service, TOKEN), Address("127.0.0.1:0"))) as server:
        names = [options.only] if options.only else list(ATTACKS)
        return finish(measured(names, seconds, rounds, server.url), options.json)


if __name__ == "__main__":
    sys.exit(main())
