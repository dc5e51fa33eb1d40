"""`AgentHint`: the `agent_hint` of a request, as vLLM's RFC 52113 proposes it."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Self

from attrs import define

_DEFAULT_TTL = 300.0
_MAX_PRIORITY = 9
_MAX_EDITS = 64
_MAX_SESSION = 1024
"""Edits, and characters of a session's id, at most."""


@define
class AgentHint:
    """The parts of an `agent_hint` that lmkv honours.

    `ttl`: seconds after its end for which its chunks are evicted last. `prefetch`: promote its chunks. `session`: its
    id. `ended`: the session ends with this request, or this branch of it (an edit of the type `evict`): chunks that no
    other one shares are evicted first. `priority`: above 0, its chunks are evicted last. `waits`: seconds until the
    session probably comes back, from a tool or a person: its chunks are evicted last until then.

    All else in it is ignored: parts of a request, and `offload` (every chunk is offloaded as it is computed),
    more than 64 edits, and an id of more than 1,024 characters.
    """

    ttl: float = 0.0
    prefetch: bool = False
    session: str = ""
    ended: bool = False
    priority: int = 0
    waits: float = 0.0

    @classmethod
    def of(cls, value: object) -> Self:
        """Read a mapping, or an object with the same fields."""
        control = _field(value, "cache_control")
        ttl = _field(control, "ttl") if control is not None else None
        edits = _field(_field(value, "context_management"), "edits")
        edits = edits if isinstance(edits, list | tuple) and len(edits) <= _MAX_EDITS else ()
        kinds = [_field(edit, "type") for edit in edits]
        session, priority = _field(value, "session_id"), _field(value, "priority")
        return cls(
            session=session if isinstance(session, str) and len(session) <= _MAX_SESSION else "",
            ended="evict" in kinds or _field(value, "session_ended") is True,
            priority=max(0, min(priority, _MAX_PRIORITY)) if type(priority) is int else 0,
            waits=seconds(_field(value, "waits_seconds")),
            ttl=seconds(_DEFAULT_TTL if control is not None and ttl is None else ttl),
            prefetch="prefetch" in kinds,
        )


def _field(value: object, name: str) -> object:
    return value.get(name) if isinstance(value, Mapping) else getattr(value, name, None)


def seconds(value: object) -> float:
    return float(value) if isinstance(value, int | float) and 0 < value < 86_400 else 0.0
