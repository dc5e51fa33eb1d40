"""`AgentHint`: the `agent_hint` of a request, as vLLM's RFC 52113 proposes it."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Self

from attrs import define

_DEFAULT_TTL = 300.0


@define
class AgentHint:
    """The parts of an `agent_hint` that lmkv honours.

    `ttl`: seconds to keep the whole request after its end. `prefetch`: promote its chunks.

    All else in it is ignored: sessions, parts of a request, `offload` (every chunk is offloaded as it is computed)
    and `evict` (other requests share the chunks; the policy removes them when nobody uses them).
    """

    ttl: float = 0.0
    prefetch: bool = False

    @classmethod
    def of(cls, value: object) -> Self:
        """Read a mapping, or an object with the same fields."""
        control = _field(value, "cache_control")
        ttl = _field(control, "ttl") if control is not None else None
        edits = _field(_field(value, "context_management"), "edits")
        edits = edits if isinstance(edits, list | tuple) else ()
        return cls(
            ttl=seconds(_DEFAULT_TTL if control is not None and ttl is None else ttl),
            prefetch=any(_field(edit, "type") == "prefetch" for edit in edits),
        )


def _field(value: object, name: str) -> object:
    return value.get(name) if isinstance(value, Mapping) else getattr(value, name, None)


def seconds(value: object) -> float:
    return float(value) if isinstance(value, int | float) and 0 < value < 86_400 else 0.0
