"""vLLM engines for benchmarks: one arm of a comparison in a process of its own."""

from __future__ import annotations

import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from lmkv.cli.measure import prepare_environment
from lmkv.cli.model import SmallModel

MARK = "RESULT "
HOST = {"max_local_cpu_size": 4.0}


def arms(folder: Path) -> dict[str, dict[str, Any]]:
    """What each arm gives to `LLM`: connector settings and whether vLLM's own prefix cache is on.

    With it off, every repetition comes from lmkv; without a RAM tier, from lmkv's disk.
    """
    disk = {
        "local_cpu": False,
        "local_disk": str(folder / "kv"),
        "max_local_disk_size": 8.0,
        "disk_min_free": 0.0,
        "prefetch_deadline": 30.0,
        "load_or_recompute": False,
        **HOST,
    }
    return {
        "nothing": {"prefix_caching": False, "lmkv": None},
        "vllm prefix cache": {"prefix_caching": True, "lmkv": None},
        "lmkv ram": {"prefix_caching": False, "lmkv": HOST},
        "lmkv disk": {"prefix_caching": False, "lmkv": disk},
    }


def start(folder: Path, arm: dict[str, Any], tokens: int, requests: int = 1) -> Any:
    """The arm's engine, in this process, with KV space for so many requests of so many tokens at once."""
    prepare_environment()
    model = SmallModel(dtype="bfloat16")
    if not (folder / "model").exists():
        model.write(folder / "model")
    from vllm import LLM
    from vllm.config import KVTransferConfig

    transfer = None
    if arm["lmkv"] is not None:
        transfer = KVTransferConfig(
            kv_connector="LMKVConnector",
            kv_role="kv_both",
            kv_load_failure_policy="recompute",
            kv_connector_extra_config=arm["lmkv"],
        )
    return LLM(
        model=str(folder / "model"),
        skip_tokenizer_init=True,
        dtype=model.dtype,
        max_model_len=tokens,
        kv_cache_memory_bytes=(requests + 2) * (tokens + 256) * model.kv_bytes_per_token,
        enable_prefix_caching=arm["prefix_caching"],
        enforce_eager=True,
        disable_log_stats=False,
        kv_transfer_config=transfer,
    )


def settle(llm: Any) -> None:
    """Wait until what was stored is on disk too: the background writes are not what is measured."""
    connector = llm.llm_engine.engine_core.engine_core.scheduler.connector
    if connector is not None:
        connector._scheduler._store.drain(60)


def in_child(script: str, folder: Path, arm: str, *args: str) -> dict[str, Any]:
    """Run one arm of `script` in a process of its own and return what it reports."""
    command = [sys.executable, script, "--arm", arm, "--folder", str(folder), *args]
    done = subprocess.run(command, capture_output=True, text=True, timeout=600, check=False)
    for line in done.stdout.splitlines():
        if line.startswith(MARK):
            result: dict[str, Any] = json.loads(line[len(MARK) :])
            return result
    raise RuntimeError(f"arm {arm!r} failed:\n{done.stdout[-2000:]}\n{done.stderr[-4000:]}")


def answer(result: dict[str, Any]) -> None:
    """Report an arm's result to the parent, and leave without vLLM's own goodbyes."""
    print(MARK + json.dumps(result), flush=True)
    os._exit(0)


def cpu_seconds() -> float:
    return time.process_time()


median = statistics.median
scratch = tempfile.TemporaryDirectory
