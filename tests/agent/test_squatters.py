"""Who takes an engine's place: another user at its port, or a program that answers anything for it."""

from __future__ import annotations

import asyncio
import ctypes
import gzip
import os
import socket
import subprocess
import threading
from collections.abc import Iterator
from contextlib import ExitStack, closing, contextmanager, suppress
from functools import partial
from pathlib import Path
from typing import Any

import httpx
import pytest
from typer.testing import CliRunner

import lmkv.agent.peers
from lmkv.agent.client import AsyncClient, Client
from lmkv.agent.http import History
from lmkv.agent.peers import PeerError, Peers
from lmkv.agent.server import Address
from lmkv.cli.app import app
from lmkv.store.tiered import TieredStore
from lmkv.testing import ManualClock
from tests.agent.rude import Answer, RudePeer, as_http, as_json
from tests.agent.serving import TOKEN, engines_of, one_of, put, service_of, serving, short_socket, store_over
from tests.agent.test_fuzz_peers import LOOKED_UP, STATS
from tests.forked import Child, Tell
from tests.kit import LIMIT, eventually, raised
from tests.test_other_user import Another

TEXT = "the 24 bytes of a prompt"


def free_ports() -> Address:
    """A port of loopback with a free one behind it."""
    while True:
        with ExitStack() as stack, suppress(OSError, OverflowError):
            first = stack.enter_context(socket.create_server(("127.0.0.1", 0)))
            port = first.getsockname()[1]
            stack.enter_context(socket.create_server(("127.0.0.1", port + 1)))
            return Address(f"127.0.0.1:{port}")


def came(listener: socket.socket) -> bool:
    """Whether somebody has connected."""
    listener.setblocking(False)
    with suppress(BlockingIOError):
        listener.accept()[0].close()
        return True
    return False


# -- a name with two addresses -----------------------------------------------------------------------------


def a_stranger() -> socket.socket:
    """A listener at ::1 whose port is free at 127.0.0.1."""
    while True:
        with suppress(OSError), socket.create_server(("127.0.0.1", 0)) as free:
            return socket.create_server(("::1", free.getsockname()[1]), family=socket.AF_INET6)


def with_two_names(tell: Tell, hosts: str, folder: str) -> None:
    """In a namespace where localhost is ::1 first, as in most /etc/hosts, and where somebody else listens."""
    assert ctypes.CDLL(None, use_errno=True).unshare(0x20000) == 0
    subprocess.run(["mount", "--make-rprivate", "/"], check=True)
    subprocess.run(["mount", "--bind", hosts, "/etc/hosts"], check=True)
    found: list[Any] = [socket.getaddrinfo("localhost", 80)[0][4][0]]
    with store_over(Path(folder)) as store, a_stranger() as stranger:
        put(store, TEXT)
        name = f"localhost:{stranger.getsockname()[1]}"
        with serving(service_of(store), service_of(store), first=Address(name)) as servers:
            for url in (f"http://{name}", f"http://LocalHost.:{name.partition(':')[2]}/", servers[0].url):
                with Client(url, TOKEN) as client:
                    found.append(client.lookup(TEXT)["hit_tokens"])
                found.append(asyncio.run(asked_by_async(url)))
            for words in (["lookup", TEXT, "--url", name], ["top", "--url", name], ["top", "--url", f"http://{name}"]):
                found += [CliRunner().invoke(app, words, env={"LMKV_AGENT_TOKEN": TOKEN}).exit_code]
            found += [servers[0].url.startswith("http://127.0.0.1:"), came(stranger)]
    tell(found)


async def asked_by_async(url: str) -> int:
    async with AsyncClient(url, TOKEN) as client:
        return int((await client.lookup(TEXT))["hit_tokens"])


@pytest.mark.skipif(os.geteuid() != 0, reason="only root has namespaces of its own")
def test_localhost_is_one_address(tmp_path: Path) -> None:
    hosts = tmp_path / "hosts"
    hosts.write_text("::1 localhost\n127.0.0.1 localhost\n")
    if not socket.has_ipv6 or subprocess.run(["unshare", "-m", "true"], check=False).returncode:
        pytest.skip("no namespaces, or no IPv6")
    with Child(with_two_names, str(hosts), str(tmp_path / "kv")) as child:
        assert child.heard() == ["::1", *[23] * 6, 0, 0, 0, True, False]


# -- the port of an engine that went away ------------------------------------------------------------------


def test_whoever_has_its_port_is_asked_nothing(store: TieredStore) -> None:
    first = free_ports()
    put(store, TEXT)
    with serving(service_of(store), service_of(store), first=first) as servers, Client(servers[0].url, TOKEN) as client:
        assert len(engines_of(client.lookup(TEXT))) == 2
        servers[1].close()
        with closing(first.of_engine(1).bind()[0]) as stranger:
            assert "unavailable" in engines_of(client.stats())[1]
            assert client.lookup(TEXT)["hit_tokens"] == 23
            assert not came(stranger)


def test_an_engine_announces_itself_to_nobody_at_a_port(store: TieredStore) -> None:
    first = free_ports()
    with closing(first.bind()[0]) as stranger, one_of(service_of(store), first, 1):
        with RudePeer(first.private(0)) as other:
            eventually(lambda: bool(other.asked), "it announces itself where only its user can be")
            assert b"POST /v1/engines" in other.asked[0]
        assert not came(stranger)


def squat(folder: str, mode: int) -> None:
    Path(folder).mkdir()
    Path(folder).chmod(mode)


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can become another user")
@pytest.mark.parametrize("mode", [0o700, 0o777])
def test_a_folder_that_another_user_made_is_not_used(
    store: TieredStore, memory_path: Path, mode: int, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    memory_path.chmod(0o1777)
    folder = memory_path / f"lmkv-{os.geteuid()}"
    monkeypatch.setattr("lmkv.agent.server._bases", lambda: [str(memory_path)])
    with Another(squat, str(folder), mode), one_of(service_of(store), free_ports()) as server:
        assert "lmkv needs a 0700 folder of this user here" in caplog.text
        with Client(server.url, TOKEN) as client:
            assert client.stats()["tiers"], "it goes on alone"
    assert list(folder.iterdir()) == []


def test_the_folder_is_its_users_alone(memory_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Where others could replace it, and where its mode has changed, there is none."""
    monkeypatch.setattr("lmkv.agent.server._bases", lambda: [str(memory_path)])
    first = Address("127.0.0.1:8377")
    path = Path(first.private(3).text.removeprefix("unix:"))
    assert (path.parent.stat().st_mode & 0o7777, path.suffix) == (0o700, ".3")
    assert first.private(3) == Address("localhost:8377").private(3) != Address("127.0.0.1:8378").private(3)
    path.parent.chmod(0o750)
    raised(PermissionError, "0700 folder", first.private, 3)
    path.parent.chmod(0o700)
    memory_path.chmod(0o777)
    raised(PermissionError, r"other users may replace", first.private, 3)
    memory_path.chmod(0o1777)
    assert first.private(3).text == f"unix:{path}"


# -- answers that are none ---------------------------------------------------------------------------------


@contextmanager
def beside(store: TieredStore, answer: Answer | None = None) -> Iterator[tuple[Client, RudePeer]]:
    """Engine 0, and one that answers anything."""
    first = short_socket()
    with (
        one_of(service_of(store), first) as server,
        RudePeer(first.private(1), answer) as other,
        Client(server.url, TOKEN) as client,
    ):
        yield client, other


def without_end(_: bytes, connection: socket.socket) -> None:
    connection.sendall(b"HTTP/1.1 200 OK\r\n\r\n")
    while True:
        connection.sendall(b" " * (1 << 20))


def bomb(_: bytes, connection: socket.socket) -> None:
    body = gzip.compress(b" " * (64 << 20))
    connection.sendall(as_http(body, headers="Content-Encoding: gzip\r\n"))


def drop_by_drop(beginning: bytes) -> Answer:
    """Slowly enough that no single wait is long."""
    pause = threading.Event()

    def answer(_: bytes, connection: socket.socket) -> None:
        connection.sendall(beginning)
        while True:
            connection.sendall(b"a")
            pause.wait(0.01)

    return answer


@pytest.mark.parametrize(
    ("answer", "seconds"),
    [
        (without_end, LIMIT),
        (bomb, LIMIT),
        (drop_by_drop(b"HTTP/1.1 200 OK\r\n\r\n"), 0.5),
        (drop_by_drop(b"HTTP/1.1 200 OK\r\nX: "), 0.5),
    ],
    ids=["endless", "bomb", "slow body", "slow header"],
)
def test_no_answer_is_read_without_bounds(
    store: TieredStore, answer: Answer, seconds: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Neither by an engine, nor by a program that asks one."""
    with RudePeer(short_socket(), answer) as rude, Client(rude.url, timeout=seconds, most=1 << 20) as client:
        raised((httpx.TransportError, ValueError), "", client.stats)
        assert b"gzip" not in rude.asked[0]
    monkeypatch.setattr(lmkv.agent.peers, "AsyncClient", partial(AsyncClient, timeout=seconds))
    with beside(store, answer) as (client, rude):
        client.announce(1)
        assert "unavailable" in engines_of(client.stats())[1]
        assert b"gzip" not in rude.asked[0]


def test_who_answers_nonsense_is_asked_again_once_it_announces_itself(store: TieredStore) -> None:
    with beside(store) as (client, other):
        for answer in (as_json({}), as_http(b"[" * 200_000), as_json({**STATS, "tiers": [{"name": "cpu"}]})):
            other.bytes = answer
            client.announce(1)
            before = len(other.asked)
            for _ in range(3):
                why = engines_of(client.stats())[1]["unavailable"]
                assert "not from this version of lmkv" in why
                assert client.requests()["unavailable"] == {"1": why}
            assert len(other.asked) == before + 1
        other.bytes = as_json(STATS)
        client.announce(1)
        assert engines_of(client.stats())[1]["lookup_tokens"] == 5
        other.bytes = as_json(LOOKED_UP)
        assert engines_of(client.lookup(TEXT))[1]["hit_tokens"] == 8


def test_who_never_comes_back_is_forgotten() -> None:
    """And the history goes on."""
    first, clock = short_socket(), ManualClock()

    async def play() -> None:
        peers = Peers(0, lambda number: first.private(number).url, TOKEN, clock)

        async def stats() -> dict[str, Any]:
            found = await peers.ask(lambda: dict(STATS), "GET", "/v1/stats")
            return {**STATS, "engines": list(found.values())}

        history = History(stats, interval=0.0)
        running = asyncio.create_task(history.run())
        peers.announced(1)
        while "unavailable" not in (await stats())["engines"][1]:
            await asyncio.sleep(0)
        before = len(history.snapshot()["samples"])
        clock.advance(299)
        assert len((await stats())["engines"]) == 2
        for _ in range(10):
            await asyncio.sleep(0)
        assert len(history.snapshot()["samples"]) <= before + 1
        clock.advance(2)
        while len(history.snapshot()["samples"]) < before + 3:
            await asyncio.sleep(0)
        with pytest.raises(PeerError, match=r"there is no engine .*; the engines are 0"):
            await peers.ask(lambda: dict(STATS), "POST", "/v1/lookup", {"engine": 1})
        running.cancel()

    asyncio.run(asyncio.wait_for(play(), LIMIT))


def test_the_history_outlives_any_error(caplog: pytest.LogCaptureFixture) -> None:
    errors = [KeyError("tiers"), RecursionError(), ValueError("\ud800"), OSError()]

    async def stats() -> dict[str, Any]:
        if errors:
            raise errors.pop()
        return dict(STATS)

    async def play() -> None:
        history = History(stats, interval=0.0)
        running = asyncio.create_task(history.run())
        while not history.snapshot()["samples"]:
            await asyncio.sleep(0)
        running.cancel()

    asyncio.run(asyncio.wait_for(play(), LIMIT))
    assert [record.levelname for record in caplog.records if "statistics" in record.getMessage()] == ["WARNING"]


@pytest.mark.parametrize("nonsense", [b"[" * 200_000, b"[]", b"1", b"no JSON"])
def test_an_engine_announces_itself_again_whatever_is_answered(
    store: TieredStore, nonsense: bytes, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(lmkv.agent.peers, "_RETRY", 0.01)
    first = short_socket()
    with RudePeer(first.private(0)) as other:
        other.bytes = as_http(nonsense)
        with one_of(service_of(store), first, 1):
            eventually(lambda: len(other.asked) >= 3, "it goes on")
    assert len([line for line in caplog.messages if "cannot announce itself" in line]) == 1
