"""lmkv's part in the torture: faults within it, claims of requests, audits, and what it may not leave over.

python -m kv_connector_torture --around tests.torture.hooks:faults --connector @tests/torture/lmkv.json \\
    --kinds tests.torture.kinds: --faults delete,truncate,flip,empty --requests 10000
"""

from __future__ import annotations

import contextlib
import logging
import random
import threading
import time
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest

from kv_connector_torture.engine import Engine
from kv_connector_torture.run import Hooks
from kv_connector_torture.schedule import Schedule
from lmkv.backends.disk import LocalDiskBackend
from lmkv.memory.copiers import make_copier
from lmkv.testing.faults import FaultyBackend, FaultyCopier
from lmkv.vllm.scheduler.telemetry import Telemetry

RATE = 0.05
_SLOW = 0.02
_OUTAGES = 0.002
"""Share of steps with which one begins, in which the disk fails or falls silent."""
_HOLE = 0.5
_ABORTED_LOADS = 0.6
"""Share of the loads under way whose requests are aborted, in each step."""
_PATIENCE = 60.0
_MUST_HAPPEN = ("faults", "evictions", "audited_hits", "audited_loads")


@contextlib.contextmanager
def faults() -> Iterator[Hooks]:
    """Copies, reads and writes fail, five in a hundred, and the disk is away now and then."""
    # Both say a line or a stack for each of thousands of faults.
    for quiet in ("lmkv", "vllm"):
        logging.getLogger(quiet).setLevel(logging.CRITICAL)
    hooks = LMKV()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("lmkv.build.LocalDiskBackend", hooks.disk)
        patch.setattr("lmkv.vllm.worker.make_copier", hooks.copier)
        for name, counted in hooks.audits().items():
            patch.setattr(Telemetry, name, counted)
        yield hooks


class LMKV(Hooks):
    def __init__(self) -> None:
        super().__init__()
        self.counts.update(dict.fromkeys(_MUST_HAPPEN, 0))
        self._rng = random.Random()
        self._seed = 0
        self._asked: list[Sequence[int]] = []
        self._wrong: list[str] = []
        self._broken: list[FaultyBackend | FaultyCopier] = []
        self._backend: FaultyBackend | None = None
        self._peace_at: float | None = None
        self._evicted = self._capacity = 0

    def begins(self, schedule: Schedule, folder: Path) -> None:
        self._seed, self._folder = schedule.seed, folder
        self._rng.seed(schedule.seed)
        self._threads = set(threading.enumerate())

    def started(self, engine: Engine) -> None:
        self._side = engine.scheduler.connector.sides.scheduler
        self._store = self._side._store
        self._capacity = sum(tier.capacity_bytes or 0 for tier in self._store.stats().tiers)

    # -- faults -------------------------------------------------------------------------------------------

    def disk(self, *args: Any, **options: Any) -> FaultyBackend:
        dice = random.Random(self._rng.random())

        def dawdle(seconds: float) -> None:
            if dice.random() < RATE:
                time.sleep(seconds)

        inner, seed = LocalDiskBackend(*args, **options), self._rng.randrange(1 << 30)
        self._backend = FaultyBackend(inner, seed=seed, error_rate=RATE, latency=_SLOW, sleep=dawdle)
        self._broken.append(self._backend)
        return self._backend

    def copier(self, *args: Any) -> FaultyCopier:
        seed = self._rng.randrange(1 << 30)
        copier = FaultyCopier(make_copier(*args), seed=seed, error_rate=RATE, late_rate=RATE)
        self._broken.append(copier)
        return copier

    def strike(self) -> None:
        if self._peace_at is not None:
            if time.monotonic() > self._peace_at:
                self._make_peace()
        elif self._backend is not None and (dice := self._rng.random()) < _OUTAGES:
            self._peace_at = time.monotonic() + _HOLE
            self.counts["outages"] += 1
            if dice < _OUTAGES / 2:
                self._backend.black_hole()
            else:
                self._backend.error_rate = 1.0

    def _make_peace(self) -> None:
        """End an outage, so that what waits for the disk can end."""
        self._peace_at = None
        if self._backend is not None:
            self._backend.error_rate = RATE
            self._backend.release()

    # -- requests -----------------------------------------------------------------------------------------

    def transfer(self, name: str, tokens: Sequence[int]) -> dict[str, Any]:
        rng = random.Random(f"{self._seed} {name}")
        self._asked.append(tokens)
        claims: dict[str, Any] = {"lmkv.report": True}
        match rng.randrange(40):
            case 0:
                claims["lmkv.skip_save"] = True
            case 1:
                claims["lmkv.skip_load"] = True
            case 2:
                claims["lmkv.pin"] = 0.2
            case 3:
                claims["lmkv.prefetch"] = True
            case 4:
                claims["lmkv.prefetch_tokens"] = list(rng.choice(self._asked))
            case 5:
                claims["lmkv.tag.team"] = "blue"
        return claims

    def aborts(self, names: Iterable[str]) -> Iterator[str]:
        """Some whose blocks are just being filled."""
        loads = [name.partition("-")[0] for name in self._side.loads.between_steps]
        for name in names:
            if name in loads and self._rng.random() < _ABORTED_LOADS:
                self.counts["aborted_loads"] += 1
                yield name

    # -- checks -------------------------------------------------------------------------------------------

    def audits(self) -> dict[str, Any]:
        """Methods of `Telemetry` that count audits and keep their alarms: none of the faults is one for them."""
        audited, compared, audited_load = Telemetry.audited, Telemetry.compared, Telemetry.audited_load

        def count_hit(telemetry: Telemetry, tokens: int, seconds: float) -> None:
            self.counts["audited_hits"] += 1
            audited(telemetry, tokens, seconds)

        def count_chunks(telemetry: Telemetry, tiers: Sequence[str], wrong: Sequence[str], *, states: bool) -> None:
            self._wrong += [f"an audit has found wrong KV in {tier}" for tier in wrong]
            compared(telemetry, tiers, wrong, states=states)

        def count_load(telemetry: Telemetry, *, wrong: bool, again: bool = False) -> None:
            self.counts["audited_loads"] += not again
            if wrong:
                self._wrong.append(f"an audit has found a wrong load{', later' if again else ''}")
            audited_load(telemetry, wrong=wrong, again=again)

        return {"audited": count_hit, "compared": count_chunks, "audited_load": count_load}

    def alarm(self) -> str:
        return "; ".join(self._wrong)

    def left(self) -> str:
        self._make_peace()
        # Pins and prefetches that are over are released with it.
        self._store.reserve(())
        stats, slab = self._store.stats(), self._store.slab
        names = ("leased", "pinned", "writing", "loading", "pending_io")
        found = [f"{count} chunks {name}" for name in names if (count := getattr(stats, name))]
        if slots := slab.num_slots - slab.free_slots - stats.primary.chunks - stats.primary.states:
            found.append(f"{slots} slots are neither free nor in use")
        if self._side.busy:
            found.append("copies are under way")
        if self._side._requests:
            found.append(f"lmkv knows {len(self._side._requests)} requests")
        found += [
            f"{tier.name} takes {tier.used_bytes} of {tier.capacity_bytes} bytes"
            for tier in stats.tiers
            if tier.capacity_bytes is not None and tier.used_bytes > tier.capacity_bytes
        ]
        self._evicted = sum(tier.evictions for tier in stats.tiers)
        return ", ".join(found)

    def ended(self) -> str:
        self.counts["evictions"] += self._evicted
        self.counts["faults"] += sum(each.faults for each in self._broken)
        self._broken.clear()
        found = []
        for thread in set(threading.enumerate()) - self._threads:
            if "lmkv" in thread.name:
                thread.join(_PATIENCE)
                if thread.is_alive():
                    found.append(f"thread {thread.name} outlives its engine")
        nbytes = sum(path.stat().st_size for path in self._folder.rglob("*") if path.is_file())
        if nbytes > self._capacity + 65536:
            found.append(f"{nbytes} bytes on tiers of {self._capacity}")
        return ", ".join(found)
