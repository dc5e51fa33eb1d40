"""Closes backends, each on a thread of its own and for a bounded time: one of another package may hang."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Iterable

from lmkv.errors import safe_repr
from lmkv.protocols import Backend
from lmkv.store.tiers.attempt import attempt

logger = logging.getLogger(__name__)

PATIENCE = 10.0
"""Seconds that the backends of a store have to close, all together."""


def close_all(backends: Iterable[tuple[str, Backend]]) -> None:
    """Close backends, given with their names. One that hangs is left behind on its daemon thread."""
    deadline = time.monotonic() + PATIENCE
    closing = [(name, _begin(name, backend)) for name, backend in backends]
    for name, thread in closing:
        if thread is None:
            continue
        thread.join(max(0.0, deadline - time.monotonic()))
        if thread.is_alive():
            logger.warning("lmkv: tier %r does not close; its thread is left behind", name)


def _begin(name: str, backend: Backend) -> threading.Thread | None:
    thread = threading.Thread(target=_close, args=(name, backend), name=f"lmkv-close-{name}", daemon=True)
    try:
        thread.start()
    except RuntimeError:  # the process has no thread left to give, or ends
        thread.run()
        return None
    return thread


def _close(name: str, backend: Backend) -> None:
    attempt(backend.close, lambda error: logger.warning("lmkv: closing tier %r failed: %s", name, safe_repr(error)))
