"""Servers started as the page on moving says, from the commands that `lmkv config migrate` prints: they hit."""

from __future__ import annotations

import json
import re
import shlex
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from lmkv.cli.app import app
from tests.kit import eventually
from tests.vllm.harness import BLOCK, prompt
from tests.vllm.server import SERVED_NAME, Server, complete, serving_together

pytestmark = pytest.mark.nightly("moving")
LENGTH = 1500


class Started(Server):
    """A server of this command line, with the options that a machine without a GPU needs."""

    def _command(self, model: Path, options: Mapping[str, Any]) -> list[str]:
        return [*options["words"], "--port", str(self.port)]


def serve(model: Path) -> str:
    """What `vllm serve` runs: its build for CPUs has no such command."""
    words = [sys.executable, "-m", "vllm.entrypoints.openai.api_server", "--model", model]
    words += ["--served-model-name", SERVED_NAME, "--enable-prompt-tokens-details"]
    words += ["--host", "127.0.0.1", "--dtype", "float32", "--max-model-len", 2048, "--block-size", BLOCK]
    return shlex.join([*map(str, words), "--kv-cache-memory-bytes", str(17 << 20), "--enforce-eager"])


def migrated(command: str) -> tuple[list[str], str]:
    """The words of the command that is printed instead, and the comments below it."""
    done = CliRunner().invoke(app, ["config", "migrate", "--", *shlex.split(command)])
    assert (done.exit_code, done.stderr) == (0, "")
    first, _, comments = done.stdout.partition("\n")
    return shlex.split(first), comments


def started(model: Path, log: Path, words: list[str], **env: str) -> Started:
    return Started(model, log, {"words": words}, **env)


def overwrite(url: str) -> None:
    """Fill vLLM's KV space, of little more than two prompts, with others."""
    for number in range(4):
        complete(url, prompt(10_000 + number, 1900))


def test_lmcache_in_the_engines_process(model: Path, tmp_path: Path) -> None:
    (tmp_path / "lmc.yaml").write_text("chunk_size: 256\nlocal_cpu: true\nmax_local_cpu_size: 0.25\n")
    transfer = {"kv_connector": "LMKVConnector", "kv_role": "kv_both", "kv_load_failure_policy": "recompute"}
    words = [*shlex.split(serve(model)), "--kv-transfer-config", json.dumps(transfer)]
    server = started(model, tmp_path / "log", words, LMCACHE_CONFIG_FILE=str(tmp_path / "lmc.yaml"))
    with serving_together(server):
        ids = prompt(300, LENGTH)
        cold = complete(server.url, ids)
        overwrite(server.url)
        warm = complete(server.url, ids)
    assert warm.kv_transfer_params["lmkv"]["hit_tokens"] == LENGTH - 1
    assert warm.choices[0].text == cold.choices[0].text
    assert f"{LENGTH} tokens: lmkv found {LENGTH - 1} and loads {LENGTH - 1}" in (tmp_path / "log").read_text()


def test_lmcaches_server(model: Path, tmp_path: Path, memory_path: Path) -> None:
    words, comments = migrated(f"lmcache server --l1-size-gb 0.5 --chunk-size 256 --shm-name {memory_path.name}")
    at = words.index("MODEL")
    words[: at + 1] = shlex.split(serve(model))
    assert "each engine takes max_local_cpu_size (5 GiB) in addition" in comments
    with serving_together(*(started(model, tmp_path / name, words) for name in ("one", "two"))) as (one, two):
        ids = prompt(301, LENGTH)
        first = complete(one.url, ids)
        eventually(lambda: len(list(memory_path.rglob("*.kv1"))) >= 6, "chunks in shared memory")
        second = complete(two.url, ids)
    found = second.kv_transfer_params["lmkv"]["sources"]
    assert sum(found.values()) == found["shared_memory"] == LENGTH - 1
    assert second.choices[0].text == first.choices[0].text


def test_vllms_own_offloading(model: Path, tmp_path: Path) -> None:
    words, comments = migrated(f"{serve(model)} --kv-offloading-size 0.25 --kv-offloading-backend native")
    assert "--kv-offloading-backend has no effect" in comments
    with serving_together(started(model, tmp_path / "log", words)) as (server,):
        ids = prompt(302, LENGTH)
        cold = complete(server.url, ids)
        overwrite(server.url)
        warm = complete(server.url, ids)
    assert warm.kv_transfer_params["lmkv"]["hit_tokens"] == LENGTH - 1
    assert warm.choices[0].text == cold.choices[0].text
    log = (tmp_path / "log").read_text()
    assert not re.search("replaces|instead of LMKVConnector", log)
