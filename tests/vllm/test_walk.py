"""The README's commands, run one after the other exactly as a new user reads them.

Its models become a small one, its port a free one; `~` is an empty folder. `lmkv demo` is in test_demo.
"""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from tests.kit import eventually
from tests.pages import BLOCKS
from tests.vllm.server import Server, child_environment, serving_together

LMCACHE = """
chunk_size: 256
max_local_cpu_size: 0.25
local_disk: "file://{disk}/"
max_local_disk_size: 1
track_usage: false
"""
SMALL = "--dtype float32 --max-model-len 2048 --kv-cache-memory-bytes 33554432 --enforce-eager"
BEGINNING = "The beginning of the next prompt ..."
"""The prompt that the README prefetches."""

CONTEXT = ("The same words are before every question. " * 50)[:1800]
"""The prompt of the README's script."""


def block(word: str, language: str = "bash") -> str:
    """The README's one block that has this word."""
    blocks = [found.code for found in BLOCKS if (found.page, found.language) == ("README.md", language)]
    [found] = [code for code in blocks if word in code]
    return found


def offline_script() -> str:
    script = block("llm = LLM(", "python")
    small = (
        'model="small-model", dtype="float32", max_model_len=2048, kv_cache_memory_bytes=32 << 20, enforce_eager=True,'
    )
    return script.replace('model="Qwen/Qwen3-8B",', small).replace('"..."', repr(CONTEXT))


class Walk:
    """A user with an empty home, who pastes."""

    def __init__(self, home: Path) -> None:
        self.home = home
        self.disk = home / ".cache" / "lmkv"
        path = f"{Path(sys.executable).parent}:{os.environ['PATH']}"
        # As on a small machine, where nothing is late.
        sizes = {"LMKV_MAX_LOCAL_CPU_SIZE": "0.25", "LMKV_PREFETCH_DEADLINE": "60"}
        self.environment = {"HOME": str(home), "PATH": path, "COLUMNS": "80", **sizes}

    def shell(self, script: str, **more: str) -> str:
        """What a script prints on its standard output."""
        done = subprocess.run(
            ["bash", "-euo", "pipefail", "-c", script],
            cwd=self.home,
            env=child_environment(**{**self.environment, **more}),
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            timeout=400,
            check=False,
        )
        assert done.returncode == 0, f"{script}\n{done.stdout}\n{done.stderr}"
        return done.stdout

    def files(self) -> int:
        return len(list(self.disk.rglob("*.kv1")))


class PastedServer(Server):
    """The README's server, on a free port."""

    def _command(self, model: Path, options: Mapping[str, Any]) -> list[str]:
        served = f"--model {model.name} --host 127.0.0.1 --port {self.port} {SMALL}"
        start = f"exec {sys.executable} -m vllm.entrypoints.openai.api_server {served}"
        script = block("vllm serve").replace("vllm serve Qwen/Qwen3-8B", start)
        assert start in script
        return ["bash", "-euc", f"cd {model.parent}\n{script}"]

    def complete(self, text: str) -> dict[str, Any]:
        params = {"kv_transfer_params": {"lmkv.report": True}}
        answer = self.post("/v1/completions", model="small-model", prompt=text, max_tokens=1, **params)
        found: dict[str, Any] = answer["kv_transfer_params"]["lmkv"]
        return found


def test_what_the_readme_tells_a_new_user(tmp_path: Path) -> None:
    walk = Walk(tmp_path)
    printed = walk.shell(block("lmkv doctor"))
    assert "Nothing is wrong." in printed
    assert "small-model: 4 layers" in printed

    room = {"LMKV_DISK_MIN_FREE": "0"}
    started = PastedServer(tmp_path / "small-model", tmp_path / "server.log", {}, **walk.environment, **room)
    with serving_together(started) as (server,):
        assert server.complete(BEGINNING)["hit_tokens"] == 0
        eventually(lambda: walk.files() == 1, "the prompt on disk")
        pasted = block("/v1/prefetch").replace("localhost:8000", f"127.0.0.1:{server.port}")
        printed = walk.shell(pasted)
        prefetched, end = json.JSONDecoder().raw_decode(printed)
        assert prefetched["found_tokens"] == prefetched["ready_tokens"] == len(BEGINNING)
        assert re.search(rf"^lmkv_stored_tokens_total{{.*}} {len(BEGINNING)}.0$", printed[end:], re.MULTILINE)
        assert re.search(r"small-model .* float32 .* 1 .* 36 ", printed)
        assert "deleted 1 chunks" in printed
        assert walk.files() == 0
        assert server.complete(CONTEXT)["hit_tokens"] == 0
        eventually(lambda: walk.files() == 8, "seven chunks and a tail on disk")

    (tmp_path / "lmcache.yaml").write_text(LMCACHE.format(disk=walk.disk))
    (tmp_path / "offline.py").write_text(offline_script())
    # In one process it starts sooner; test_multiprocess has the other mode.
    quick = {"VLLM_ENABLE_V1_MULTIPROCESSING": "0", "VLLM_LOGGING_LEVEL": "ERROR"}
    printed = walk.shell(f"{block('config migrate')}\npython offline.py", **quick)
    assert "# Left out: track_usage" in (tmp_path / "lmkv.yaml").read_text()
    assert "'hit_tokens': 1799" in printed
