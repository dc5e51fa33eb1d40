"""How much an agent saves by prefetching while its tool runs: examples/agent_prefetch.py, over a disk and over Redis.

    python benchmarks/agent.py [--turns 4] [--server redis-server] [--quick] [--json]

A vLLM server with a model of 32 small layers in bfloat16 (32 KiB of KV per token), and host memory for three
conversations of 6,000 tokens; two prompts of others in each turn, so that the conversation has to be read again. One
server after the other, with a disk and with Redis on loopback below; medians of the times to the first token.
"""

from __future__ import annotations

import sys
from pathlib import Path

# Not this folder: its copy.py would stand in for the standard library's.
sys.path[0] = str(Path(__file__).resolve().parents[1])

import json
import os
import shutil
import subprocess
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from typing import Any
from urllib.request import urlopen

from transformers import AutoTokenizer

from benchmarks._lmcache_server import free_ports
from benchmarks._timing import Row, arguments_of, finish
from benchmarks.outage import Server
from lmkv.cli.measure.process import end
from lmkv.cli.measure.small_model import SmallModel
from lmkv.cli.measure.vllm_engines import ENVIRONMENT

ROOT = Path(__file__).resolve().parents[1]
EXAMPLE = ROOT / "examples" / "agent_prefetch.py"
CHARACTERS, OTHERS, LONGEST = 6000, 2, 8192
HOST_GIB, KV_BYTES = 0.6, 640 << 20
START_TIMEOUT, END_TIMEOUT = 600.0, 60.0


@contextmanager
def serving(model: Path, log: Path, settings: dict[str, Any]) -> Iterator[list[str]]:
    """A server; where its API and lmkv's are, as options of the example."""
    port, agent = free_ports(2)
    own = {"max_local_cpu_size": HOST_GIB, "agent_listen": f"127.0.0.1:{agent}", "agent_token": "benchmark"}
    how = {"kv_connector": "LMKVConnector", "kv_role": "kv_both", "kv_load_failure_policy": "recompute"}
    words = ["--model", model, "--host", "127.0.0.1", "--port", port, "--max-model-len", LONGEST, "--enforce-eager"]
    words += ["--kv-cache-memory-bytes", KV_BYTES, "--enable-auto-tool-choice", "--tool-call-parser", "hermes"]
    words += ["--kv-transfer-config", json.dumps({**how, "kv_connector_extra_config": {**own, **settings}})]
    command = [sys.executable, "-m", "vllm.entrypoints.openai.api_server", *map(str, words)]
    env = {**os.environ, **ENVIRONMENT, "PYTHONPATH": str(ROOT)}
    with log.open("wb") as output:
        child = subprocess.Popen(command, stdout=output, stderr=output, env=env, text=True, start_new_session=True)
    try:
        wait(f"http://127.0.0.1:{port}/health", child, log)
        where = [f"http://127.0.0.1:{port}/v1", "--agent", f"http://127.0.0.1:{agent}", "--token", "benchmark"]
        yield ["--base-url", *where]
    finally:
        child.terminate()
        end(child, END_TIMEOUT)


def wait(url: str, child: subprocess.Popen[str], log: Path) -> None:
    deadline = time.monotonic() + START_TIMEOUT
    while child.poll() is None and time.monotonic() < deadline:
        with suppress(OSError), urlopen(url, timeout=5):
            return
        time.sleep(0.2)
    raise SystemExit(f"vLLM did not start:\n{log.read_text()[-2000:]}")


def few_blanks(model: Path) -> dict[str, Any]:
    """A model with random weights may write blanks in its tool's arguments for ever: they are made unlikely."""
    tokens = AutoTokenizer.from_pretrained(model)(" \t\r\n").input_ids
    return {"logit_bias": {str(token): -50 for token in tokens}}


def measured(name: str, model: Path, log: Path, settings: dict[str, Any], turns: int) -> list[Row]:
    with serving(model, log, settings) as where:
        what = ["--characters", str(CHARACTERS), "--others", str(OTHERS), "--turns", str(turns), "--json"]
        command = [sys.executable, str(EXAMPLE), *where, *what, "--body", json.dumps(few_blanks(model))]
        env = {**os.environ, "PYTHONPATH": str(ROOT)}
        printed = subprocess.run(command, stdout=subprocess.PIPE, text=True, env=env, check=True).stdout
    print(printed, end="", flush=True)
    without, with_it = (json.loads(printed.splitlines()[-1])[key] for key in ("without", "with"))
    before = f"{name}: first token without prefetch"
    return [Row(before, without, "s"), Row(f"{name}: with", with_it, "s", before, with_it / without)]


def main() -> int:
    parser = arguments_of(__doc__, quick="one turn")
    parser.add_argument("--turns", type=int, default=4, help="of each conversation")
    parser.add_argument("--server", default=shutil.which("redis-server") or shutil.which("valkey-server"))
    options = parser.parse_args()
    if not options.server:
        parser.error("no redis-server and no valkey-server here: --server PATH")
    turns = 1 if options.quick else options.turns
    redis = Server(options.server, free_ports(1)[0])
    with tempfile.TemporaryDirectory(prefix="lmkv-agent-") as folder:
        root = Path(folder)
        small = SmallModel(layers=32, hidden=512, dtype="bfloat16")
        small.write(root / "model")
        small.write_tokenizer(root / "model")
        disk = {"local_disk": str(root / "kv"), "max_local_disk_size": 8, "disk_min_free": 0}
        rows = measured("disk", root / "model", root / "disk.log", disk, turns)
        redis.start()
        try:
            url = {"remote_url": f"redis://127.0.0.1:{redis.port}"}
            rows += measured("Redis", root / "model", root / "redis.log", url, turns)
        finally:
            redis.kill()
    return finish(rows, options.json)


if __name__ == "__main__":
    sys.exit(main())
