"""Hints that a real agent's runtime could give: a session has ended."""

from __future__ import annotations

import threading
from collections import Counter

from lmkv.errors import UsageError
from lmkv.policies.base import BRANCHES
from lmkv.protocols import ChunkKey, Policy, TakesHints
from lmkv.simulation.trace import Trace
from lmkv.store.hints import Hints


def sessions_of(trace: Trace) -> list[bytes]:
    """The session of each request: as the trace says, or the first chunk that not many sessions share."""
    branches: Counter[ChunkKey] = Counter()
    seen: set[ChunkKey] = set()
    for request in trace.requests:
        for parent, key in zip(request.keys, request.keys[1:], strict=False):
            if key not in seen:
                seen.add(key)
                branches[parent] += 1
    return [
        request.session.encode()
        or next((key for key in request.keys if branches[key] < BRANCHES), request.keys[-1] if request.keys else b"")
        for request in trace.requests
    ]


class EndHints:
    """Tells a policy the session of each request, and when a session has ended, for a `share` of the sessions.

    Raises UsageError for a policy that takes no hints.
    """

    def __init__(self, trace: Trace, policy: Policy, share: float) -> None:
        if not isinstance(policy, TakesHints):
            raise UsageError(f"{policy!r} takes no hints")
        self._hints = Hints(threading.Lock(), {"": policy}, lambda: 0.0)
        self._requests = trace.requests
        self._sessions = sessions = sessions_of(trace)
        self._last = dict(zip(sessions, range(len(sessions)), strict=True))
        # The same sessions whatever the policy.
        names = list(self._last)
        self._telling = {name for number, name in enumerate(names) if int((number + 1) * share) > int(number * share)}

    def __call__(self, number: int) -> None:
        session = self._sessions[number]
        if session in self._telling:
            ended = self._last[session] == number
            self._hints.session(b"", session.hex(), self._requests[number].keys, ended=ended)
