"""vLLM engines to compare: each arm in a process of its own, which reports one JSON object."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

from attrs import frozen

from lmkv.cli.measure.hit import CONNECTOR, prepare_environment
from lmkv.cli.measure.small_model import SmallModel

MARK = "RESULT "
LONGEST = 70
"""Characters of a folder in which the name of a socket still finds room."""
TIMEOUT = 1200.0
SETTLED = 0.5
"""Seconds without a new file after which the disk tier counts as written."""


@frozen
class Arm:
    """`settings`: the connector's, None for no connector. `prefix_caching`: vLLM's own.

    With that off, every repetition comes from the connector; from lmkv without a RAM tier, from its disk.
    """

    prefix_caching: bool = False
    settings: Mapping[str, Any] | None = None
    connector: str = CONNECTOR


def arms(folder: Path, host_gb: float = 4.0) -> dict[str, Arm]:
    """By name. `folder`: where the disk arm may put its chunks."""
    host = {"max_local_cpu_size": host_gb}
    disk = {
        "local_cpu": False,
        "local_disk": str(folder / "kv"),
        "max_local_disk_size": 2 * host_gb,
        "disk_min_free": 0.0,
        "prefetch_deadline": 30.0,
        "load_or_recompute": False,
        **host,
    }
    return {
        "nothing": Arm(),
        "vllm prefix cache": Arm(prefix_caching=True),
        "lmkv ram": Arm(settings=host),
        "lmkv ram, within the step": Arm(settings={"load_mode": "sync", **host}),
        "lmkv ram, between steps": Arm(settings={"load_mode": "async", **host}),
        "lmkv disk": Arm(settings=disk),
    }


def start(folder: Path, arm: Arm, tokens: int, *, model: str | None = None, requests: int = 1) -> Any:
    """The arm's engine, with KV space for so many requests of so many tokens at once.

    Without `model` a small one with random weights, written into `folder` once; a model of one's own gets the
    KV space that vLLM gives it by itself.
    """
    prepare_environment()
    if len(str(folder)) <= LONGEST:
        # An engine that is ended leaves its sockets behind.
        os.environ.setdefault("VLLM_RPC_BASE_PATH", str(folder))
    from vllm import LLM

    own: dict[str, Any] = {"model": model}
    if model is None:
        small = SmallModel(dtype="bfloat16", max_position=max(32_768, 2 * tokens))
        path = folder / f"model-{small.max_position}"
        if not path.exists():
            small.write(path)
        space = (requests + 2) * (tokens + 256) * small.kv_bytes_per_token
        own = {"model": str(path), "dtype": small.dtype, "kv_cache_memory_bytes": space}
    return LLM(
        skip_tokenizer_init=True,
        max_model_len=tokens,
        enable_prefix_caching=arm.prefix_caching,
        enforce_eager=True,
        disable_log_stats=False,
        kv_transfer_config=_transfer_config(arm),
        **own,
    )


def _transfer_config(arm: Arm) -> Any:
    if arm.settings is None:
        return None
    from vllm.config import KVTransferConfig

    return KVTransferConfig(
        kv_connector=arm.connector,
        kv_role="kv_both",
        kv_load_failure_policy="recompute",
        kv_connector_extra_config=dict(arm.settings),
    )


def settle(folder: Path, limit: float = 60.0) -> None:
    """Wait until no chunk has been written for a while: background writes are not what is measured."""
    kv, end = folder / "kv", time.monotonic() + limit
    found, since = -1, time.monotonic()
    while kv.exists() and time.monotonic() < min(end, since + SETTLED):
        count = sum(1 for _ in kv.rglob("*"))
        if count != found:
            found, since = count, time.monotonic()
        time.sleep(0.05)


def end(child: subprocess.Popen[str], patience: float = 5.0) -> None:
    """End a child and its process group, if they have not ended by themselves within so many seconds.

    Whoever is killed leaves shared memory behind; so does a group whose last process, which removes it, is.
    """
    limit = time.monotonic() + patience
    try:
        while time.monotonic() < limit and not _gone(child):
            time.sleep(0.05)
    finally:
        with suppress(ProcessLookupError):
            os.killpg(child.pid, signal.SIGKILL)
        child.wait()


def _gone(child: subprocess.Popen[str]) -> bool:
    child.poll()
    try:
        os.killpg(child.pid, 0)
    except ProcessLookupError:
        return True
    return False


def in_child(
    script: Sequence[str], folder: Path, arm: str, *args: str, env: Mapping[str, str] | None = None
) -> dict[str, Any]:
    """Run one arm of `script` in processes of its own, which end with it, and return what it reports."""
    command = [sys.executable, *script, "--arm", arm, "--folder", str(folder), *args]
    pipe = subprocess.PIPE
    environment = {**os.environ, **(env or {})}
    child = subprocess.Popen(
        command, stdout=pipe, stderr=pipe, text=True, env=environment, start_new_session=True
    )
    try:
        out, errors = child.communicate(timeout=TIMEOUT)
    finally:
        end(child)
    for line in out.splitlines():
        if line.startswith(MARK):
            result: dict[str, Any] = json.loads(line[len(MARK) :])
            return result
    raise RuntimeError(f"arm {arm!r} failed:\n{out[-2000:]}\n{errors[-4000:]}")


def answer(result: Mapping[str, Any], llm: Any) -> None:
    """Report an arm's result to the parent, and leave without vLLM's own goodbyes."""
    print(MARK + json.dumps(result), flush=True)
    llm.llm_engine.engine_core.shutdown()
    os._exit(0)
