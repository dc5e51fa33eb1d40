"""Keeps a store consistent: lock checks, waits that survive Ctrl-C, limits for calls that hang or raise, forks."""

from __future__ import annotations

import functools
import gc
import logging
import os
import threading
import time
import weakref
from collections.abc import Callable, Iterable
from contextlib import suppress
from functools import partial
from typing import Any, Protocol, TypeVar, cast

from attrs import define, field

from lmkv.errors import safe_repr
from lmkv.protocols import Backend

CHECKED = os.environ.get("LMKV_CHECK_LOCKS") == "1"
"""Whether calls are checked, which costs one more Python call each. Read when lmkv is imported."""

F = TypeVar("F", bound=Callable[..., Any])


logger = logging.getLogger(__name__)
T = TypeVar("T")
PATIENCE = 10.0
"""Seconds that the backends of a store have to close, all together."""
_GROWN, _REPLACED = 1 << 14, 1 << 17
_wanted = threading.Event()


def locked(method: F) -> F:
    """Mark a method that wants `self._lock` held. With LMKV_CHECK_LOCKS=1 a call without it raises."""
    if not CHECKED:
        return method

    @functools.wraps(method)
    def checked(self: Any, *args: Any, **kwargs: Any) -> Any:
        if not self._lock.locked():
            raise AssertionError(f"{method.__qualname__} was called without the store's lock")
        return method(self, *args, **kwargs)

    return cast(F, checked)


def attempt(call: Callable[[], T], failed: Callable[[Exception], T]) -> T:
    """Return the call's result, or if it raises, the result of `failed(exception)`."""
    try:
        return call()
    except Exception as error:
        return failed(error)
    except BaseException as error:
        if isinstance(error, KeyboardInterrupt) and threading.current_thread() is threading.main_thread():
            raise
        # A panic in a Rust library, for example, is not an Exception.
        return failed(RuntimeError(safe_repr(error)))


@define(eq=False, repr=False)
class Bell:
    """Rung by whoever changes a state; waiters then check the state again. Thread-safe, without a lock.

    A `threading.Condition`, or an `Event`, may keep its lock, or release another thread's, after a KeyboardInterrupt in
    one that waits. Here each wait has a lock of its own, which is released at most once.
    """

    _waiters: list[threading.Lock] = field(init=False, factory=list)

    def ring(self) -> None:
        """Wake everybody. Call it after the state has changed."""
        while self._waiters:
            with suppress(IndexError):
                self._waiters.pop().release()

    def wait_for(self, true: Callable[[], bool], timeout: float | None = None) -> bool:
        """Wait until the state is `true`, at most `timeout` seconds; whether it is."""
        deadline = None if timeout is None else time.monotonic() + timeout
        while True:
            waiter = threading.Lock()
            waiter.acquire()
            self._waiters.append(waiter)
            try:
                left = -1 if deadline is None else min(deadline - time.monotonic(), threading.TIMEOUT_MAX)
                # Checked after the waiter is registered: no ring in between is missed.
                if true() or (deadline is not None and left <= 0) or not waiter.acquire(timeout=left):
                    return true()
            finally:
                with suppress(ValueError):
                    self._waiters.remove(waiter)


@define(eq=False)
class Changes:
    """A context within the store's lock: `with self._lock, self._changes`.

    Ctrl-C, or a MemoryError, may come between any two lines. So a mark is set before the first line of a change and
    cleared after its last. The next change that finds it set first calls `repair`, which recounts everything. An
    exception within these methods leaves the mark right as well; the lock is in C and leaves no gap.
    """

    repair: Callable[[], None] = field(default=lambda: None)
    cut_short: bool = False
    lost: list[object] = field(init=False, factory=list)
    """Reasons to recount. Appending to a list is one call in C, which no Ctrl-C interrupts."""

    def __enter__(self) -> None:
        if self.cut_short or self.lost:
            self.put_right()
        self.cut_short = True

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        if kind is None:
            self.cut_short = False

    def put_right(self) -> None:
        """Locked. Repair now."""
        self.cut_short = True
        self.lost.clear()
        attempt(self.repair, lambda error: logger.error("lmkv: a store cannot be put right: %s", safe_repr(error)))


def close_all(backends: Iterable[tuple[str, Backend]]) -> None:
    """Close backends, given with their names. One that hangs is left behind on its daemon thread."""
    deadline = time.monotonic() + PATIENCE
    closing = [(name, _begin(partial(_close, name, backend), name)) for name, backend in backends]
    for name, thread in closing:
        if not _ended(thread, deadline - time.monotonic()):
            logger.warning("lmkv: tier %r does not close; its thread is left behind", name)


def ends_in_time(work: Callable[[], None]) -> bool:
    """Run `work` on a thread of its own. Returns whether it ended within `PATIENCE`; if not, it is left behind."""
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


@define(eq=False)
class Freezer:
    """Calls `gc.freeze` as an index grows, and when many of its entries were replaced.

    A full collection visits every object of all indexes and stops all threads: 0.7 s with three million chunks. Entries
    are never part of a cycle, so they are freed without it. `gc.freeze` runs after the next full collection, to keep
    no garbage. A cycle in use at that time stays in memory for ever.
    """

    _size: int = 0
    _new: int = 0

    def added(self, count: int, size: int) -> None:
        """Note `count` new entries of an index that has `size` now. Called under the store's lock."""
        self._new += count
        self._size = min(self._size, size)
        if size - self._size >= _GROWN or self._new >= _REPLACED:
            self._size, self._new = size, 0
            if _collected not in gc.callbacks:
                gc.callbacks.append(_collected)
            _wanted.set()


def _collected(phase: str, info: dict[str, Any]) -> None:
    """Freeze after a full collection. The collector calls this on any thread."""
    if phase == "stop" and info["generation"] == 2 and _wanted.is_set():
        _wanted.clear()
        gc.freeze()


class ClosesAfterFork(Protocol):
    def after_fork(self) -> None:
        """In the child: take no lock that a thread of the parent may hold, and wait for no thread."""
        ...


_objects: weakref.WeakSet[ClosesAfterFork] = weakref.WeakSet()


def close_after_fork(instance: ClosesAfterFork) -> None:
    """Call `instance.after_fork` in every forked child, as long as the object lives."""
    _objects.add(instance)


def _after_fork() -> None:
    for instance in list(_objects):
        # One object in a bad state must not keep the others from closing.
        attempt(instance.after_fork, lambda error: logger.warning("lmkv: a store after a fork: %r", error))


os.register_at_fork(after_in_child=_after_fork)
