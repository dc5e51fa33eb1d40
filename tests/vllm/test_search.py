"""A search for wrong KV that goes on where it stopped: errors within lmkv, preemption, eviction, asynchronous steps.

Each seed is an engine of its own. What a block has is compared with the KV that the same tokens had before, and each
answer with vLLM's. The next seed, and what was found, are kept with pytest's cache, in d/search.
"""

from __future__ import annotations

import functools
import importlib
import inspect
import json
import pkgutil
import random
import threading
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
from attrs import asdict, define, field

import lmkv.store
import lmkv.vllm.scheduler
from tests.vllm.alone import Alone
from tests.vllm.harness import engine, external_hits, generated, pipelining
from tests.vllm.kv_oracle import KVOracle
from tests.vllm.test_pressure import REQUESTS, TIGHT, _prompts

SEEDS_A_RUN = 40


LAST_RESORTS = {"take_plan", "fail_load", "give_up", "hit_sources"}
"""Methods that the connector calls after an error, or that must not have one: nothing stands behind them."""


@define
class Search:
    """`seed`: the next one. `found`: the seeds that showed something wrong, and what it was."""

    seed: int = 0
    requests: int = 0
    hits: int = 0
    errors: int = 0
    compared: int = 0
    found: dict[str, str] = field(factory=dict)


def own_methods() -> Iterator[tuple[type, str]]:
    """The methods of lmkv's classes that run within vLLM's scheduler."""
    names = list[str]()
    for package in (lmkv.vllm.scheduler, lmkv.store):
        names += [module.name for module in pkgutil.iter_modules(package.__path__, f"{package.__name__}.")]
    for name in names:
        for owner in vars(importlib.import_module(name)).values():
            if inspect.isclass(owner) and owner.__module__ == name:
                yield from ((owner, each) for each, value in vars(owner).items() if is_method(each, value))


def is_method(name: str, value: object) -> bool:
    return inspect.isfunction(value) and not name.startswith("__") and not inspect.isgeneratorfunction(value)


class Errors:
    """Raises now and then in a method of lmkv's, in this thread, while it is switched on."""

    def __init__(self, patch: pytest.MonkeyPatch, draw: random.Random, rate: float) -> None:
        self.count, self.on = 0, False
        thread = threading.get_ident()

        def sheltered(method: Callable[..., Any]) -> Callable[..., Any]:
            @functools.wraps(method)
            def call(*args: Any, **kwargs: Any) -> Any:
                was, self.on = self.on, False
                try:
                    return method(*args, **kwargs)
                finally:
                    self.on = was

            return call

        def failing(method: Callable[..., Any]) -> Callable[..., Any]:
            @functools.wraps(method)
            def call(*args: Any, **kwargs: Any) -> Any:
                if self.on and threading.get_ident() == thread and draw.random() < rate:
                    self.count += 1
                    raise RuntimeError(f"injected into {method.__qualname__}")
                return method(*args, **kwargs)

            return call

        for owner, name in own_methods():
            patch.setattr(owner, name, (sheltered if name in LAST_RESORTS else failing)(vars(owner)[name]))


def search(model: Path, folder: Path, so_far: Search, right: list[list[int]]) -> str:
    """One engine's life; what was wrong, "" if nothing."""
    draw = random.Random(so_far.seed)
    extra = {"max_local_cpu_size": draw.choice((12, 24, 48)) / 1024, "chunk_size": draw.choice((64, 256))}
    if draw.random() < 0.5:
        extra |= {"local_disk": str(folder), "max_local_disk_size": 0.1, "disk_min_free": 0.0}
    asynchronous = draw.random() < 0.5
    prompts = _prompts()
    with pytest.MonkeyPatch.context() as patch, pipelining() if asynchronous else nullcontext():
        errors = Errors(patch, draw, draw.choice((0.0, 1e-5, 1e-4, 1e-3)))
        with engine(model, extra=extra, **TIGHT) as running, KVOracle(running) as oracle:
            for _ in range(2):
                order = draw.sample(range(REQUESTS), REQUESTS)
                errors.on = True
                outputs = running.run([prompts[index] for index in order], max_tokens=24)
                errors.on = False
                so_far.requests += len(outputs)
                # An error may be in the way of what a request reports.
                so_far.hits += sum(external_hits(output) > 0 for output in outputs if output.kv_transfer_params)
                answers = generated(outputs)
                other = [index for index, answer in zip(order, answers, strict=True) if answer != right[index]]
                if other or oracle.wrong:
                    return f"{extra} asynchronous={asynchronous}: other answers {other}, other blocks {oracle.wrong}"
            so_far.errors += errors.count
            so_far.compared += oracle.compared
    return ""


@pytest.mark.nightly("search")
@pytest.mark.timeout(3_600)
def test_the_search_finds_nothing(
    model: Path, tmp_path: Path, alone: Alone, pytestconfig: pytest.Config, capsys: pytest.CaptureFixture[str]
) -> None:
    right = alone(model, TIGHT, lambda plain: plain.ids(_prompts(), max_tokens=24))
    kept = Path(pytestconfig.cache.mkdir("search")) / "so_far.json"
    so_far = Search(**json.loads(kept.read_text())) if kept.exists() else Search()
    for _ in range(SEEDS_A_RUN):
        wrong = search(model, tmp_path / str(so_far.seed), so_far, right)
        if wrong:
            so_far.found[str(so_far.seed)] = wrong
        so_far.seed += 1
        kept.write_text(json.dumps(asdict(so_far)))
    with capsys.disabled():
        print(so_far)
    assert so_far.found == {}
    assert so_far.errors
    assert so_far.compared > so_far.requests
