"""Sabotage around an engine: of copies, the disk, the files on it, and time."""

from __future__ import annotations

import contextlib
import random
import shutil
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from attrs import define, field

from lmkv.backends.disk.backend import LocalDiskBackend
from lmkv.memory.copier_factory import make_copier
from lmkv.testing.faults import FaultyBackend, FaultyCopier

RATE = 0.05
_SLOW = 0.02
_HOLE = 0.5


@define
class Saboteur:
    """Breaks single calls by itself, at `RATE`, and larger things when `strike` is called.

    `folder`: of the disk tier. `faults`: how much it broke.
    """

    folder: Path
    rng: random.Random
    _backends: list[FaultyBackend] = field(factory=list)
    _copiers: list[FaultyCopier] = field(factory=list)
    _strikes: int = 0
    _peace_at: float | None = None

    @property
    def faults(self) -> int:
        return self._strikes + sum(one.faults for one in (*self._backends, *self._copiers))

    @contextlib.contextmanager
    def at_work(self) -> Iterator[None]:
        """Have engines that are made in here get its disk and its copies."""
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr("lmkv.build.LocalDiskBackend", self._disk)
            patch.setattr("lmkv.vllm.worker.make_copier", self._copier)
            yield

    def _disk(self, *args: Any, **options: Any) -> FaultyBackend:
        dice = random.Random(self.rng.random())

        def dawdle(seconds: float) -> None:
            if dice.random() < RATE:
                time.sleep(seconds)

        backend = FaultyBackend(
            LocalDiskBackend(*args, **options),
            seed=self.rng.randrange(1 << 30),
            error_rate=RATE,
            latency=_SLOW,
            sleep=dawdle,
        )
        self._backends.append(backend)
        return backend

    def _copier(self, *args: Any) -> FaultyCopier:
        seed = self.rng.randrange(1 << 30)
        copier = FaultyCopier(make_copier(*args), seed=seed, error_rate=RATE, late_rate=RATE)
        self._copiers.append(copier)
        return copier

    def strike(self) -> None:
        """Once in a while: damage or delete a file, empty the folder, or let the disk fail or fall silent."""
        if self._peace_at is not None:
            if time.monotonic() > self._peace_at:
                self.make_peace()
            return
        dice = self.rng.random()
        if dice < 0.04:
            self._strikes += self._break_a_file()
        elif dice < 0.041:
            shutil.rmtree(self.folder, ignore_errors=True)
            self._strikes += 1
        elif dice < 0.043:
            self._outage(silent=dice < 0.042)

    def _break_a_file(self) -> bool:
        files = list(self.folder.rglob("*.kv1"))
        if not files:
            return False
        path = self.rng.choice(files)
        with contextlib.suppress(OSError):
            content = bytearray(path.read_bytes())
            match self.rng.randrange(3):
                case 0:
                    path.unlink()
                case 1:
                    path.write_bytes(content[: self.rng.randrange(len(content))])
                case _:
                    content[self.rng.randrange(len(content))] ^= 1 << self.rng.randrange(8)
                    path.write_bytes(content)
            return True
        return False

    def _outage(self, *, silent: bool) -> None:
        self._peace_at = time.monotonic() + _HOLE
        self._strikes += 1
        for backend in self._backends[-1:]:
            if silent:
                backend.black_hole()
            else:
                backend.error_rate = 1.0

    def make_peace(self) -> None:
        """End an outage, so that what waits for the disk can end."""
        self._peace_at = None
        for backend in self._backends[-1:]:
            backend.error_rate = RATE
            backend.release()
