"""Remote stores that can be broken: each begins and ends the states of `STATES`, on real servers and mounts."""

from __future__ import annotations

import os
import shutil
import subprocess
from collections.abc import Callable, Iterator
from contextlib import ExitStack, closing, contextmanager
from pathlib import Path
from typing import Any

import pytest
from attrs import define, field, frozen
from redis import Redis

from tests.backends.remote.own_network import INFINISTORE, MOONCAKE, infinistore_server, mooncake_servers
from tests.backends.remote.test_redis import form_cluster, nodes_of_a_cluster
from tests.rules import Rule, RuledProxy, forward_all
from tests.servers import ObjectServer, Proxy, RedisServer, object_server, redis_server

STATES = (
    *("refuses writes", "refuses reads", "refuses deletions", "full", "another one", "slow", "gone", "half open"),
)
TIMEOUT = 0.5
LATE = 0.24
"""Seconds each way: a call takes about the timeout."""


@frozen
class State:
    """How it begins and ends; the latter where nothing is to be done also."""

    begin: Callable[[], object]
    end: Callable[[], object] = lambda: None


@define
class Breakable:
    """A store at a URL, and the states that it can be brought into."""

    url: str
    states: dict[str, State]
    settings: dict[str, Any] = field(factory=dict)


NO_RIGHTS = "it has no users and no rights"
MEANINGLESS = {
    "cluster": {"slow": "a client goes to the addresses that the nodes name, past any proxy"},
    "folder": {
        "refuses reads": "root, as whom the tests mount, may read everything",
        "refuses deletions": "who may write there may delete there",
        "slow": "a disk cannot be made slow without another kernel module",
        "half open": "the same",
    },
    "infinistore": {
        **dict.fromkeys(("refuses writes", "refuses reads", "refuses deletions"), NO_RIGHTS),
        "full": "it evicts its oldest values",
    },
    "mooncake": {
        **dict.fromkeys(("refuses writes", "refuses reads", "refuses deletions"), NO_RIGHTS),
        "full": "it evicts at 90 %",
        "slow": "a client goes to the addresses that the master names, past any proxy",
    },
}
"""States that a store cannot be in, or that a test cannot bring about, and why."""


def through(proxy: Proxy) -> dict[str, State]:
    """States of the way to a server."""

    def late(seconds: float) -> None:
        proxy.latency = seconds

    def deaf(value: bool) -> None:
        proxy.deaf = value

    return {
        "slow": State(lambda: late(LATE), lambda: late(0.0)),
        "half open": State(lambda: deaf(True), lambda: deaf(False)),
    }


def restarted(server: Any, empty: Callable[[], object] = lambda: None) -> Callable[[], None]:
    """Have another server without values at the same place."""

    def restart() -> None:
        server.kill()
        empty()
        server.start()

    return restart


# -- Redis ------------------------------------------------------------------------------------------------------


def asked(nodes: list[RedisServer], *command: str) -> None:
    for node in nodes:
        with closing(Redis(unix_socket_path=str(node.socket))) as client:
            client.execute_command(*command)


def fill(nodes: list[RedisServer]) -> None:
    """Have others take the last byte that the server may use."""
    for node in nodes:
        with closing(Redis(unix_socket_path=str(node.socket))) as client:
            used: Any = client.info("memory")
            client.config_set("maxmemory", int(used["used_memory"]))


def refusing(nodes: list[RedisServer], *commands: str) -> State:
    """The server's rights lack these commands. The connections that have asked stay."""
    rights = [[f"{sign}{command}" for command in commands] for sign in "-+"]
    return State(*(lambda all=all: asked(nodes, "ACL", "SETUSER", "default", *all) for all in rights))


def states_of_redis(nodes: list[RedisServer]) -> dict[str, State]:
    def each(call: Callable[[RedisServer], object]) -> Callable[[], object]:
        return lambda: [call(node) for node in nodes]

    return {
        "refuses writes": refusing(nodes, "set"),
        "refuses reads": refusing(nodes, "get"),
        "refuses deletions": refusing(nodes, "unlink"),
        "full": State(lambda: fill(nodes), lambda: asked(nodes, "CONFIG", "SET", "maxmemory", "0")),
        "another one": State(lambda: [restarted(node)() for node in nodes]),
        "gone": State(each(RedisServer.kill), each(RedisServer.start)),
        "half open": State(each(RedisServer.pause), each(RedisServer.resume)),
    }


@contextmanager
def redis(kind: str, folder: Path, _: pytest.TempPathFactory) -> Iterator[Breakable]:
    with redis_server(kind, folder) as server, closing(Proxy(server.port)) as proxy:
        yield Breakable(f"redis://127.0.0.1:{proxy.port}", states_of_redis([server]) | through(proxy))


@contextmanager
def cluster(_: str, __: Path, folders: pytest.TempPathFactory) -> Iterator[Breakable]:
    with nodes_of_a_cluster(folders, 3) as nodes:
        form_cluster(nodes)
        states = states_of_redis(nodes)
        states["another one"] = State(lambda: asked(nodes, "FLUSHALL"))
        yield Breakable(f"redis+cluster://127.0.0.1:{nodes[0].port}", states)


# -- object stores ----------------------------------------------------------------------------------------------


def is_listing(path: str) -> bool:
    return "list-type=" in path or "comp=list" in path


def answering(status: int, *methods: str) -> Rule:
    """A rule that answers these methods so, but no listing."""
    return lambda method, path: (status, b"") if method in methods and not is_listing(path) else None


def deletions(method: str, path: str) -> tuple[int, bytes] | None:
    bulk = method == "POST" and ("delete" in path or "comp=batch" in path)
    return (403, b"") if method == "DELETE" or bulk else None


@contextmanager
def objects(kind: str, folder: Path, _: pytest.TempPathFactory) -> Iterator[Breakable]:
    with object_server(kind, folder) as server, RuledProxy(server.port) as ruled, closing(Proxy(ruled.port)) as proxy:

        def rule(rule: Rule) -> State:
            return State(lambda: setattr(ruled, "rule", rule), lambda: setattr(ruled, "rule", forward_all))

        def empty() -> None:
            shutil.rmtree(server.bucket.parent)
            server.bucket.mkdir(parents=True)

        states = {
            "refuses writes": rule(answering(403, "PUT")), "refuses reads": rule(answering(403, "GET")),
            "refuses deletions": rule(deletions), "full": rule(answering(507, "PUT")),
            "another one": State(restarted(server, empty)), "gone": State(server.kill, server.start),
            **through(proxy),
        }  # fmt: skip
        keys = (
            {} if kind == "google" else {"remote_username": ObjectServer.USER, "remote_password": ObjectServer.SECRET}
        )
        yield Breakable(server.url("cache", port=proxy.port), states, keys)


def mounted(*arguments: str | Path) -> None:
    subprocess.run(["mount", *map(str, arguments)], check=True, capture_output=True)


def unmounted(folder: Path) -> None:
    subprocess.run(["umount", "-l", str(folder)], check=True)


@contextmanager
def a_folder(_: str, folder: Path, __: pytest.TempPathFactory) -> Iterator[Breakable]:
    """A tmpfs that is mounted at a second place, where lmkv finds it."""
    real, place = folder / "real", folder / "place"
    real.mkdir()
    place.mkdir()
    if os.geteuid():
        pytest.skip("only root may mount")
    with ExitStack() as stack:
        mounted("-t", "tmpfs", "-o", "size=64m", "lmkv-test", real)
        stack.callback(unmounted, real)
        mounted("--bind", real, place)
        stack.callback(subprocess.run, ["umount", "-l", str(place)], check=False, capture_output=True)

        def fill() -> None:
            with (real / "others").open("wb", buffering=0) as file:
                room = os.statvfs(real)
                os.posix_fallocate(file.fileno(), 0, room.f_bavail * room.f_bsize)

        yield Breakable(
            f"file://{place}/cache",
            {
                "refuses writes": State(
                    lambda: mounted("-o", "remount,bind,ro", place), lambda: mounted("-o", "remount,bind,rw", place)
                ),
                "full": State(fill, (real / "others").unlink),
                "another one": State(
                    lambda: mounted("-t", "tmpfs", "-o", "size=64m", "other", place), lambda: unmounted(place)
                ),
                "gone": State(lambda: unmounted(place), lambda: mounted("--bind", real, place)),
            },
        )


# -- others -----------------------------------------------------------------------------------------------------


@contextmanager
def infinistore(_: str, folder: Path, __: pytest.TempPathFactory) -> Iterator[Breakable]:
    with infinistore_server(folder) as server, closing(Proxy(INFINISTORE)) as proxy:
        states = {"another one": State(restarted(server)), "gone": State(server.kill, server.start), **through(proxy)}
        yield Breakable(f"infinistore://127.0.0.1:{proxy.port}/", states)


@contextmanager
def mooncake(_: str, folder: Path, __: pytest.TempPathFactory) -> Iterator[Breakable]:
    with mooncake_servers(folder) as servers:
        states = {
            "another one": State(restarted(servers.memory)),
            "gone": State(servers.master.kill, servers.master.start),
            "half open": State(servers.master.pause, servers.master.resume),
        }
        yield Breakable(f"mooncake://127.0.0.1:{MOONCAKE}/", states)


Made = Callable[[str, Path, pytest.TempPathFactory], Any]
STORES: dict[str, tuple[str, Made]] = {
    "redis": ("redis", redis),
    "valkey": ("valkey", redis),
    "cluster": ("valkey", cluster),
    "s3": ("moto", objects),
    "google": ("google", objects),
    "azure": ("azurite", objects),
    "folder": ("", a_folder),
    "infinistore": ("", infinistore),
    "mooncake": ("", mooncake),
}
