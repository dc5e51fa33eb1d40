"""Callers without a token, through real sockets: what they hold is bounded, and others are answered meanwhile."""

from __future__ import annotations

import os
import resource
import selectors
import socket
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, closing, suppress
from functools import partial
from types import SimpleNamespace
from typing import Any

import httpx
import pytest
from typer.testing import CliRunner

import lmkv.agent.server
from lmkv.agent.client import Client
from lmkv.agent.http import application
from lmkv.agent.server import _LOOP, _WORK, Address, AgentServer, Pace, max_connections, paced_loop
from lmkv.agent.service import CacheService, Prompt
from lmkv.cli.app import app
from lmkv.store.tiered import TieredStore
from tests.agent.serving import SIZE, TOKEN, at_port, connections, keys_of, service_of, short_socket, tokenize
from tests.kit import LIMIT, eventually

OWN = f"Authorization: Bearer {TOKEN}\r\n".encode()
HOST = b"Host: x\r\n"
BLOCK = b"a" * (1 << 16)
MOST_SENT = 1 << 26
"""Bytes that no attack gets rid of: sockets have a few million of them on their way."""


def connect(server: AgentServer) -> socket.socket:
    connection = socket.create_connection(("127.0.0.1", int(server.url.rpartition(":")[2])), LIMIT)
    connection.settimeout(LIMIT)
    return connection


def rest(connection: socket.socket) -> bytes:
    """All that comes until the other side closes."""
    found = b""
    with suppress(ConnectionResetError):
        while part := connection.recv(1 << 16):
            found += part
    return found


def one_answer(connection: socket.socket) -> bytes:
    """As long as its header says, while the connection stays open."""
    found = b""
    while b"\r\n\r\n" not in found:
        part = connection.recv(1 << 16)
        assert part, found
        found += part
    head, _, body = found.partition(b"\r\n\r\n")
    length = next(int(line.split(b":")[1]) for line in head.lower().split(b"\r\n") if b"content-length" in line)
    while len(body) < length:
        body += connection.recv(1 << 16)
    return head


POST, CHUNKED = b"POST /v1/lookup HTTP/1.1\r\n" + HOST, b"Transfer-Encoding: chunked\r\n\r\n"
ENDLESS: dict[str, tuple[bytes, bytes]] = {
    "header": (b"GET / HTTP/1.1\r\nX: ", BLOCK),
    "path": (b"GET /", BLOCK),
    "headers": (b"GET / HTTP/1.1\r\n", b"X: a\r\n" * 10_000),
    "escapes": (b"GET /", b"%"),
    "body": (POST + b"Content-Length: 1000000000000\r\n\r\n", BLOCK),
    "chunks": (POST + CHUNKED, b"1\r\na\r\n" * 10_000),
    "page": (b"GET / HTTP/1.1\r\nHost: x\r\n" + CHUNKED, b"1\r\na\r\n" * 10_000),
    "no page": (b"POST /nothing HTTP/1.1\r\nHost: x\r\n" + CHUNKED, b"ffff\r\n" + BLOCK[1:] + b"\r\n"),
    "pipelined": (b"", b"GET / HTTP/1.1\r\nHost: x\r\n\r\n" * 1000),
    "lines": (b"", b"\r\n" * 10_000),
    "zeros": (b"", b"\0" * 10_000),
}


@pytest.mark.parametrize("what", ENDLESS)
def test_what_has_no_end_is_cut_off(server: AgentServer, what: str) -> None:
    beginning, more = ENDLESS[what]
    with connect(server) as connection:
        with pytest.raises(OSError, match=r"reset|pipe"):  # noqa: PT012
            connection.sendall(beginning)
            for _ in range(MOST_SENT // len(more)):
                connection.sendall(more)
        with Client(server.url, TOKEN) as client:
            assert client.stats()["tiers"]
        eventually(lambda: len(connections(server)) <= 1, "the attacker's connection is closed")


def test_a_connection_that_is_kept_is_not_kept_for_ever(store: TieredStore, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(lmkv.agent.server, "_KEEP_SECONDS", 0)
    with at_port(service_of(store)) as server, connect(server) as connection:
        connection.sendall(b"GET /v1/stats HTTP/1.1\r\n" + HOST + OWN + b"\r\n")
        assert one_answer(connection).startswith(b"HTTP/1.1 200")
        assert rest(connection) == b""


def test_who_has_the_token_keeps_the_connection_and_others_do_not(server: AgentServer) -> None:
    with connect(server) as connection:
        for _ in range(3):
            connection.sendall(b"GET /v1/stats HTTP/1.1\r\n" + HOST + OWN + b"\r\n")
            assert one_answer(connection).startswith(b"HTTP/1.1 200")
    for path in (b"/", b"/openapi.json", b"/nothing", b"/v1/stats"):
        with connect(server) as connection:
            connection.sendall((b"GET " + path + b" HTTP/1.1\r\n" + HOST + b"\r\n") * 5)
            assert rest(connection).count(b"HTTP/1.1 ") == 1


def test_connections_are_few_and_take_the_other_engines_none(store: TieredStore) -> None:
    """A port that strangers fill answers nobody: but the engine has its files, and its server's engines it."""
    files = len(os.listdir("/proc/self/fd"))
    first = short_socket()
    make = partial(application, service_of(store), TOKEN)
    with closing(AgentServer(make, Address("127.0.0.1:0"), partial(first.private, 0))) as server:
        with ExitStack() as stack, Client(first.private(0).url, TOKEN) as inside:
            for _ in range(3 * max_connections()):
                attacker = stack.enter_context(connect(server))
                with suppress(OSError):
                    attacker.sendall(b"GET / HTTP/1.1\r\nX: ")
            eventually(lambda: len(connections(server)) == max_connections(), "there are as many as there may be")
            # The clients' sockets, which are in this process as well, and the server's.
            most = files + 4 * max_connections() + 10
            eventually(lambda: len(os.listdir("/proc/self/fd")) <= most, "the others are closed")
            with pytest.raises(httpx.TransportError), Client(server.url, TOKEN) as late:
                late.stats()
            assert inside.stats()["tiers"]
        eventually(lambda: not connections(server), "all have gone")
        with Client(server.url, TOKEN) as late:
            assert late.stats()["tiers"]


def test_who_comes_last_is_told_that_it_is_full(server: AgentServer) -> None:
    with ExitStack() as stack:
        for _ in range(max_connections() - 1):
            stack.enter_context(connect(server))
        with Client(server.url, TOKEN) as late, pytest.raises(httpx.HTTPStatusError, match="503"):
            late.stats()
        done = CliRunner().invoke(app, ["lookup", "a", "--url", server.url], env={"LMKV_AGENT_TOKEN": TOKEN})
        assert "too many connections: try again later" in done.output


@pytest.mark.parametrize(("files", "most"), [(256, 32), (1 << 20, 128)])
def test_connections_leave_files_to_the_engine(files: int, most: int) -> None:
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (min(files, hard) if hard >= 0 else files, hard))
    try:
        assert max_connections() == most if files <= hard or hard < 0 else max_connections() <= most
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


def test_nothing_of_a_stranger_is_logged_a_line_each(
    server: AgentServer, caplog: pytest.LogCaptureFixture, capfd: pytest.CaptureFixture[str]
) -> None:
    for sent in (
        b"\0\r\n\r\n",
        b"GET / HTTP/1.1\r\n\r\n",
        b"GET / HTTP/1.1\r\nHost: x\r\nUpgrade: websocket\r\n\r\n",
        b"POST /v1/lookup HTTP/1.1\r\nHost: x\r\nTransfer-Encoding: chunked\r\n\r\n-1\r\n\r\n",
        b"GET / HTTP/1.1\r\nHost: x\r\n\r\nno request at all\r\n\r\n",
    ):
        with connect(server) as connection:
            connection.sendall(sent)
            assert rest(connection)
    assert caplog.messages == []
    assert capfd.readouterr().err == ""


class TestPace:
    @pytest.fixture
    def clocks(self, monkeypatch: pytest.MonkeyPatch) -> SimpleNamespace:
        """Clocks that stand still; pauses move them."""
        clocks = SimpleNamespace(computed=0.0, now=0.0, pauses=[])

        def sleep(seconds: float) -> None:
            clocks.pauses.append(seconds)
            clocks.now += seconds

        time: Any = SimpleNamespace(thread_time=lambda: clocks.computed, monotonic=lambda: clocks.now, sleep=sleep)
        monkeypatch.setattr(lmkv.agent.server, "time", time)
        return clocks

    def computing(self, clocks: SimpleNamespace, computed: float, waited: float) -> None:
        """A loop runs 500 calls, each of which takes so long."""
        loop = paced_loop()

        def compute(left: int) -> None:
            clocks.computed += computed
            clocks.now += computed + waited
            if left:
                loop.call_soon(compute, left - 1)
            else:
                loop.stop()

        loop.call_soon(compute, 500)
        loop.run_forever()
        loop.close()

    def test_a_loop_takes_a_tenth_at_most(self, clocks: SimpleNamespace) -> None:
        self.computing(clocks, 0.01, 0.1)
        assert clocks.pauses == [], "one that has little to do never pauses"
        clocks.computed = clocks.now = 0.0
        self.computing(clocks, 0.02, 0.0)
        assert 0.09 < (clocks.computed - 0.5) / clocks.now <= 0.101
        assert max(clocks.pauses) <= 1.0

    def test_what_takes_long_at_once_is_paid_for(self, clocks: SimpleNamespace) -> None:
        """However long the pause is, with a second in which the loop can end each time."""
        with closing(paced_loop()) as loop, ExitStack() as stack:
            one, other = map(stack.enter_context, socket.socketpair())
            one.send(b"a")
            left = [20]

            def compute() -> None:
                clocks.computed += 0.5
                clocks.now += 0.5
                left[0] -= 1
                if not left[0]:
                    loop.stop()

            loop.add_reader(other, compute)
            loop.run_forever()
        assert clocks.computed - 1 <= 0.101 * clocks.now
        assert max(clocks.pauses) <= 1.0

    def test_callers_are_served_one_at_a_time(self) -> None:
        """Or what all of them have sent would be parsed without a pause."""
        with closing(paced_loop()) as loop, ExitStack() as stack:
            selector = loop._selector  # type: ignore[attr-defined]
            for _ in range(9):
                one, other = map(stack.enter_context, socket.socketpair())
                one.send(b"a")
                selector.register(other, selectors.EVENT_READ)
            seen: set[int] = set()
            while len(seen) < 9:
                [(key, _)] = selector.select(0)
                seen.add(key.fd)

    def test_what_workers_compute_is_of_the_same_tenth(self, clocks: SimpleNamespace) -> None:
        """And they do not keep the loop from its half."""
        pace = Pace()
        computed = dict.fromkeys((_LOOP, _WORK), 0.0)

        def work() -> None:
            computed[_WORK] += 0.3
            clocks.computed += 0.3
            clocks.now += 0.3

        while clocks.now < 500:
            pace.work(work)
            while pace.spend(_LOOP, 0.01) == 0.0:
                computed[_LOOP] += 0.01
        assert 0.09 < sum(computed.values()) / clocks.now <= 0.102
        assert min(computed.values()) / clocks.now > 0.04
        assert max(clocks.pauses) <= 1.0


def test_callers_with_the_token_take_a_tenth_at_most(store: TieredStore, monkeypatch: pytest.MonkeyPatch) -> None:
    """Tokens are made at the same pace, a few at a time, and what is quick does not wait for them."""
    monkeypatch.setattr(lmkv.agent.server, "_SAVED", 0.1)
    computed: list[float] = []
    together: list[int] = []
    working: list[int] = []

    def compute(prompt: Any, template: Any) -> list[int]:
        working.append(1)
        together.append(len(working))
        begun = time.thread_time()
        while time.thread_time() < begun + 0.02:
            pass
        computed.append(time.thread_time() - begun)
        working.pop()
        return [1, 2, 3]

    service = CacheService(store, keys_of, compute, chunk_size=SIZE, pin_ttl=60.0)
    with at_port(service) as server, ExitStack() as stack:
        clients = [stack.enter_context(Client(server.url, TOKEN, timeout=LIMIT)) for _ in range(20)]
        pool = stack.enter_context(ThreadPoolExecutor(20))
        begun = time.monotonic()
        answers = [pool.submit(client.lookup, "a text") for client in clients]
        clients[0].stats()
        assert not all(answer.done() for answer in answers)
        assert {answer.result(LIMIT)["total_tokens"] for answer in answers} == {3}
        assert sum(computed) < 0.2 * (time.monotonic() - begun)
    assert max(together) <= 2


@pytest.mark.parametrize(
    ("prompt", "taken"),
    [("a b " * 1000, 800), ([{"role": "user", "content": "a"}] * 101, 0), ([{"content": [{"text": "a" * 12_928}]}], 0)],
)
def test_what_is_too_long_is_not_made_into_tokens(store: TieredStore, prompt: Any, taken: int) -> None:
    most = 0

    def count(prompt: Any, template: Any) -> list[int]:
        nonlocal most
        most = max(most, len(prompt))
        return tokenize(prompt)

    service = CacheService(store, keys_of, count, chunk_size=SIZE, pin_ttl=60.0, longest=100)
    refused = pytest.raises(httpx.HTTPStatusError, match="this engine takes 100 at most")
    with at_port(service) as server, Client(server.url, TOKEN) as client, refused:
        client.lookup(prompt)
    assert most == taken


def test_a_long_text_of_few_tokens_is_taken(store: TieredStore) -> None:
    service = CacheService(store, keys_of, lambda text, _: [len(text)], chunk_size=SIZE, pin_ttl=60.0, longest=100)
    assert service.lookup(Prompt(text=" " * 10_000))["total_tokens"] == 1


def test_one_read_is_short(server: AgentServer) -> None:
    with connect(server) as connection:
        eventually(lambda: bool(connections(server)))
        [one] = connections(server)
        read = one.transport.get_extra_info("socket").getsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF)
        assert read <= 32 << 10
        assert type(one.loop._selector).__module__ == lmkv.agent.server.__name__, "it is served by such a loop"
        assert connection.fileno() >= 0


def test_an_answer_without_the_token_says_that_the_connection_ends(server: AgentServer) -> None:
    with httpx.Client(base_url=server.url, trust_env=False) as client:
        for path, status in (("/v1/stats", 401), ("/", 200), ("/nothing", 404)):
            answer = client.get(path)
            assert (answer.status_code, answer.headers["connection"]) == (status, "close")
