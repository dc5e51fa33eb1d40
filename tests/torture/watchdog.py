"""Ends a process that has stopped making progress, with every thread's stack."""

from __future__ import annotations

import faulthandler
import threading
import time
from collections.abc import Callable
from types import TracebackType


class Watchdog:
    """Calls `hung` when `alive` was not called for `patience` seconds."""

    def __init__(self, hung: Callable[[], None], patience: float = 400.0) -> None:
        self._hung = hung
        self._patience = patience
        self._last = time.monotonic()
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._watch, name="watchdog", daemon=True)

    def alive(self) -> None:
        self._last = time.monotonic()

    def _watch(self) -> None:
        while not self._over.wait(1.0):
            if time.monotonic() - self._last > self._patience:
                faulthandler.dump_traceback(all_threads=True)
                self._hung()

    def __enter__(self) -> Watchdog:
        self._thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._over.set()
        self._thread.join()
