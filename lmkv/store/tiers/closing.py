"""Ends what may hang, each on a thread of its own and for a bounded time: code of other packages."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Iterable
from functools import partial

from lmkv.errors import safe_repr
from lmkv.protocols import Backend
from lmkv.store.tiers.attempt import attempt

logger = logging.getLogger(__name__)

PATIENCE = 10.0
"""Seconds that the backends of a store have to close, all together."""


def close_all(backends: Iterable[tuple[str, Backend]]) -> None:
    """Close backends, given with their names. One that hangs is left behind on its daemon thread."""
    deadline = time.monotonic() + PATIENCE
    closing = [(name, _begin(partial(_close, name, backend), name)) for name, backend in backends]
    for name, thread in closing:
        if not _ended(thread, deadline - time.monotonic()):
            logger.warning("lmkv: tier %r does not close; its thread is left behind", name)


def ends_in_time(work: Callable[[], None]) -> bool:
    """Do it on a thread of its own, within the same patience; if not, it is left behind."""
    failed = partial(logger.error, "lmkv: a store was not closed in order: %r")
    return _ended(_begin(partial(attempt, work, failed), "store"), PATIENCE)


def _begin(work: Callable[[], None], name: str) -> threading.Thread | None:
    thread = threading.Thread(target=work, name=f"lmkv-close-{name}", daemon=True)
    try:
        thread.start()
    except RuntimeError:  # the process has no thread left to give, or ends
        thread.run()
        return None
    return thread


def _ended(thread: threading.Thread | None, seconds: float) -> bool:
    if thread is not None:
        thread.join(max(0.0, seconds))
    return thread is None or not thread.is_alive()


def _close(name: str, backend: Backend) -> None:
    attempt(backend.close, lambda error: logger.warning("lmkv: closing tier %r failed: %s", name, safe_repr(error)))
