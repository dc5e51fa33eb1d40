"""`Hints`: passes on what callers know about chunks to the policies and admission filters of all tiers."""

from __future__ import annotations

import math
import threading
from collections.abc import Mapping, Sequence
from typing import Final

from attrs import define, field
from cachetools import LRUCache

from lmkv.protocols import ChunkKey, Clock, LabelsKeys, Policy, SeesPrompts, TakesHints
from lmkv.store.tiers.locking import locked

_MAX_SESSIONS: Final = 1 << 14
_MAX_BRANCHES: Final = 16
"""Most branches of a session: an agent's own conversation, and those of agents that it has started."""


@define(eq=False, repr=False)
class Hints:
    """Passes hints on to policies that take them. Thread-safe. `lock`: the store's.

    Examples
    --------
    >>> import threading
    >>> from lmkv.policies import LRU
    >>> policy = LRU()
    >>> for name in (b"a", b"b"):
    ...     policy.insert(name, size=10)
    >>> hints = Hints(threading.Lock(), {"cpu": policy}, clock=lambda: 0.0)
    >>> hints.session("worker-7", [b"b"], ended=True)
    >>> policy.evict(5)
    [b'b']
    """

    _lock: threading.Lock
    _policies: Mapping[str, Policy]
    _clock: Clock
    _admissions: Sequence[object] = ()
    _labelled: list[LabelsKeys] = field(init=False)
    _prompted: list[SeesPrompts] = field(init=False)
    _ends: dict[ChunkKey, tuple[float, Sequence[ChunkKey]]] = field(init=False, factory=dict)
    """When the priority of a chain ends, by its last key."""
    _next_end: float = field(init=False, default=math.inf)
    _sessions: LRUCache[str, list[Sequence[ChunkKey]]] = field(init=False, factory=lambda: LRUCache(_MAX_SESSIONS))
    """The branches of each session, by their last chains."""

    def __attrs_post_init__(self) -> None:
        self._labelled = [policy for policy in self._policies.values() if isinstance(policy, LabelsKeys)]
        self._prompted = [admission for admission in self._admissions if isinstance(admission, SeesPrompts)]

    def give(self, keys: Sequence[ChunkKey], priority: int, seconds: float | None = None) -> None:
        """See `TakesHints.hint`. `seconds`: how long a priority above 0 lasts; None: until another hint."""
        with self._lock:
            self._give(keys, priority, seconds)

    @locked
    def _give(self, keys: Sequence[ChunkKey], priority: int, seconds: float | None = None) -> None:
        if not keys:
            return
        for policy in self._policies.values():
            if isinstance(policy, TakesHints):
                policy.hint(keys, priority)
        self._ends.pop(keys[-1], None)
        if priority > 0 and seconds is not None:
            end = self._clock() + seconds
            self._ends[keys[-1]] = end, keys
            self._next_end = min(self._next_end, end)

    def prompt(self, keys: Sequence[ChunkKey], tokens: int) -> None:
        """See `SeesPrompts.prompt`."""
        if self._prompted:
            with self._lock:
                for admission in self._prompted:
                    admission.prompt(keys, tokens)

    def label(self, keys: Sequence[ChunkKey], names: Sequence[str]) -> None:
        """Chunks with these keys belong to the first of these tenants that has a quota."""
        if not self._labelled or not names:
            return
        with self._lock:
            for policy in self._labelled:
                policy.label(keys, names)

    def used_bytes(self) -> dict[str, dict[str, int]]:
        """Bytes of each tenant in each tier that has quotas."""
        with self._lock:
            tiers = self._policies.items()
            return {name: dict(policy.used_bytes()) for name, policy in tiers if isinstance(policy, LabelsKeys)}

    def session(self, name: str, keys: Sequence[ChunkKey], *, ended: bool = False) -> None:
        """Note the end of a session's request, and give up the chunks that it has replaced.

        `ended`: the session has ended, too, so that all its chunks are given up that no other session shares.
        """
        with self._lock:
            self._session(name, keys, ended=ended)

    def end_session(self, name: str) -> bool:
        """A session has ended, without another request: its chunks are given up. Returns whether it was known."""
        with self._lock:
            branches = self._sessions.pop(name, [])
            for branch in branches:
                self._give(branch, -1)
        return bool(branches)

    @locked
    def _session(self, name: str, keys: Sequence[ChunkKey], *, ended: bool) -> None:
        branches = self._sessions.pop(name, [])
        for branch in branches:
            # Equal keys have equal prefixes: this request continues that one, but perhaps for its last chunk.
            at = len(branch) - 2
            if at >= 0 and len(keys) > at and keys[at] == branch[at]:
                branches.remove(branch)
                if len(keys) == at + 1 or keys[at + 1] != branch[at + 1]:
                    self._give(branch, -1)
                break
        branches.append(keys)
        if ended:
            for branch in branches:
                self._give(branch, -1)
        elif name:
            self._sessions[name] = branches[-_MAX_BRANCHES:]

    @locked
    def expire(self) -> None:
        """End the priorities whose time is over."""
        now = self._clock()
        if now < self._next_end:
            return
        for end, keys in list(self._ends.values()):
            if end <= now:
                self._give(keys, 0)
        self._next_end = min((end for end, _ in self._ends.values()), default=math.inf)
