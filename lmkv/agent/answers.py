"""Models of the answers that engines of one server give each other: any other answer counts as none."""

from __future__ import annotations

from typing import Annotated, Any, ClassVar

from attrs import fields, resolve_types
from pydantic import BaseModel, ConfigDict, Field, ValidationError, create_model

from lmkv.errors import printable
from lmkv.store.stats import TierStats

Number = Annotated[int, Field(gt=-(1 << 63), lt=1 << 63)]
Real = Annotated[float, Field(allow_inf_nan=False)]
_TYPES: dict[Any, Any] = {int: Number, int | None: Number | None}


class _Answer(BaseModel):
    """Fields that are not named are left out."""

    model_config: ClassVar[ConfigDict] = ConfigDict(strict=True)


class LookedUp(_Answer):
    total_tokens: Number
    hit_tokens: Number
    sources: dict[str, Number]


class Prefetched(_Answer):
    id: str
    done: bool
    found_tokens: Number
    ready_tokens: Number


class Cancelled(_Answer):
    id: str
    cancelled: bool


class Ended(_Answer):
    session: str
    ended: bool


class Pinned(_Answer):
    pinned_tokens: Number
    seconds: Real


class Unpinned(_Answer):
    unpinned_chunks: Number


class Cleared(_Answer):
    deleted_chunks: Number


def _fields(counters: type) -> dict[str, Any]:
    return {each.name: (_TYPES.get(each.type, each.type), ...) for each in fields(resolve_types(counters))}


_Tier: Any = create_model("_Tier", __base__=_Answer, **_fields(TierStats))


class Stats(_Answer):
    time: Real
    tiers: list[_Tier] = Field(min_length=1)
    leased: Number
    pinned: Number
    writing: Number
    loading: Number
    pending_io: Number
    tenants: dict[str, dict[str, Number]]
    loads_off: bool
    lookup_tokens: Number
    hit_tokens: Number


class Missed(_Answer):
    reason: str
    tokens: Number
    tier: str = ""
    seconds_ago: Real = 0.0


class Report(_Answer):
    request: str
    time: Real
    running: bool
    tokens: Number
    vllm_tokens: Number
    hit_tokens: Number
    sources: dict[str, Number]
    wait_seconds: Real
    load_bytes: Number
    load_seconds: Real
    missed: Missed | None = None


class Requests(_Answer):
    lookup_tokens: Number
    hit_tokens: Number
    requests: list[Report]


class Explained(Report):
    explanation: str
    parts: list[Explained] = []


_ANSWERS: dict[tuple[str, str], type[_Answer]] = {
    ("POST", "lookup"): LookedUp,
    ("POST", "prefetch"): Prefetched,
    ("GET", "prefetch"): Prefetched,
    ("DELETE", "prefetch"): Cancelled,
    ("DELETE", "session"): Ended,
    ("POST", "pin"): Pinned,
    ("POST", "unpin"): Unpinned,
    ("POST", "clear"): Cleared,
    ("GET", "stats"): Stats,
    ("GET", "requests"): Requests,
    ("GET", "explain"): Explained,
}


class NoAnswerError(Exception):
    """What came is no answer of an engine's to this call."""


def checked(method: str, path: str, data: bytes) -> dict[str, Any]:
    """The fields of an engine's answer to a call that is passed on. Raises NoAnswerError."""
    try:
        answer = _ANSWERS[method, path.split("/")[2]].model_validate_json(data)
    except ValidationError as error:
        wrong = error.errors(include_url=False, include_input=False, include_context=False)[0]
        reason = f"{'.'.join(map(str, wrong['loc']))}: {wrong['msg']}"
        raise NoAnswerError(f"no answer of this version of lmkv: {printable(reason)}") from None
    return answer.model_dump(exclude_unset=True)
