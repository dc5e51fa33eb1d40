"""`Hints`: passes on what callers know about chunks to the policies and admission filters of all tiers."""

from __future__ import annotations

import hashlib
import threading
from collections.abc import Mapping, Sequence
from typing import Final

from attrs import define, field

from lmkv.protocols import ChunkKey, Clock, LabelsKeys, Policy, SeesPrompts, TakesHints
from lmkv.store.tiers.changes import Changes
from lmkv.store.tiers.locking import locked
from lmkv.store.wishes import Wishes

DEFAULT_SECONDS: Final = 300.0
_SESSION_SECONDS: Final = 86_400.0
"""A session that has not been heard of for so long is forgotten."""
_MAX_CHUNKS: Final = 1 << 18
"""Most chunks of all priorities, and of all sessions, about 20 MiB of keys."""
_MAX_BRANCHES: Final = 16
"""Most branches of a session: an agent's own conversation, and those of agents that it has started."""

Chain = Sequence[ChunkKey]


@define(eq=False, repr=False)
class Hints:
    """Passes hints on to policies that take them. Thread-safe. `lock`: the store's.

    An `owner` is the root of a request's keys: two owners' sessions of one name are two sessions. Where there are too
    many priorities or sessions, the oldest of the owner with the most chunks are forgotten.

    Examples
    --------
    >>> import threading
    >>> from lmkv.policies import LRU
    >>> policy = LRU()
    >>> for name in (b"a", b"b"):
    ...     policy.insert(name, size=10)
    >>> hints = Hints(threading.Lock(), {"cpu": policy}, clock=lambda: 0.0)
    >>> hints.session(b"root", "worker-7", [b"b"], ended=True)
    >>> policy.evict(5)
    [b'b']
    """

    _lock: threading.Lock
    _policies: Mapping[str, Policy]
    _clock: Clock
    _admissions: Sequence[object] = ()
    _changes: Changes = field(factory=Changes)
    _labelled: list[LabelsKeys] = field(init=False)
    _prompted: list[SeesPrompts] = field(init=False)
    _priorities: Wishes[ChunkKey, Chain] = field(init=False, factory=Wishes)
    """Chains with a priority, by their last key."""
    _sessions: Wishes[bytes, list[Chain]] = field(init=False, factory=Wishes)
    """The branches of each session, by their last chains."""

    def __attrs_post_init__(self) -> None:
        self._labelled = [policy for policy in self._policies.values() if isinstance(policy, LabelsKeys)]
        self._prompted = [admission for admission in self._admissions if isinstance(admission, SeesPrompts)]

    def give(self, keys: Chain, priority: int, seconds: float = DEFAULT_SECONDS, owner: bytes = b"") -> None:
        """See `TakesHints.hint`. `seconds`: how long a priority above 0 lasts."""
        with self._lock, self._changes:
            self._give(keys, priority)
            if keys and priority > 0:
                for key in keys:
                    # A wish about a beginning of this chain is part of this one.
                    self._priorities.pop(key)
                end = self._clock() + seconds
                self._priorities.add(keys[-1], owner, size=len(keys), end=end, value=keys)
                for _, chain in self._priorities.excess(_MAX_CHUNKS):
                    self._give(chain, 0)

    @locked
    def _give(self, keys: Chain, priority: int) -> None:
        if not keys:
            return
        self._priorities.pop(keys[-1])
        for policy in self._policies.values():
            if isinstance(policy, TakesHints):
                policy.hint(keys, priority)

    def prompt(self, keys: Chain, tokens: int) -> None:
        """See `SeesPrompts.prompt`."""
        if self._prompted:
            with self._lock, self._changes:
                for admission in self._prompted:
                    admission.prompt(keys, tokens)

    def label(self, keys: Chain, names: Sequence[str]) -> None:
        """Chunks with these keys belong to the first of these tenants that has a quota."""
        if not self._labelled or not names:
            return
        with self._lock, self._changes:
            for policy in self._labelled:
                policy.label(keys, names)

    def used_bytes(self) -> dict[str, dict[str, int]]:
        """Bytes of each tenant in each tier that has quotas."""
        with self._lock, self._changes:
            tiers = self._policies.items()
            return {name: dict(policy.used_bytes()) for name, policy in tiers if isinstance(policy, LabelsKeys)}

    def session(self, owner: bytes, name: str, keys: Chain, *, ended: bool = False) -> None:
        """Note the end of a session's request, and give up the chunks that it has replaced.

        `ended`: the session has ended, too, so that all its chunks are given up that no other session shares.
        """
        with self._lock, self._changes:
            self._session(owner, name, keys, ended=ended)

    def end_session(self, owner: bytes, name: str) -> bool:
        """A session has ended, without another request: its chunks are given up. Returns whether it was known."""
        with self._lock, self._changes:
            branches = self._sessions.pop(_session_key(owner, name)) or []
            for branch in branches:
                self._give(branch, -1)
        return bool(branches)

    @locked
    def _session(self, owner: bytes, name: str, keys: Chain, *, ended: bool) -> None:
        key = _session_key(owner, name)
        branches = self._sessions.pop(key) or []
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
            branches = branches[-_MAX_BRANCHES:]
            size = 1 + sum(map(len, branches))
            self._sessions.add(key, owner, size=size, end=self._clock() + _SESSION_SECONDS, value=branches)
            for _ in self._sessions.excess(_MAX_CHUNKS):
                pass

    @locked
    def recount(self) -> None:
        """After an exception: begin anew with the wishes that are known."""
        self._priorities, self._sessions = self._priorities.rebuilt(), self._sessions.rebuilt()

    @locked
    def expire(self) -> None:
        """End priorities whose time is over, and forget old sessions."""
        now = self._clock()
        for _, chain in self._priorities.due(now):
            self._give(chain, 0)
        for _ in self._sessions.due(now):
            pass


def _session_key(owner: bytes, name: str) -> bytes:
    """A digest: names of clients may have any length."""
    text = name.encode("utf-8", "surrogatepass")
    return hashlib.blake2b(text, digest_size=32, key=hashlib.sha256(owner).digest()).digest()
