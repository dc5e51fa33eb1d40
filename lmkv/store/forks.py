"""Fork safety: objects that need threads close in a forked child, which has none of its parent's threads."""

from __future__ import annotations

import logging
import os
import weakref
from typing import Protocol

from lmkv.store.tiers.attempt import attempt

logger = logging.getLogger(__name__)


class ClosesAfterFork(Protocol):
    def after_fork(self) -> None:
        """In the child: take no lock that a thread of the parent may hold, and wait for no thread."""
        ...


_objects: weakref.WeakSet[ClosesAfterFork] = weakref.WeakSet()


def close_after_fork(instance: ClosesAfterFork) -> None:
    """Have `instance.after_fork` called in every forked child, for as long as the object lives."""
    _objects.add(instance)


def _after_fork() -> None:
    for instance in list(_objects):
        # One object may be in any state; that must not keep the others from closing.
        attempt(instance.after_fork, lambda error: logger.warning("lmkv: a store after a fork: %r", error))


os.register_at_fork(after_in_child=_after_fork)
