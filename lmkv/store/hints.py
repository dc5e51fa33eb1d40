"""`Hints`: passes clients' hints about their prompts and sessions to the policies and admission filters of all
tiers.
"""

from __future__ import annotations

import hashlib
import threading
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from itertools import groupby
from typing import Final

from attrs import define, evolve, field, frozen

from lmkv.protocols import ChunkKey, Clock, LabelsKeys, Policy, SeesPrompts, TakesHints
from lmkv.store.claims import Claims, Owners
from lmkv.store.entries import Chain
from lmkv.store.guards import ChangeGuard, GuardedPolicy, locked

DEFAULT_SECONDS: Final = 300.0
_SESSION_SECONDS: Final = 86_400.0
"""A session without a request for this long is forgotten."""
MAX_HINTED: Final = 1 << 18
"""Largest number of chunks in all sessions, and also in all priorities. The keys of this number of chunks take about 20
MiB.
"""
_OVERHEAD: Final = 16
"""The memory that a claim (one client's priority for a prompt) takes besides its chunks' keys, in units of a key."""
_MAX_ENDING: Final = 16
"""Largest number of priorities for the same prompt, from several sessions or of several levels."""
_MAX_SHED: Final = 64
_MAX_ENDED: Final = 1 << 14
"""Approximate number of chunks of earlier priorities that one new priority ends. Other priorities end at their time."""
_MAX_SESSION: Final = 1 << 14
"""Largest number of chunks of a session."""
_MAX_BRANCHES: Final = 16
"""Largest number of branches of a session: the conversations of an agent and of its subagents."""


@frozen
class _Priority:
    """A client's request for a priority of a prompt's chunks.

    `last`: the key of the last chunk. `session`: the session with which the priority ends.
    """

    last: ChunkKey
    priority: int
    session: bytes


@define(eq=False)
class _Prioritized:
    """A chunk with a priority.

    `levels`: how many client requests each priority level has. `owner`: the client that gave the chunk a priority
    first.
    """

    owner: bytes
    tenant: str
    levels: Counter[int] = field(factory=Counter)


@define(eq=False, repr=False)
class Hints:
    """Passes clients' hints on to the policies that accept hints. Thread-safe. `lock`: the store's lock.

    An `owner` is the root of a request's key chain. Sessions with the same name but different owners are different
    sessions. At most `most` chunks have a priority, and each tenant may have at most its part of them. `part_of`: a
    function that returns the part of a chunk's tenant, as a fraction of `most`; see `DividesTier`. If a limit is
    exceeded, the owner with the most prioritized chunks loses its oldest priorities. If a chunk has several priorities,
    the highest one counts.

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
    _changes: ChangeGuard = field(factory=ChangeGuard)
    _most: int = MAX_HINTED
    _part_of: Callable[[ChunkKey], tuple[str, float]] = lambda key: ("", 1.0)
    _labelled: list[LabelsKeys] = field(init=False)
    _prompted: list[SeesPrompts] = field(init=False)
    _priorities: Claims[_Priority, Chain] = field(init=False, factory=Claims)
    _prioritized: dict[ChunkKey, _Prioritized] = field(init=False, factory=dict)
    _tenants: dict[str, Owners] = field(init=False, factory=dict)
    _ending: dict[ChunkKey, dict[_Priority, None]] = field(init=False, factory=dict)
    """For each chunk, the few priorities of prompts that end with this chunk."""
    _sessions: Claims[bytes, list[Chain]] = field(init=False, factory=Claims)
    """For each session, the latest chain of keys of each branch."""
    _branches: Counter[ChunkKey] = field(init=False, factory=Counter)
    """Number of branches of sessions that have each chunk."""

    def __attrs_post_init__(self) -> None:
        self._labelled = [policy for policy in self._policies.values() if isinstance(policy, LabelsKeys)]
        self._prompted = [admission for admission in self._admissions if isinstance(admission, SeesPrompts)]
        for policy in self._policies.values():
            if isinstance(policy, GuardedPolicy):
                policy.prioritized, policy.priority_of = self._prioritized, self._priority_of

    def set_priority(
        self, keys: Chain, priority: int, seconds: float = DEFAULT_SECONDS, owner: bytes = b"", session: str = ""
    ) -> None:
        """Set the priority of a prompt's chunks; see `TakesHints.hint`.

        A priority above 0 lasts for `seconds` seconds, or until its `session` ends. The new priority replaces the
        session's earlier priorities for this prompt, except those that are higher or last longer. A
        `priority` of 0 removes all earlier priorities of the session for this prompt, and sets none. With a `priority`
        below 0, the chunks that no session or priority needs are evicted first.
        """
        with self._lock, self._changes:
            if priority < 0:
                self._give_up(keys)
                return
            # Others need the beginning of the prompt.
            claim = _Priority(keys[-1], priority, _session_key(owner, session)) if keys else None
            if claim is not None and priority:
                self._claim(keys, claim, seconds, owner)
            elif claim is not None:
                for other in [each for each in self._ending.get(claim.last, ()) if each.session == claim.session]:
                    self._end(other, self._priorities.pop(other))

    @locked
    def _claim(self, keys: Chain, claim: _Priority, seconds: float, owner: bytes) -> None:
        tenant, part = self._part_of(keys[0])
        most = int(self._most * part)
        # Others need the beginning of the prompt.
        if len(keys) > most:
            keys = keys[:most]
            if not keys:
                return
            claim = evolve(claim, last=keys[-1])
        end, ended = self._clock() + seconds, 0
        for key in keys:
            for other in list(self._ending.get(key, ())) if ended < _MAX_ENDED else ():
                known = self._priorities.claim(other)
                if known is None or other.session != claim.session or other.priority > claim.priority:
                    continue
                if other == claim:
                    end = max(end, known.end)
                if known.end <= end:
                    # It is about a beginning of this chain, and so a part of this claim.
                    ended += known.size
                    self._uncount(other, self._priorities.pop(other))
        ending = self._ending.setdefault(claim.last, {})
        if len(ending) >= _MAX_ENDING:
            # The other claims keep the chunks as long.
            self._end(first := min(ending, key=self._end_of), self._priorities.pop(first))
        self._priorities.add(claim, owner, size=len(keys) + _OVERHEAD, end=end, value=keys)
        self._count(claim, keys, owner, tenant)
        self._apply(keys)
        self._shed(self._tenants[tenant], most)

    def _end_of(self, claim: _Priority) -> float:
        known = self._priorities.claim(claim)
        return 0.0 if known is None else known.end

    @locked
    def _shed(self, tenant: Owners, most: int) -> None:
        """Remove priorities beyond the limits, at most `_MAX_SHED` in one call. `most`: the tenant's limit, in
        chunks.
        """
        for _ in range(_MAX_SHED):
            if tenant.total <= most and self._priorities.total <= MAX_HINTED:
                break
            first = self._priorities.oldest_of(tenant.first()) if tenant.total > most else None
            ended, chain = self._priorities.shed() if first is None else (first, self._priorities.pop(first))
            self._end(ended, chain)

    def _count(self, claim: _Priority, keys: Chain, owner: bytes, tenant: str) -> None:
        self._ending.setdefault(claim.last, {})[claim] = None
        counted = self._tenants.setdefault(tenant, Owners())
        for key in keys:
            prioritized = self._prioritized.get(key)
            if prioritized is None:
                prioritized = self._prioritized[key] = _Prioritized(owner, tenant)
                counted.count(owner, 1)
            prioritized.levels[claim.priority] += 1

    @locked
    def _end(self, claim: _Priority, chain: Chain | None) -> None:
        if chain is not None:
            self._uncount(claim, chain)
            self._apply(chain)

    def _uncount(self, claim: _Priority, chain: Chain | None) -> None:
        ending = self._ending.get(claim.last, {})
        ending.pop(claim, None)
        if not ending:
            self._ending.pop(claim.last, None)
        for key in chain or ():
            prioritized = self._prioritized[key]
            prioritized.levels[claim.priority] -= 1
            if not prioritized.levels[claim.priority]:
                del prioritized.levels[claim.priority]
            if not prioritized.levels:
                del self._prioritized[key]
                self._tenants[prioritized.tenant].count(prioritized.owner, -1)

    @locked
    def _apply(self, keys: Chain) -> None:
        """Pass the current priorities of the chunks `keys` to the policies."""
        for priority, group in groupby(keys, self._priority_of):
            self._tell(list(group), priority)

    def _priority_of(self, key: ChunkKey) -> int:
        prioritized = self._prioritized.get(key)
        return 0 if prioritized is None else max(prioritized.levels)

    @locked
    def _tell(self, keys: Chain, priority: int) -> None:
        for policy in self._policies.values():
            if isinstance(policy, TakesHints):
                policy.hint(keys, priority)

    @locked
    def _end_session(self, branches: list[Chain], session: bytes) -> None:
        self._forget(branches)
        ended = 0
        for branch in branches:
            for key in branch if session else ():
                for claim in [each for each in self._ending.get(key, ()) if each.session == session]:
                    if ended < _MAX_ENDED:
                        keys = self._priorities.pop(claim)
                        ended += len(keys or ())
                        self._end(claim, keys)
            self._give_up(branch)

    @locked
    def _give_up(self, keys: Chain) -> None:
        """Let policies first evict the last chunks of `keys`: those after the last chunk with a session or a
        priority.
        """
        kept = [number for number, key in enumerate(keys) if key in self._prioritized or key in self._branches]
        if left := keys[kept[-1] + 1 :] if kept else keys:
            self._tell(left, -1)

    def prompt(self, keys: Chain, tokens: int) -> None:
        """Pass a prompt's keys and its number of tokens to the admission filters; see `SeesPrompts.prompt`."""
        if self._prompted:
            with self._lock, self._changes:
                for admission in self._prompted:
                    admission.prompt(keys, tokens)

    def label(self, keys: Chain, names: Sequence[str]) -> None:
        """Assign the chunks `keys` to the first tenant in `names` that has a quota."""
        if not self._labelled or not names:
            return
        with self._lock, self._changes:
            for policy in self._labelled:
                policy.label(keys, names)
            # A chunk that moves to a tenant loses its priority there.
            if prioritized := [key for key in keys if key in self._prioritized]:
                self._apply(prioritized)

    def used_bytes(self) -> dict[str, dict[str, int]]:
        """Return `{tier: {tenant: bytes}}`: the bytes that each tenant uses in each tier with quotas."""
        with self._lock, self._changes:
            tiers = self._policies.items()
            return {name: dict(policy.used_bytes()) for name, policy in tiers if isinstance(policy, LabelsKeys)}

    def session(self, owner: bytes, name: str, keys: Chain, *, ended: bool = False) -> None:
        """Note that a request of the session `name` has ended. Policies then first evict chunks of earlier
        requests that the session no longer needs.

        `ended`: whether the session ends as well. If so, all its chunks are evicted first, except chunks that another
        session or a priority needs.
        """
        with self._lock, self._changes:
            self._session(owner, name, keys, ended=ended)

    def end_session(self, owner: bytes, name: str) -> bool:
        """End a session, so that policies evict its chunks first. Returns whether the session was known."""
        with self._lock, self._changes:
            key = _session_key(owner, name)
            branches = self._sessions.pop(key) or []
            self._end_session(branches, key)
        return bool(branches)

    @locked
    def _session(self, owner: bytes, name: str, keys: Chain, *, ended: bool) -> None:
        key = _session_key(owner, name)
        branches = self._sessions.pop(key) or []
        if ended:
            self._branches.update(keys)
            self._end_session([*branches, keys], key)
        elif name:
            keys = keys[:_MAX_SESSION]
            self._continue(branches, keys)
            branches.append(keys)
            size = sum(_OVERHEAD + len(branch) for branch in branches)
            while len(branches) > _MAX_BRANCHES or size > _MAX_SESSION + _OVERHEAD:
                self._forget([oldest := branches.pop(0)])
                size -= _OVERHEAD + len(oldest)
            self._sessions.add(key, owner, size=size, end=self._clock() + _SESSION_SECONDS, value=branches)
            for _, forgotten in self._sessions.excess(MAX_HINTED):
                self._forget(forgotten)

    @locked
    def _continue(self, branches: list[Chain], keys: Chain) -> None:
        """Add the chunks `keys` as a branch (a conversation) of the session. A branch that `keys` continues is
        removed.
        """
        for branch in branches:
            # Equal keys have equal prefixes: this request continues that one, but perhaps for its last chunk.
            at = len(branch) - 2
            if at >= 0 and len(keys) > at and keys[at] == branch[at]:
                branches.remove(branch)
                self._branches.update(keys[at + 1 :])
                self._forget([branch[at + 1 :]])
                if len(keys) == at + 1 or keys[at + 1] != branch[at + 1]:
                    self._give_up(branch)
                return
        self._branches.update(keys)

    def _forget(self, branches: list[Chain]) -> None:
        counts = self._branches
        for branch in branches:
            for key in branch:
                if counts[key] > 1:
                    counts[key] -= 1
                else:
                    del counts[key]

    def counts(self) -> dict[str, int]:
        """Return the number of records by kind, for tests and debugging.

        Once all sessions and priorities have ended, all numbers are 0.
        """
        counts = {"sessions": self._sessions.total, "branches": self._branches.total()}
        counts |= {
            "priorities": len(self._priorities),
            "prioritized": len(self._prioritized),
            "ending": len(self._ending),
        }
        return counts

    def owned(self, tenant: str = "") -> Counter[bytes]:
        """Return, for each owner, how many chunks of one tenant have a priority from this owner. If several owners gave
        a chunk a priority, the chunk counts only for the first.
        """
        return self._tenants[tenant].owned

    @locked
    def recount(self) -> None:
        """After an interrupted change, count the priorities again, and pass them to the tiers' rebuilt policies."""
        self._priorities, self._sessions = self._priorities.rebuilt(), self._sessions.rebuilt()
        self._prioritized.clear()
        self._ending, self._tenants = {}, {}
        self._branches = Counter(key for _, chains in self._sessions.items() for chain in chains for key in chain)
        for claim, chain in self._priorities.items():
            known = self._priorities.claim(claim)
            self._count(claim, chain, known.owner if known else b"", self._part_of(chain[0])[0])
        for chain in [chain for _, chain in self._priorities.items()]:
            self._apply(chain)

    @locked
    def expire(self) -> None:
        """Remove expired priorities, and forget old sessions."""
        now = self._clock()
        for claim, chain in self._priorities.due(now):
            self._end(claim, chain)
        for _, branches in self._sessions.due(now):
            self._forget(branches)


def _session_key(owner: bytes, name: str) -> bytes:
    """Return a 32-byte digest of the owner and the session's name, or b"" for an empty name, which means no session."""
    if not name:
        return b""
    text = name.encode("utf-8", "surrogatepass")
    return hashlib.blake2b(text, digest_size=32, key=hashlib.sha256(owner).digest()).digest()
