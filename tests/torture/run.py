"""A run: engine after engine, over folders that outlive them, until enough was asked."""

from __future__ import annotations

import contextlib
import itertools
import logging
import os
import random
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import pytest

from lmkv.vllm.observe.telemetry import Telemetry
from tests.torture.conversations import Turn, converse
from tests.torture.counts import Counts
from tests.torture.drive import PATIENCE, Drive
from tests.torture.engines import VARIANTS, Model, Variant, reference, slot_bytes, tortured, write_models
from tests.torture.sabotage import Saboteur
from tests.vllm import triton_cpu
from tests.vllm.harness import ENVIRONMENT

_CONVERSATIONS = 60
_A_LIFE = 400
_REPORT_EVERY = 3.0


class Run:
    """`folder`: for models and disk tiers. `only`: a part of the names of the engines to use. `audits`: their rate."""

    def __init__(self, folder: Path, rng: random.Random, seed: int, only: str = "", audits: float = 0.3) -> None:
        self._audits = audits
        self.counts = Counts()
        self._folder = folder
        self._rng = rng
        self._seed = seed
        self._variants = {
            name: variant
            for name, variant in VARIANTS.items()
            if only in name and (variant.drafts is None or triton_cpu.is_wanted())
        }
        self._turns: dict[str, list[Turn]] = {}
        self._slot_bytes: dict[Path, int] = {}
        self._started = self._reported = time.monotonic()
        self._faults = 0

    def go(self, deadline: float, requests: int | None, alive: Callable[[], None]) -> None:
        os.environ.update(ENVIRONMENT, VLLM_CPU_CI_ENV="1")
        # Both say a line or a stack for each of thousands of faults.
        for quiet in ("lmkv", "vllm"):
            logging.getLogger(quiet).setLevel(logging.CRITICAL)
        # A short run still sees several engines.
        life = _A_LIFE if requests is None else min(_A_LIFE, -(-requests // min(4, len(self._variants))))
        models = write_models(self._folder / "models")
        for name in itertools.cycle(self._variants):
            left = life if requests is None else min(life, requests - self.counts.requests)
            if left <= 0 or time.monotonic() > deadline:
                return
            variant = self._variants[name]
            model = models[variant.model]
            self._prepare(model)
            alive()
            self._live(name, variant, model, left, alive)
            alive()

    def _prepare(self, model: Model) -> None:
        if model.target not in self._turns:
            with reference(model) as plain:
                self._turns[model.target] = converse(plain, self._rng, _CONVERSATIONS)
        if model.path not in self._slot_bytes:
            self._slot_bytes[model.path] = slot_bytes(model)

    def _live(self, name: str, variant: Variant, model: Model, requests: int, alive: Callable[[], None]) -> None:
        threads = set(threading.enumerate())
        disk = self._folder / "disk" / name
        saboteur = Saboteur(disk, self._rng)
        before = self.counts.faults

        def stepped() -> None:
            alive()
            self.counts.faults = before + saboteur.faults
            self._report(name)

        capacity = variant.disk * self._slot_bytes[model.path]
        with (
            self._counting(name),
            saboteur.at_work(),
            tortured(variant, model, disk, self._slot_bytes[model.path], self._audits) as running,
        ):
            Drive(running, self._turns[model.target], self._rng, self.counts, saboteur, stepped).run(requests)
            if variant.drafts is not None or model.drafts is not None:
                self.counts.drafting = True
                self.counts.accepted_drafts += running.accepted_drafts
        self.counts.engines += 1
        self._report(name, now=True)
        for thread in set(threading.enumerate()) - threads:
            if "lmkv" in thread.name:
                thread.join(PATIENCE)
                if thread.is_alive():
                    self.counts.leak(f"thread {thread.name} outlives its engine")
        files = [path for path in disk.rglob("*") if path.is_file()]
        nbytes = sum(path.stat().st_size for path in files)
        if nbytes > capacity + 65536:
            self.counts.leak(f"{nbytes} bytes on a disk tier of {capacity:.0f}")

    @contextlib.contextmanager
    def _counting(self, name: str) -> Iterator[None]:
        """Count the audits of engines, and their alarms."""
        audited, compared, audited_load = Telemetry.audited, Telemetry.compared, Telemetry.audited_load

        def count_hit(self_: Telemetry, tokens: int, seconds: float) -> None:
            self.counts.audited_hits += 1
            audited(self_, tokens, seconds)

        def count_chunks(self_: Telemetry, tiers: Sequence[str], wrong: Sequence[str], *, states: bool) -> None:
            for tier in wrong:
                self.counts.alarm(f"{name}: wrong KV in {tier}")
            compared(self_, tiers, wrong, states=states)

        def count_load(self_: Telemetry, *, wrong: bool, again: bool = False) -> None:
            self.counts.audited_loads += not again
            if wrong:
                self.counts.alarm(f"{name}: a wrong load{', later' if again else ''}")
            audited_load(self_, wrong=wrong, again=again)

        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(Telemetry, "audited", count_hit)
            patch.setattr(Telemetry, "compared", count_chunks)
            patch.setattr(Telemetry, "audited_load", count_load)
            yield

    def _report(self, name: str, *, now: bool = False) -> None:
        if not now and time.monotonic() - self._reported < _REPORT_EVERY:
            return
        self._reported = time.monotonic()
        counted = " ".join(f"{key}={value}" for key, value in self.counts.as_dict().items())
        print(f"torture: seed={self._seed} {self._reported - self._started:.0f}s [{name}] {counted}", flush=True)
