"""Trials. Each trial runs a schedule in a separate process, over fresh storage, so that no trial influences another
trial.
"""

from __future__ import annotations

import contextlib
import faulthandler
import functools
import gc
import importlib
import multiprocessing
import os
import signal
import sys
import tempfile
import time
import traceback
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from attrs import define, evolve, field, frozen

from kv_connector_torture import models
from kv_connector_torture.checks import Answers, Problem, answer
from kv_connector_torture.engine import (
    PREFILL_ENGINE,
    Engine,
    Pair,
    engine,
    for_this_device,
    new_side_channel,
    set_environment,
)
from kv_connector_torture.run import Execution, Hooks
from kv_connector_torture.schedule import Schedule
from kv_connector_torture.storage import Storage, fill_in, free_ports, serving

PRELOADED = [
    *("transformers", "vllm.engine.arg_utils", "vllm.sampling_params"),
    *("vllm.lora.request", "vllm.v1.engine.llm_engine"),
    "kv_connector_torture.trial",
]
"""Modules that take long to import. Their import starts no thread and touches no device."""

_REFERENCE = {
    "enable_prefix_caching": False,
    "num_gpu_blocks_override": 700,
    "max_num_batched_tokens": 640,
    "tensor_parallel_size": 1,
    "pipeline_parallel_size": 1,
    "distributed_executor_backend": None,
}
PATIENCE = 60.0
"""Seconds after which a request that has not ended counts as hanging."""

_ENOUGH = 4
"""A process that reports nothing for `_ENOUGH` times `Setup.patience` is killed."""


@frozen
class Setup:
    """The settings that all trials have in common.

    `connector`: the content of vLLM's kv_transfer_config, or None. `prefill`: the kv_transfer_config of a separate
    engine that computes each prompt first, or None. `server`: the command of a server that the connectors need, which
    listens on `{port}`. Each trial replaces `{folder}`, `{redis}`, `{port}` and `{port2}` in `connector`, `prefill` and
    `server`. `engine`: more options of the engines. `around`: PACKAGE.MODULE:NAME of context managers in which engines
    are made. `model`: the path of the model of the kind `own`. `patience`: seconds after which a request counts as
    hanging.
    """

    folder: Path
    connector: dict[str, Any] | None = None
    prefill: dict[str, Any] | None = None
    engine: dict[str, Any] = field(factory=dict)
    around: tuple[str, ...] = ()
    model: str = ""
    redis: str = ""
    server: str = ""
    patience: float = PATIENCE

    @property
    def storage(self) -> Storage:
        return Storage(self.folder / "storage", self.redis)

    def filled_in(self, port: int, other: int) -> Setup:
        places = {"folder": str(self.storage.folder), "port": str(port), "port2": str(other)}
        redis = places["redis"] = fill_in(self.redis, places)
        connector, server = fill_in(self.connector, places), fill_in(self.server, places)
        prefill = fill_in(self.prefill, places)
        return evolve(self, connector=connector, prefill=prefill, server=server, redis=redis)

    @property
    def log(self) -> Path:
        return self.folder / "log"


@define
class Result:
    """The result of a trial. `schedule`: the schedule with its field `said` complete. `answers`: the right answers that
    were not known before the trial. `log`: the end of the process's log if the trial has failed, else "".

    `at`: the index of the last operation that was begun, or None if the first engine has not started. `cut_off`:
    whether the deadline ended the trial before it had a result.
    """

    schedule: Schedule
    problem: Problem | None = None
    counts: Counter[str] = field(factory=Counter)
    answers: Answers = field(factory=dict)
    at: int | None = None
    log: str = ""
    seconds: float = 0.0
    cut_off: bool = False


class Trials:
    """Runs trials one after the other. `answers`: the right answers that all trials so far have found."""

    def __init__(self, setup: Setup) -> None:
        set_environment()
        self._setup = setup
        self._context = multiprocessing.get_context("forkserver")
        # A process that has imported vLLM, of which each trial is a copy.
        self._context.set_forkserver_preload(PRELOADED)
        self.answers: Answers = {}
        self.count = 0

    def run(self, schedule: Schedule, *, patience: float | None = None, deadline: float = float("inf")) -> Result:
        """Run a trial of the schedule. `patience`: seconds, by default those of the setup. At the deadline, the trial
        is ended without a result.
        """
        if time.monotonic() >= deadline:
            return Result(schedule, cut_off=True)
        self.count += 1
        port, other = free_ports(2)
        setup = evolve(self._setup.filled_in(port, other), patience=patience or self._setup.patience)
        setup.storage.empty_folder()
        started = time.monotonic()
        with serving(setup.server, port, setup.folder / "server-log"):
            setup.storage.empty_redis()
            result = self._run(setup, schedule, deadline)
        self.answers |= result.answers
        result.seconds = time.monotonic() - started
        return result

    def _run(self, setup: Setup, schedule: Schedule, deadline: float) -> Result:
        ours, its = self._context.Pipe(duplex=False)
        process = self._context.Process(target=_child, args=(setup, schedule, self.answers, its))
        process.start()
        its.close()
        result = Result(schedule)
        try:
            self._follow(process, ours, result, _ENOUGH * setup.patience, deadline)
        finally:
            _end(process)
            ours.close()
        if result.problem is not None:
            with contextlib.suppress(OSError):
                result.log = self._setup.log.read_text(errors="replace")
            if result.problem.kind == "death" and "Timeout (" in result.log:
                result.problem = Problem("hang", f"a call has not returned after {2 * setup.patience:.0f} s")
            result.log = result.log[-20000:]
        return result

    def _follow(self, process: Any, pipe: Any, result: Result, patience: float, deadline: float) -> None:
        """Copy the messages of the process into `result`, until its last message or its end."""
        while True:
            if not pipe.poll(max(0.0, min(patience, deadline - time.monotonic()))):
                result.cut_off = time.monotonic() >= deadline
                result.problem = None if result.cut_off else Problem("hang", "the process does not answer")
                return
            try:
                told = pipe.recv()
            except (EOFError, ConnectionError):
                _end(process)
                how = signal.strsignal(-process.exitcode) if process.exitcode < 0 else f"status {process.exitcode}"
                result.problem = Problem("death", f"the process has died: {how}")
                return
            for name, value in told.items():
                setattr(result, name, value)
            if "problem" in told:
                return


def _end(process: Any) -> None:
    """End the process and all processes that it started."""
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    # It leads no group yet when it is ended at its start.
    process.kill()
    process.join()


def _child(setup: Setup, schedule: Schedule, answers: Answers, pipe: Any) -> None:
    os.setsid()
    log = os.open(setup.log, os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
    os.dup2(log, 1)
    os.dup2(log, 2)
    # A trial that is killed leaves temporary files.
    tempfile.tempdir = os.environ["TMPDIR"] = str(setup.folder / "tmp")
    os.makedirs(tempfile.tempdir, exist_ok=True)
    # A collection visits only what is made from here on.
    gc.freeze()
    try:
        told = _Trial(setup, schedule, answers, pipe).run()
    except BaseException as error:  # noqa: BLE001 - whatever ended it is a result
        traceback.print_exc()
        told = {"problem": Problem("death", _last_words(error))}
    faulthandler.cancel_dump_traceback_later()
    sys.stdout.flush()
    sys.stderr.flush()
    pipe.send(told)
    # The engine of a trial that has failed cannot end in peace.
    os._exit(0)


def _last_words(error: BaseException) -> str:
    while error.__cause__ is not None:
        error = error.__cause__
    return f"{type(error).__name__}: {error}"


class _Trial:
    """The work in the process of a trial."""

    def __init__(self, setup: Setup, schedule: Schedule, answers: Answers, pipe: Any) -> None:
        self._setup, self._schedule, self._answers, self._pipe = setup, schedule, answers, pipe
        self._kind = models.kind_of(schedule.kind)
        self._armed = 0.0

    def run(self) -> dict[str, Any]:
        setup = self._setup
        self._alive()
        with contextlib.ExitStack() as stack:
            stack.enter_context(self._kind.around())
            given = [stack.enter_context(_named(name)()) for name in setup.around]
            hooks = [each for each in given if isinstance(each, Hooks)]
            written = setup.folder / "models"
            adapters = [models.write_adapter(number + 1, written) for number in range(self._kind.adapters)]
            schedule, found = answer(self._schedule, self._answers, self._reference, adapters, self._alive)
            self._pipe.send({"schedule": schedule, "answers": found})
            engines = (self._tortured, adapters, setup.storage, setup.patience, self._alive, self._reached)
            execution = Execution(schedule, self._answers | found, *engines, hooks)
            try:
                problem = execution.run()
            except Exception as error:  # noqa: BLE001 - whatever ended it is a result
                traceback.print_exc()
                problem = Problem("death", _last_words(error))
            return {"counts": execution.counts, "problem": problem}

    def _alive(self) -> None:
        """Put off the time at which the process ends itself with the stacks of all threads."""
        now = time.monotonic()
        if now - self._armed > 1.0:
            self._armed = now
            faulthandler.dump_traceback_later(2 * self._setup.patience, exit=True)

    def _reached(self, at: int) -> None:
        self._pipe.send({"at": at})

    def _model(self, weights: int) -> tuple[Path, dict[str, Any]]:
        if self._kind.make is None and self._kind.write is None:
            return Path(self._setup.model), {}
        return models.write(self._schedule.kind, weights, self._setup.folder / "models")

    def _options(self) -> dict[str, Any]:
        return {**self._kind.options, **for_this_device(self._kind.cpu)}

    def _reference(self, weights: int) -> contextlib.AbstractContextManager[Engine]:
        # The user's options decide what a model computes; the schedule's only how tight the engine is.
        return engine(self._model(weights)[0], {**self._options(), **self._setup.engine, **_REFERENCE})

    @contextlib.contextmanager
    def _tortured(self, weights: int) -> Iterator[Engine]:
        self._alive()
        path, written = self._model(weights)
        given = {**self._schedule.engine, **self._setup.engine}
        options = {**self._options(), **self._kind.tortured, **written, **given}
        # Other weights come under the same name.
        model = self._setup.folder / "model"
        model.unlink(missing_ok=True)
        model.symlink_to(path)
        with contextlib.ExitStack() as stack:
            make = None
            if self._setup.prefill is not None:
                new_side_channel()
                first = stack.enter_context(engine(model, {**options, **PREFILL_ENGINE}, self._setup.prefill))
                new_side_channel()
                make = functools.partial(Pair, prefill=first)
            yield stack.enter_context(engine(model, options, self._connector(), make))

    def _connector(self) -> dict[str, Any] | None:
        """Return the connector's settings, with the keys that the kind of model adds."""
        connector = self._setup.connector
        if connector is None or not self._kind.connector:
            return connector
        extra = {**connector.get("kv_connector_extra_config", {}), **self._kind.connector}
        return {**connector, "kv_connector_extra_config": extra}


def _named(name: str) -> Any:
    module, _, attribute = name.partition(":")
    return getattr(importlib.import_module(module), attribute)


def resolved(result: Result) -> Schedule:
    """Return the schedule of a failed trial up to the operation at which the trial failed. If no engine has started,
    return the first operation only.
    """
    return result.schedule.cut(result.schedule.operations[: (result.at or 0) + 1])
