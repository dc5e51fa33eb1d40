"""`lmkv demo` as a user runs it, at a small size: what it shows is what it exits with."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from urllib.parse import quote

import pytest

from tests.backends.remote.own_network import INFINISTORE, MOONCAKE, infinistore_server, mooncake_servers
from tests.servers import object_server, redis_server
from tests.vllm.server import child_environment

LMKV = Path(sys.executable).with_name("lmkv")
SMALL = ["--tokens", "1500", "--layers", "4", "--hidden", "256"]


def demo(*arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [LMKV, "demo", *SMALL, *arguments],
        env=child_environment(),
        capture_output=True,
        text=True,
        timeout=800,
        check=False,
    )


def last_line(done: subprocess.CompletedProcess[str]) -> dict[str, Any]:
    assert done.returncode == 0, done.stderr
    found: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return found


def test_from_memory() -> None:
    shown = last_line(demo("--json"))
    assert {"cold_ttft_s", "warm_ttft_s", "speedup", "engine", "device"} <= set(shown)
    assert (shown["prompt_tokens"], shown["hit_tokens"], shown["outputs_equal"]) == (1500, 1499, True)


def test_from_disk_after_a_kill(tmp_path: Path) -> None:
    shown = last_line(demo("--json", "--tier", "disk", "--disk", str(tmp_path)))
    times = ("cold_ttft_s", "warm_ttft_s", "disk_ttft_s", "speedup")
    assert {*times, "direct_io", "engine", "device"} <= set(shown)
    assert (shown["prompt_tokens"], shown["hit_tokens"], shown["outputs_equal"]) == (1500, 1499, True)
    assert shown["hit_tier"] == "disk"
    assert all(shown[time] > 0 for time in times)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("tokens", [1500, pytest.param(8000, marks=pytest.mark.nightly("fleet"))])
def test_from_a_server_that_another_engine_has_filled(tmp_path: Path, tokens: int) -> None:
    with redis_server("valkey", tmp_path) as server:
        shown = last_line(demo("--json", "--tier", "remote", "--url", server.url, "--tokens", str(tokens)))
    assert (shown["prompt_tokens"], shown["hit_tokens"], shown["outputs_equal"]) == (tokens, tokens - 1, True)
    assert shown["hit_tier"] == "redis"
    assert shown["remote_ttft_s"] > 0


@contextmanager
def s3_url(folder: Path) -> Iterator[str]:
    with object_server("rclone", folder) as server:
        yield server.url("demo").replace("://", f"://{server.USER}:{quote(server.SECRET)}@", 1)


@contextmanager
def mooncake_url(folder: Path) -> Iterator[str]:
    with mooncake_servers(folder):
        yield f"mooncake://localhost:{MOONCAKE}"


@contextmanager
def infinistore_url(folder: Path) -> Iterator[str]:
    with infinistore_server(folder):
        yield f"infinistore://localhost:{INFINISTORE}"


STORES = {"s3": s3_url, "mooncake": mooncake_url, "infinistore": infinistore_url}


@pytest.mark.nightly("fleet")
@pytest.mark.parametrize("tier", STORES)
def test_from_each_other_store(tmp_path: Path, tier: str) -> None:
    with STORES[tier](tmp_path) as url:
        shown = last_line(demo("--json", "--tier", "remote", "--url", url))
    assert (shown["prompt_tokens"], shown["hit_tokens"], shown["outputs_equal"]) == (1500, 1499, True)
    assert shown["hit_tier"] == {"s3": "objects"}.get(tier, tier)


def test_a_full_disk_is_said_beforehand() -> None:
    done = demo("--tier", "disk", "--layers", "100000")
    assert done.returncode == 1
    assert "but the demo needs" in done.stderr
    assert done.stdout == ""
