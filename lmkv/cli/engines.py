"""Starts vLLM engines for measurements. Each engine runs in a child process that receives prompts.

`python -m lmkv.cli.engines FOLDER` runs a child process. Only the child imports vLLM. Parent and child exchange lines
of JSON over the child's standard input and output.
"""

from __future__ import annotations

import json
import os
import random
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from importlib.metadata import entry_points
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn

from attrs import asdict, field, frozen

from lmkv.cli.small_model import SmallModel

if TYPE_CHECKING:
    from vllm import LLM

CONNECTOR = "LMKVConnector"
CONNECTOR_MODULE = "lmkv.vllm.connector"
START_TIMEOUT, ANSWER_TIMEOUT, END_TIMEOUT = 900.0, 1800.0, 15.0
LOG = "vllm.log"
LOG_CHARACTERS = 4000
VOCABULARY = 1000
"""Prompts of measurements consist of random token ids below this number, because every model has these ids."""
MAX_SOCKET_FOLDER = 70
"""Largest number of characters of a folder's path. The names of vLLM's sockets follow the path, and the length of
the whole path is limited.
"""
WRITES_ENDED = 0.5
"""Seconds without a new chunk after which all writes to a tier count as ended."""
SHARED_DEVICE = {"gpu_memory_utilization": 0.1}
"""Options of engines that share a device with other engines."""
ENVIRONMENT = {
    "DO_NOT_TRACK": "1",
    "HF_HUB_OFFLINE": "1",
    "TRANSFORMERS_OFFLINE": "1",
    "VLLM_NO_USAGE_STATS": "1",
    "VLLM_LOGGING_LEVEL": "ERROR",
    # By default vLLM reserves a core without a connector and none with one, which would flatter lmkv.
    "VLLM_CPU_NUM_OF_RESERVED_CPU": "0",
}
# The engine core in the asked process, or in a separate one, vLLM's default.
ONE_PROCESS = {"VLLM_ENABLE_V1_MULTIPROCESSING": "0"}
SEVERAL_PROCESSES = {"VLLM_ENABLE_V1_MULTIPROCESSING": "1"}


def _small_model(value: Any) -> Any:
    return SmallModel(**value) if isinstance(value, dict) else value


@frozen(kw_only=True)
class EngineSpec:
    """Describes a vLLM engine to start. `model`: a name, a path, or a `SmallModel` to write first.

    `max_tokens`: number of tokens of the longest request. `kv_bytes`: size of vLLM's KV cache; None for vLLM's default.
    `prefix_caching`: whether vLLM's prefix cache is on. If off, only the connector finds repeated prompts. `settings`:
    the settings of the connector; None for an engine without a connector. `connector_module`: the module of a connector
    that vLLM does not know by name. `options`: further arguments of vLLM's `LLM`.
    """

    model: SmallModel | str = field(converter=_small_model)
    max_tokens: int
    kv_bytes: int | None = None
    prefix_caching: bool = False
    settings: Mapping[str, Any] | None = None
    connector: str = CONNECTOR
    connector_module: str | None = None
    options: Mapping[str, Any] = field(factory=dict)


# -- in the parent ----------------------------------------------------------------------------------------


class ChildFailedError(RuntimeError):
    """A child process has exited, or has not responded in time. The message contains the last log lines of the
    child.
    """


def same_code() -> dict[str, str]:
    """Return environment variables with which a child process imports the same lmkv as this process."""
    here, others = str(Path(__file__).resolve().parents[2]), os.environ.get("PYTHONPATH")
    return {"PYTHONPATH": f"{here}{os.pathsep}{others}" if others else here}


class ChildProcess:
    """A child process in a separate process group. `command`: its program, which reads requests with `Questions`.

    The log of the child goes to `folder`/vllm.log. The child imports the lmkv of this process. `env`: environment
    variables that override those of this process.
    """

    def __init__(self, command: Sequence[str], folder: Path, env: Mapping[str, str] | None = None) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        self.log = folder / LOG
        with self.log.open("ab") as log:
            self._child = subprocess.Popen(
                command,
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=log,
                text=True,
                env={**os.environ, **same_code(), **(env or {})},
                start_new_session=True,
            )

    def ask(self, question: object, timeout: float = ANSWER_TIMEOUT) -> Any:
        """Send a request to the child and return its response. Raises ChildFailedError if the child exits or takes too
        long.
        """
        assert self._child.stdin is not None
        assert self._child.stdout is not None
        # If the child has exited, `readline` below returns "".
        with suppress(BrokenPipeError):
            print(json.dumps(question), file=self._child.stdin, flush=True)
        # Before the timer's start, so that a child which the timer kills is late by this clock as well.
        started = time.monotonic()
        too_late = threading.Timer(timeout, self.kill)
        too_late.start()
        try:
            answer = self._child.stdout.readline()
        finally:
            too_late.cancel()
        if answer:
            return json.loads(answer)
        code, log = self._child.wait(), self.log.read_text(errors="replace")[-LOG_CHARACTERS:]
        late = time.monotonic() - started >= timeout
        what = f"did not answer within {timeout:.0f} s" if late else f"ended with exit code {code}"
        raise ChildFailedError(f"process {self._child.args!r} {what}:\n{log}")

    def kill(self) -> None:
        """Kill the child and all processes that it started. Idempotent."""
        with suppress(ProcessLookupError):
            os.killpg(self._child.pid, signal.SIGKILL)
        self._child.wait()

    def leave(self) -> None:
        """Tell the child to exit. Does not wait, because vLLM takes some seconds to exit."""
        assert self._child.stdin is not None
        with suppress(OSError):
            self._child.stdin.close()

    def close(self) -> None:
        """Tell the child to exit, and wait. Kills the child after END_TIMEOUT seconds. Idempotent."""
        self.leave()
        end(self._child, END_TIMEOUT)
        assert self._child.stdout is not None
        self._child.stdout.close()


def end(child: subprocess.Popen[str], timeout: float) -> None:
    """Wait until a child's process group has exited, for at most `timeout` seconds. Then kill the remaining processes.

    Waits for the whole group, because vLLM's shared memory is removed by the group's last process.
    """
    deadline = time.monotonic() + timeout
    try:
        while time.monotonic() < deadline and not _has_ended(child):
            time.sleep(0.05)
    finally:
        with suppress(ProcessLookupError):
            os.killpg(child.pid, signal.SIGKILL)
        child.wait()


def _has_ended(child: subprocess.Popen[str]) -> bool:
    child.poll()
    try:
        os.killpg(child.pid, 0)
    except ProcessLookupError:
        return True
    return False


@frozen(kw_only=True)
class Answer:
    """The result of one request. `token_ids`: the output. `ttft_s`: seconds to the first token. `hit_tokens`: number of
    tokens that the model did not compute.

    `sources`: number of loaded tokens, by tier. `load_gb_s`: speed of the copy to the device, in 1e9 bytes per second.
    `load_s`: duration of this copy in seconds. `wait_s`: seconds that the request waited for lower tiers before this
    copy.
    """

    token_ids: tuple[int, ...] = field(converter=tuple)
    ttft_s: float
    hit_tokens: int
    load_gb_s: float | None = None
    load_s: float = 0.0
    wait_s: float = 0.0
    sources: Mapping[str, int] = field(factory=dict)


class EngineProcess(ChildProcess):
    """A running vLLM engine in a separate process.

    `folder`: the folder for the engine's log and sockets, and for a small model. `python`: the interpreter of an
    environment with vLLM. `module`: the module that the child runs and that calls `serve`. Raises ChildFailedError if
    the engine does not start.
    """

    module = "lmkv.cli.engines"

    def __init__(
        self, spec: EngineSpec, folder: Path, env: Mapping[str, str] = ONE_PROCESS, *, python: str = sys.executable
    ) -> None:
        # -P: nothing in the current folder is meant to be imported.
        super().__init__([python, "-P", "-m", self.module, str(folder)], folder, env)
        try:
            machine = self.ask(asdict(spec), START_TIMEOUT)
        except BaseException:
            self.kill()
            self.close()
            raise
        self.engine: str = machine["engine"]
        self.device: str = machine["device"]

    def send(self, seed: int, tokens: int, output_tokens: int = 1, *, prefetch: bool = False) -> Answer:
        """Send a random prompt, which depends only on `seed`, and return the result. No other request runs meanwhile.

        `prefetch`: whether lmkv first loads the prompt's chunks into host memory and keeps them for `pin_ttl` seconds.
        """
        return Answer(
            **self.ask({"seed": seed, "tokens": tokens, "output_tokens": output_tokens, "prefetch": prefetch})
        )


def wait_until_settled(
    count: Callable[[], int],
    timeout: float = 60.0,
    *,
    clock: Callable[[], float] = time.monotonic,
    sleep: Callable[[float], None] = time.sleep,
) -> None:
    """Wait until no chunk has been written for a while, so that writes do not disturb a measurement.

    Waits at most `timeout` seconds. `count`: a function that returns the number of written chunks.
    """
    begun = since = clock()
    found = count()
    while clock() < min(begun + timeout, since + WRITES_ENDED):
        sleep(0.05)
        if (now := count()) != found:
            found, since = now, clock()


# -- in the child -----------------------------------------------------------------------------------------


class Questions:
    """The child's side of the pipe: an iterator over the parent's requests. The child must respond to each request.

    The iterator stops when the parent closes the pipe or exits. Other output of the child goes to its log.
    """

    def __init__(self) -> None:
        sys.stdout.flush()
        self._answers = os.fdopen(os.dup(1), "w", buffering=1)
        os.dup2(2, 1)

    def __iter__(self) -> Iterator[Any]:
        return map(json.loads, iter(sys.stdin.readline, ""))

    def answer(self, value: object) -> None:
        print(json.dumps(value), file=self._answers)


def serve(answer: Callable[[LLM, Any], object], prepare: Callable[[], object] = lambda: None) -> NoReturn:
    """Start the engine that the parent's first message describes. Then respond to each request.

    `answer(llm, request)`: a function that returns the response. `prepare`: a function to call before vLLM starts.
    """
    questions = Questions()  # before vLLM prints anything
    spec = EngineSpec(**next(iter(questions)))
    prepare()
    llm = open_engine(spec, Path(sys.argv[1]))
    questions.answer(_machine())
    for question in questions:
        questions.answer(answer(llm, question))
    # Without vLLM's shutdown hooks, which take several seconds.
    llm.llm_engine.engine_core.shutdown()
    os._exit(0)


def open_engine(spec: EngineSpec, folder: Path) -> LLM:
    """Start vLLM in this process, and return its `LLM`. `folder`: the folder for sockets and for a small model."""
    for name, value in ENVIRONMENT.items():
        os.environ.setdefault(name, value)
    if len(str(folder)) <= MAX_SOCKET_FOLDER:
        # An engine that is killed leaves its sockets behind: here they are removed with the folder.
        os.environ.setdefault("VLLM_RPC_BASE_PATH", str(folder))
    from vllm import LLM

    own: dict[str, Any] = {"model": spec.model}
    if isinstance(spec.model, SmallModel):
        own = {"model": str(folder / "model"), "dtype": spec.model.dtype}
        if not (folder / "model").exists():
            spec.model.write(folder / "model")
    own |= {"enforce_eager": True, **spec.options}
    return LLM(
        skip_tokenizer_init=True,
        max_model_len=spec.max_tokens,
        kv_cache_memory_bytes=spec.kv_bytes,
        enable_prefix_caching=spec.prefix_caching,
        disable_log_stats=False,
        kv_transfer_config=_transfer_config(spec),
        **own,
    )


def _transfer_config(spec: EngineSpec) -> Any:
    if spec.settings is None:
        return None
    from vllm.config import KVTransferConfig

    by_name = spec.connector != CONNECTOR or entry_points(group="vllm.general_plugins", name="lmkv")
    return KVTransferConfig(
        kv_connector=spec.connector,
        kv_role="kv_both",
        kv_load_failure_policy="recompute",
        kv_connector_extra_config=dict(spec.settings),
        kv_connector_module_path=spec.connector_module or (None if by_name else CONNECTOR_MODULE),
    )


def ask(llm: LLM, question: Mapping[str, Any]) -> dict[str, Any]:
    """Send one prompt, with no other request running, and return the fields of an `Answer`.

    The time to the first token is vLLM's own figure, so later tokens do not count.
    """
    from vllm import SamplingParams

    prompt = random.Random(question["seed"]).choices(range(VOCABULARY), k=question["tokens"])
    transfer = llm.llm_engine.vllm_config.kv_transfer_config
    claims = {"lmkv.report": True, "lmkv.prefetch": question["prefetch"]}
    reports = transfer is not None and transfer.kv_connector == CONNECTOR
    params = SamplingParams(
        temperature=0,
        max_tokens=question["output_tokens"],
        ignore_eos=True,
        detokenize=False,
        extra_args={"kv_transfer_params": claims} if reports else None,
    )
    [output] = llm.generate({"prompt_token_ids": prompt}, params, use_tqdm=False)
    report = (output.kv_transfer_params or {}).get("lmkv", {})
    seconds = report.get("load_seconds", 0.0)
    answer = Answer(
        token_ids=output.outputs[0].token_ids,
        ttft_s=output.metrics.first_token_latency,
        # Without lmkv's report: tokens that vLLM or another connector did not compute.
        hit_tokens=report.get("hit_tokens", output.num_cached_tokens or 0),
        load_gb_s=report["load_bytes"] / seconds / 1e9 if seconds else None,
        load_s=seconds,
        wait_s=report.get("wait_seconds", 0.0),
        sources=report.get("sources", {}),
    )
    return asdict(answer)


def _machine() -> dict[str, str]:
    import torch
    import vllm

    device = torch.cuda.get_device_name() if torch.cuda.is_available() else "cpu"
    return {"engine": f"vllm {vllm.__version__}", "device": device}


if __name__ == "__main__":
    serve(ask)
