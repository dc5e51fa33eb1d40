"""Keeps a store consistent despite missing locks, Ctrl-C, forks, and plug-ins that hang or raise.

Plug-ins are policies, admission filters and observers, which may come from other packages. If a plug-in raises, the
store continues.
"""

from __future__ import annotations

import copy
import functools
import gc
import logging
import os
import threading
import time
import weakref
from collections import OrderedDict
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from functools import partial
from typing import Any, Final, Protocol, TypeVar, cast

from attrs import define, field, frozen

from lmkv.errors import safe_repr
from lmkv.protocols import Admission, Backend, ChunkKey, DividesTier, LabelsKeys, Policy, SeesPrompts, TakesHints

CHECKED = os.environ.get("LMKV_CHECK_LOCKS") == "1"
"""Whether `locked` checks that the lock is held, at the cost of a Python call. Set when lmkv is imported."""

F = TypeVar("F", bound=Callable[..., Any])


logger = logging.getLogger(__name__)
T = TypeVar("T")
PATIENCE = 10.0
"""Seconds within which all backends of a store must close."""
_GROWN, _REPLACED = 1 << 14, 1 << 17
_wanted = threading.Event()


def locked(method: F) -> F:
    """Mark a method that must be called with `self._lock` held. With LMKV_CHECK_LOCKS=1, a call without the lock
    raises.
    """
    if not CHECKED:
        return method

    @functools.wraps(method)
    def checked(self: Any, *args: Any, **kwargs: Any) -> Any:
        if not self._lock.locked():
            raise AssertionError(f"{method.__qualname__} was called without the store's lock")
        return method(self, *args, **kwargs)

    return cast(F, checked)


def attempt(call: Callable[[], T], failed: Callable[[Exception], T]) -> T:
    """Return the result of `call()`; if the call raises an exception, return the result of `failed(exception)`."""
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
class Waker:
    """Wakes threads that wait for a condition. After `ring`, each waiting thread checks its condition again.
    Thread-safe.

    `threading.Condition` and `Event` are unsafe here. After a KeyboardInterrupt in a waiting thread, they may keep
    their lock, or release the lock of another thread. In a `Waker`, each wait has a separate lock, which is released at
    most once.
    """

    _waiters: list[threading.Lock] = field(init=False, factory=list)

    def ring(self) -> None:
        """Wake all waiting threads. Call `ring` after a change that may fulfil their conditions."""
        while self._waiters:
            with suppress(IndexError):
                self._waiters.pop().release()

    def wait_for(self, true: Callable[[], bool], timeout: float | None = None) -> bool:
        """Wait until `true()` returns True, for at most `timeout` seconds. Returns the last result of `true()`."""
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
class ChangeGuard:
    """Detects interrupted changes of a store, and repairs the store. Usage: `with self._lock, self._changes`.

    Ctrl-C or a MemoryError may interrupt a change between any two lines. Therefore a mark is set before the first line
    and cleared after the last line. If the mark is still set when the next change begins, `repair` is called first.
    """

    repair: Callable[[], None] = field(default=lambda: None)
    cut_short: bool = False
    lost: list[object] = field(init=False, factory=list)
    """Reasons to recount. Appending to a list is one call in C, which no Ctrl-C interrupts."""

    def __enter__(self) -> None:
        if self.cut_short or self.lost:
            self.repair_now()
        self.cut_short = True

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        if kind is None:
            self.cut_short = False

    def repair_now(self) -> None:
        """Repair the store now, without waiting for the next change. The caller holds the lock."""
        self.cut_short = True
        self.lost.clear()
        attempt(
            self.repair,
            lambda error: logger.error(
                "lmkv: a call was interrupted, and the store is inconsistent: %s; restart this process",
                safe_repr(error),
            ),
        )


def close_all(backends: Iterable[tuple[str, Backend]]) -> None:
    """Close backends, each given with the name of its tier, within `PATIENCE` seconds. If a backend takes longer, a
    daemon thread continues to close it.
    """
    deadline = time.monotonic() + PATIENCE
    closing = [(name, _begin(partial(_close, name, backend), name)) for name, backend in backends]
    for name, thread in closing:
        if not _ended(thread, deadline - time.monotonic()):
            logger.warning("lmkv: tier %r did not close in %g s; lmkv continues without waiting", name, PATIENCE)


def ends_in_time(work: Callable[[], None]) -> bool:
    """Run `work` on a separate thread. Returns whether `work` finished within `PATIENCE` seconds.

    A `work` that takes longer keeps running.
    """
    failed = partial(logger.error, "lmkv: emptying host memory failed: %r; lmkv closes all tiers nevertheless")
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
    said = "lmkv: closing tier %r failed: %s; lmkv continues"
    attempt(backend.close, lambda error: logger.warning(said, name, safe_repr(error)))


@define(eq=False)
class Freezer:
    """Calls `gc.freeze` when an index has grown, or when many entries of the index were replaced.

    A full garbage collection visits every object of all indexes and stops all threads: 0.7 s with three million chunks.
    Frozen objects are not visited. Entries have no reference cycles, so they are freed without a collection.
    `gc.freeze` runs after the next full collection, so that no garbage is frozen.
    """

    _size: int = 0
    _new: int = 0

    def added(self, count: int, size: int) -> None:
        """Note `count` new entries of an index that now has `size` entries. The caller holds the store's lock."""
        self._new += count
        self._size = min(self._size, size)
        if size - self._size >= _GROWN or self._new >= _REPLACED:
            self._size, self._new = size, 0
            if _collected not in gc.callbacks:
                gc.callbacks.append(_collected)
            _wanted.set()


def _collected(phase: str, info: dict[str, Any]) -> None:
    """Call `gc.freeze` after a full garbage collection. The collector calls this function on any thread."""
    if phase == "stop" and info["generation"] == 2 and _wanted.is_set():
        _wanted.clear()
        gc.freeze()


class ClosesAfterFork(Protocol):
    def after_fork(self) -> None:
        """Close the object in a forked child without waiting. A thread of the parent may hold any lock, so take
        none.
        """
        ...


_objects: weakref.WeakSet[ClosesAfterFork] = weakref.WeakSet()


def close_after_fork(instance: ClosesAfterFork) -> None:
    """Call `instance.after_fork` in every forked child, as long as `instance` lives."""
    _objects.add(instance)


def _after_fork() -> None:
    for instance in list(_objects):
        # One object in a bad state must not keep the others from closing.
        attempt(
            instance.after_fork,
            lambda error: logger.warning("lmkv: this forked process cannot free lmkv's memory: %r", error),
        )


os.register_at_fork(after_in_child=_after_fork)


MAX_GIVEN_UP: Final = 1 << 16
"""Largest number of remembered chunks that are still being written to a tier although no session needs them any more.
"""


class StoreObserver(Protocol):
    """An object that the store notifies when a tier starts or stops serving a chunk.

    A tier stops serving a chunk that is evicted, deleted or lost. The store calls the methods on any thread, with its
    lock held. The methods must not wait, call the store or raise an exception. Chunks of other namespaces in a shared
    tier have keys of more than 32 bytes.
    """

    def stored(self, tier: str, key: ChunkKey) -> None: ...

    def removed(self, tier: str, key: ChunkKey) -> None: ...


def _ignore(keys: Sequence[ChunkKey], what: Any) -> None: ...


@define(eq=False)
class FallbackLRU:
    """A simple LRU policy that never raises. `FallbackLRU` replaces a policy that has raised, and ignores the parents
    of chunks.
    """

    _sizes: OrderedDict[ChunkKey, int] = field(init=False, factory=OrderedDict)
    _held: set[ChunkKey] = field(init=False, factory=set)

    def insert_chain(self, keys: Sequence[ChunkKey], size: int, parents: Sequence[ChunkKey]) -> None:
        for key in reversed(keys):
            self._sizes[key] = size

    def touch(self, keys: Sequence[ChunkKey]) -> None:
        for key in reversed(keys):
            if key in self._sizes:
                self._sizes.move_to_end(key)

    def discard(self, key: ChunkKey) -> None:
        self._sizes.pop(key, None)
        self._held.discard(key)

    def hold(self, key: ChunkKey) -> None:
        self._held.add(key)

    def release(self, key: ChunkKey) -> None:
        self._held.discard(key)
        self.touch([key])

    def evict(self, nbytes: int, protect: frozenset[ChunkKey] | set[ChunkKey] = frozenset()) -> list[ChunkKey] | None:
        victims: list[ChunkKey] = []
        for key, size in self._sizes.items():
            if nbytes <= 0:
                break
            if key not in self._held and key not in protect:
                victims.append(key)
                nbytes -= size
        if nbytes > 0:
            return None
        for key in victims:
            del self._sizes[key]
        return victims

    def sizes(self) -> dict[ChunkKey, int]:
        """Return the size in bytes of each chunk in the policy."""
        return dict(self._sizes)


@frozen
class Content:
    """The content of a tier, which is inserted into a new policy.

    `chains`: arguments for calls of `Policy.insert_chain`, least recently used chunks first. `held`: chunks with
    references, which must not be evicted.
    """

    chains: Iterable[tuple[Sequence[ChunkKey], int, Sequence[ChunkKey]]]
    held: Iterable[ChunkKey]


class GuardedPolicy:
    """Calls a tier's eviction policy. If the policy raises, a `FallbackLRU` policy replaces it.

    If clients' hints are about a chunk that the tier does not have yet, the policy gets the hints when the chunk
    arrives. `prioritized`: the chunks with a priority. `priority_of`: a function that returns the priority of a chunk.
    `content`: a function that returns the tier's content. `freed`: a function that checks an eviction: it returns the
    total bytes of the chunks, or 0 if a chunk must not be evicted. `has`: a function that returns whether the tier has
    a chunk. The caller holds the store's lock.
    """

    def __init__(
        self,
        policy: Policy,
        name: str,
        content: Callable[[], Content],
        freed: Callable[[Sequence[ChunkKey]], int],
        has: Callable[[ChunkKey], bool],
    ) -> None:
        self.policy = policy
        self._name = name
        self._content, self._freed, self._has = content, freed, has
        self.prioritized: Mapping[ChunkKey, object] = {}
        self.priority_of: Callable[[ChunkKey], int] = lambda key: 0
        self._given_up: OrderedDict[ChunkKey, None] = OrderedDict()
        self._new: Policy | None = attempt(lambda: copy.deepcopy(policy), lambda error: None)
        """A copy of the policy before its first key, or None if it cannot be copied."""
        self._telling = False
        # On the instance, because `isinstance` looks for the attributes and not every policy has them.
        if isinstance(policy, TakesHints):
            self.hint = self._hint
        if isinstance(policy, LabelsKeys):
            self.label = partial(self._tell, "label")
            self.used_bytes = self._used_bytes

    def insert_chain(self, keys: Sequence[ChunkKey], size: int, parents: Sequence[ChunkKey]) -> None:
        self._do(lambda policy: policy.insert_chain(keys, size, parents))
        if self.prioritized or self._given_up:
            for key in reversed(keys):
                given_up = self._given_up.pop(key, self) is None
                if priority := self.priority_of(key) if key in self.prioritized else -given_up:
                    self._tell("hint", (key,), priority)

    def touch(self, keys: Sequence[ChunkKey]) -> None:
        for key in keys if self._given_up else ():
            self._given_up.pop(key, None)
        self._do(lambda policy: policy.touch(keys))

    def discard(self, key: ChunkKey) -> None:
        try:
            self.policy.discard(key)
        except BaseException as error:
            self._after(error).discard(key)

    def hold(self, key: ChunkKey) -> None:
        try:
            self.policy.hold(key)
        except BaseException as error:
            self._after(error).hold(key)

    def release(self, key: ChunkKey) -> None:
        try:
            self.policy.release(key)
        except BaseException as error:
            self._after(error).release(key)

    def evict(self, nbytes: int, protect: frozenset[ChunkKey] | set[ChunkKey] = frozenset()) -> list[ChunkKey] | None:
        if self._telling:
            # A hint was cut short.
            self.rebuild()
        checked = partial(self._evicted, nbytes, protect)
        return attempt(checked, lambda error: self._replace(error).evict(nbytes, protect))

    def _evicted(self, nbytes: int, protect: frozenset[ChunkKey] | set[ChunkKey]) -> list[ChunkKey] | None:
        victims = self.policy.evict(nbytes, protect)
        if victims is not None and (self._freed(victims) < nbytes or len(set(victims)) < len(victims)):
            raise ValueError("evict() returned too few bytes, or chunks that are in use or not in the tier")
        return victims

    def part_of(self, key: ChunkKey, parent: ChunkKey) -> tuple[str, float]:
        """Return a chunk's tenant, and the fraction of the tier that belongs to the tenant, 0 to 1; see `DividesTier`.

        Without quotas, the result is `("", 1.0)`.
        """
        return self._do(lambda policy: policy.part_of(key, parent) if isinstance(policy, DividesTier) else ("", 1.0))

    def _hint(self, keys: Sequence[ChunkKey], priority: int) -> None:
        for key in keys if priority < 0 or self._given_up else ():
            self._given_up.pop(key, None)
            if priority < 0 and not self._has(key):
                self._given_up[key] = None
        while len(self._given_up) > MAX_GIVEN_UP:
            self._given_up.popitem(last=False)
        self._tell("hint", keys, priority)

    def _tell(self, verb: str, keys: Sequence[ChunkKey], what: Any) -> None:
        self._telling = True
        self._do(lambda policy: getattr(policy, verb, _ignore)(keys, what))
        self._telling = False

    def _used_bytes(self) -> Mapping[str, int]:
        return self._do(lambda policy: dict(policy.used_bytes()) if isinstance(policy, LabelsKeys) else {})

    def _after(self, error: BaseException) -> Policy:
        """Return the policy that replaces a policy which raised `error`. Re-raises Ctrl-C on the main thread.

        The methods for one chunk use this instead of `_do`, which is slower.
        """

        def again() -> Policy:
            raise error

        return attempt(again, self._replace)

    def _do(self, call: Callable[[Policy], T]) -> T:
        return attempt(lambda: call(self.policy), lambda error: call(self._replace(error)))

    def rebuild(self) -> None:
        """Replace the policy by a new policy of the same kind, filled with the tier's content."""
        # A new object each time: an exception may have left the old one in any state.
        policy = attempt(lambda: copy.deepcopy(self._new), lambda error: None) or FallbackLRU()
        self.policy = attempt(lambda: self._filled(policy, self.policy), self._replace)
        self._telling = False

    def _filled(self, policy: Policy, before: Policy | None = None) -> Policy:
        """Insert the tier's content into a new policy, and return this policy.

        `before`: the old policy, which knows the tenant of each chunk.
        """
        content = self._content()
        for keys, size, parents in content.chains:
            if isinstance(before, DividesTier) and isinstance(policy, LabelsKeys):
                policy.label(keys, [before.part_of(keys[0])[0]])
            policy.insert_chain(keys, size, parents)
        for key in content.held:
            policy.hold(key)
        return policy

    def _replace(self, error: Exception) -> Policy:
        name, self._new = type(self.policy).__name__, None
        said = "lmkv: policy %s of tier %r failed: %s; the tier evicts by LRU from now on"
        logger.error(said, name, self._name, safe_repr(error))
        self.policy = self._filled(FallbackLRU())
        return self.policy


@define(eq=False)
class GuardedAdmission:
    """Calls an admission filter. If the filter raises, the chunk is not admitted, and the first error is logged."""

    _admission: Admission
    _tier: str
    _told: bool = field(init=False, default=False)

    @property
    def sees_prompts(self) -> bool:
        return isinstance(self._admission, SeesPrompts)

    def admit(self, key: ChunkKey) -> bool:
        return attempt(lambda: bool(self._admission.admit(key)), self._refuse)

    def prompt(self, keys: Sequence[ChunkKey], tokens: int) -> None:
        if isinstance(admission := self._admission, SeesPrompts):
            attempt(lambda: admission.prompt(keys, tokens), self._tell)

    def _refuse(self, error: Exception) -> bool:
        self._tell(error)
        return False

    def _tell(self, error: Exception) -> None:
        if not self._told:
            self._told = True
            said = "lmkv: the admission filter of tier %r failed: %s; the tier does not store the chunk"
            logger.warning(said, self._tier, safe_repr(error))


@define(eq=False)
class GuardedObserver:
    """Calls an observer until its first exception. Afterwards, the observer is not called."""

    _observer: StoreObserver
    _ended: bool = field(init=False, default=False)

    def stored(self, tier: str, key: ChunkKey) -> None:
        if not self._ended:
            attempt(lambda: self._observer.stored(tier, key), self._end)

    def removed(self, tier: str, key: ChunkKey) -> None:
        if not self._ended:
            attempt(lambda: self._observer.removed(tier, key), self._end)

    def _end(self, error: Exception) -> None:
        self._ended = True
        name = type(self._observer).__name__
        logger.error("lmkv: observer %s failed: %s; lmkv does not call the observer again", name, safe_repr(error))
