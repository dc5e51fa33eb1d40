"""Real vLLM servers for tests: started, watched and stopped as process groups of their own."""

from __future__ import annotations

import contextlib
import json
import os
import re
import signal
import subprocess
import sys
import urllib.error
import urllib.request
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

from prometheus_client.parser import text_string_to_metric_families

from tests.kit import LIMIT, eventually
from tests.servers import free_port
from tests.vllm import triton_cpu
from tests.vllm.harness import BLOCK, ENVIRONMENT

START_TIMEOUT = 400.0
STOP_TIMEOUT = 120.0
LOG_LINES = 80
SERVED_NAME = "small"


def members(group: int) -> list[int]:
    """Living processes of a process group; zombies, which only wait for their parent, do not count."""
    found = []
    for stat in Path("/proc").glob("[0-9]*/stat"):
        with contextlib.suppress(OSError):
            state, _, pgrp, *_ = stat.read_text().rpartition(")")[2].split()
            if int(pgrp) == group and state not in "ZX":
                found.append(int(stat.parent.name))
    return found


def kill_group(group: int) -> None:
    """SIGKILL for all of a process group that a test made; returns when they have ended.

    But for Python's resource trackers: they remove the names of vLLM's shared memory, and end by themselves.
    """
    eventually(lambda: not kill_members(group), f"the end of process group {group}")
    try:
        eventually(lambda: not members(group), f"the end of process group {group}")
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(group, signal.SIGKILL)


def kill_members(group: int) -> int:
    """SIGKILL for all but the trackers; returns how many there were."""
    killed = 0
    for pid in members(group):
        with contextlib.suppress(OSError):
            if "resource_tracker" not in Path(f"/proc/{pid}/cmdline").read_text():
                os.kill(pid, signal.SIGKILL)
                killed += 1
    return killed


def shared_files(processes: Iterable[int]) -> set[Path]:
    """Shared memory with a name that any of these processes maps."""
    found = set()
    for pid in processes:
        with contextlib.suppress(OSError):
            words = Path(f"/proc/{pid}/maps").read_text().split()
            found |= {Path(word) for word in words if word.startswith("/dev/shm/")}
    return found


def complete(url: str, ids: list[int], *, timeout: float = 5 * LIMIT, **body: Any) -> Any:
    """One completion of eight tokens, its report included, by OpenAI's client. `body`: more of the request."""
    from openai import OpenAI

    params = {"lmkv.report": True, **body.pop("params", {})}
    extra = {"kv_transfer_params": params, **body}
    with OpenAI(base_url=f"{url}/v1", api_key="none", timeout=timeout, max_retries=0) as client:
        return client.completions.create(model=SERVED_NAME, prompt=ids, max_tokens=8, temperature=0, extra_body=extra)


def child_environment(**more: str) -> dict[str, str]:
    """The environment of vLLM's own processes: as in the harness, but logging as users see it."""
    quiet = {name: value for name, value in ENVIRONMENT.items() if name != "VLLM_CONFIGURE_LOGGING"}
    mine = {name: value for name, value in os.environ.items() if not name.startswith(("VLLM_", "LMKV_"))}
    made = {**mine, **quiet, **more}
    return made | triton_cpu.child_environment(made) if triton_cpu.is_wanted() else made


class Server:
    """vLLM's OpenAI API server in its default multi-process mode, on loopback.

    `options` go to lmkv, as `kv_connector_extra_config`. `engines`: with data parallelism. What it prints is in
    `log`. Its KV space is twice as large as the longest request.
    """

    def __init__(
        self,
        model: Path,
        log: Path,
        options: Mapping[str, Any],
        role: str = "kv_both",
        max_model_len: int = 2048,
        engines: int = 1,
        **environment: str,
    ) -> None:
        self.log = log
        self.max_model_len = max_model_len
        self.role = role
        self.engines = engines
        self.port = free_port()
        with log.open("wb") as sink:
            self.process = subprocess.Popen(
                self._command(model, options),
                stdin=subprocess.DEVNULL,
                stdout=sink,
                stderr=subprocess.STDOUT,
                env=child_environment(**environment),
                start_new_session=True,
            )

    def _command(self, model: Path, options: Mapping[str, Any]) -> list[str]:
        transfer = {
            "kv_connector": "LMKVConnector",
            "kv_role": self.role,
            "kv_load_failure_policy": "recompute",
            "kv_connector_extra_config": dict(options),
        }
        flags = {
            "--model": model,
            "--served-model-name": SERVED_NAME,
            "--host": "127.0.0.1",
            "--port": self.port,
            "--dtype": "float32",
            "--max-model-len": self.max_model_len,
            "--block-size": BLOCK,
            "--kv-cache-memory-bytes": self.max_model_len * (17 << 20) // 2048,
            "--data-parallel-size": self.engines,
            "--tool-call-parser": "hermes",
            "--kv-transfer-config": json.dumps(transfer),
        }
        named = [str(word) for flag in flags.items() for word in flag]
        switches = ["--enforce-eager", "--enable-prompt-tokens-details", "--enable-auto-tool-choice"]
        return [sys.executable, "-m", "vllm.entrypoints.openai.api_server", *named, *switches]

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    @property
    def agent(self) -> str:
        """The address of its agent API, from its log."""
        found = re.search(r"the agent API is at (\S+)", self.log_text())
        assert found
        return found[1]

    def wait_ready(self) -> None:
        """Raises with the end of the log when the server ends early or does not come up."""
        try:
            eventually(self._answers, "an answer of the server", START_TIMEOUT)
        except Exception as error:
            raise RuntimeError(f"{error}\n{self.log_tail()}") from error

    def _answers(self) -> bool:
        if self.process.poll() is not None:
            raise ChildProcessError(f"the server ended with {self.process.returncode}")
        try:
            return bool(self.get("/health", timeout=5) is not None)
        except (urllib.error.URLError, ConnectionError, TimeoutError):
            return False

    def get(self, path: str, timeout: float = LIMIT) -> str:
        with urllib.request.urlopen(self.url + path, timeout=timeout) as answer:
            text: str = answer.read().decode()
        return text

    def post(self, path: str, **body: Any) -> Any:
        kind = {"Content-Type": "application/json"}
        request = urllib.request.Request(self.url + path, json.dumps(body).encode(), kind)
        with urllib.request.urlopen(request, timeout=LIMIT) as answer:
            text = answer.read()
        return json.loads(text) if text else None

    def metric(self, name: str, **labels: str) -> float:
        """Sum of a Prometheus counter's samples that have these labels."""
        return sum(value for found, value in self.samples(name).get(name, []) if labels.items() <= found.items())

    def samples(self, beginning: str = "") -> dict[str, list[tuple[dict[str, str], float]]]:
        """Labels and values by name of all scraped metrics whose names begin so."""
        found: dict[str, list[tuple[dict[str, str], float]]] = {}
        lines = [line for line in self.get("/metrics").splitlines(keepends=True) if line.startswith(beginning)]
        for family in text_string_to_metric_families("".join(lines)):
            for sample in family.samples:
                found.setdefault(sample.name, []).append((sample.labels, sample.value))
        return found

    def log_text(self) -> str:
        return self.log.read_text(errors="replace")

    def log_tail(self) -> str:
        return "\n".join(self.log_text().splitlines()[-LOG_LINES:])

    def stop(self) -> None:
        """Stop it as an operator would, with SIGTERM; an error if any process of it stays."""
        group = self.process.pid
        if self.process.poll() is None:
            self.process.terminate()
        try:
            self.process.wait(STOP_TIMEOUT)
            eventually(lambda: not members(group), "the end of the server's processes")
        except (subprocess.TimeoutExpired, TimeoutError) as error:
            raise AssertionError(f"the server does not stop: {error}\n{self.log_tail()}") from error
        finally:
            kill_group(group)
            self.process.wait(LIMIT)

    def kill(self) -> None:
        """SIGKILL for all its processes at once, as when the machine runs out of memory."""
        kill_group(self.process.pid)
        self.process.wait(LIMIT)


@contextlib.contextmanager
def serving(model: Path, log: Path, **options: Any) -> Iterator[Server]:
    """A server that answers. If the block kills it, nothing more is done; if not, it is stopped."""
    with serving_together(Server(model, log, options)) as (server,):
        yield server


@contextlib.contextmanager
def serving_together(*servers: Any) -> Iterator[tuple[Any, ...]]:
    """Servers that start at the same time."""
    with contextlib.ExitStack() as stack:
        for server in servers:
            stack.callback(server.stop)
        for server in servers:
            server.wait_ready()
        yield servers
