"""The options of one request: its `kv_transfer_params` and its `agent_hint`."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final, Self

from attrs import define, field

from lmkv.vllm.plan.cacheable import has_tokens, must_be_computed

_DEFAULT_TTL = 300.0
_MAX_PRIORITY = 9
_MAX_EDITS = 64
_MAX_SESSION = 1024
"""Edits, and characters of a session's id, at most."""


MAX_TOKENS: Final = 1 << 20
"""Tokens of the longest prompt, if a server does not say."""
MAX_TAGS: Final = 64
MAX_TAG_CHARACTERS: Final = 4096
"""Tags of a request, and characters of their names and values together, at most."""
_MAX_KEYS: Final = 256
_MAX_NUMBER: Final = 1 << 32
_TAGS: Final = ("lmkv.tag.", "lmcache.tag.")
_NUMBERS: Final = (int, float, bool, type(None))


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


@define
class RequestOptions:
    """The options of a request in its `kv_transfer_params`, under keys with the prefix `lmkv.` or `lmcache.`:

    `skip_save`, `skip_load`: store or load nothing. `report`: answer with the tokens that were loaded. `prefetch`:
    promote this prompt's chunks and keep them for a while. `prefetch_tokens`: token ids of another prompt to
    prefetch, ignored if they exceed the longest prompt. `pin`: seconds to pin the request's chunks after it ends.
    `tag.<name>`: share only with equal tags, of a text, a number, a boolean or null. `wait_for`: wait until this number
    of leading tokens is found: another server is just storing them.

    A request with other tags, too many or too long ones, or more than 256 keys has no options and is not cached: it is
    unclear which requests it shares with.

    `max_load_tokens`, `max_offload_tokens`, which are vLLM's: most tokens that are loaded beyond vLLM's own
    hit, and most leading tokens that are stored. `agent_hint`, of vLLM's RFC 52113: see `AgentHint`.

    `do_remote_decode`, also vLLM's: another server will decode. A `kv_producer` then answers with the
    `wait_for` to give to that server.
    """

    skip_save: bool = False
    skip_load: bool = False
    report: bool = False
    prefetch: bool = False
    prefetch_tokens: tuple[int, ...] = ()
    pin_seconds: float = 0.0
    hint: AgentHint = field(factory=AgentHint)
    wait_for: int = 0
    max_load_tokens: int | None = None
    max_offload_tokens: int | None = None
    remote_decode: bool = False
    tags: tuple[tuple[str, str], ...] = ()

    @classmethod
    def of(cls, request: Any, longest: int = MAX_TOKENS) -> Self:
        """The options of a vLLM request. `longest`: tokens of the longest prompt."""
        params = getattr(request, "kv_transfer_params", None)
        params = params if isinstance(params, Mapping) else {}
        tags = _tags(params)
        if tags is None:
            return cls(skip_save=True, skip_load=True, report=_is_true(params.get("lmkv.report")))
        nameless, whole = not has_tokens(request), must_be_computed(request)
        hint = AgentHint.of(getattr(request, "agent_hint", None) or params.get("agent_hint"))
        return cls(
            skip_save=nameless or any(map(_is_true, map(params.get, ("lmkv.skip_save", "lmcache.skip_save")))),
            skip_load=nameless or whole or _is_true(params.get("lmkv.skip_load")),
            report=_is_true(params.get("lmkv.report")),
            prefetch=_is_true(params.get("lmkv.prefetch")) or hint.prefetch,
            prefetch_tokens=_token_ids(params.get("lmkv.prefetch_tokens"), longest),
            pin_seconds=seconds(params.get("lmkv.pin")),
            hint=hint,
            wait_for=_tokens(params.get("lmkv.wait_for")),
            max_load_tokens=_limit(params.get("max_load_tokens")),
            max_offload_tokens=_limit(params.get("max_offload_tokens", params.get("lmcache.max_offload_tokens"))),
            remote_decode=_is_true(params.get("do_remote_decode")),
            tags=tags,
        )


def _tags(params: Mapping[Any, Any]) -> tuple[tuple[str, str], ...] | None:
    """Names and values of the tags. None if one is unreadable, or if there are too many."""
    if len(params) > _MAX_KEYS:
        return None
    found, room = dict[str, str](), MAX_TAG_CHARACTERS
    for key, value in params.items():
        if isinstance(key, str) and key.startswith(_TAGS):
            name, text = key.partition(".tag.")[2], _text(value)
            if text is None or (room := room - len(name) - len(text)) < 0 or found.setdefault(name, text) != text:
                return None
    return tuple(sorted(found.items())) if len(found) <= MAX_TAGS else None


def _text(value: object) -> str | None:
    """A text, or what Python writes for a number, a boolean or None."""
    if isinstance(value, str):
        return str.__str__(value)
    small = type(value) is not int or value.bit_length() <= MAX_TAG_CHARACTERS
    return repr(value) if type(value) in _NUMBERS and small else None


def _is_true(value: object) -> bool:
    return value is True or (isinstance(value, str) and len(value) <= 4 and value.lower() in ("1", "true", "yes", "on"))


def _token_ids(value: object, longest: int) -> tuple[int, ...]:
    """The token ids of a list, () for anything else: a client's mistake must not fail the request."""
    if not isinstance(value, list | tuple) or len(value) > longest:
        return ()
    valid = all(isinstance(token, int) and 0 <= token < _MAX_NUMBER for token in value)
    return tuple(value) if valid else ()


def _tokens(value: object) -> int:
    return value if isinstance(value, int) and 0 < value < _MAX_NUMBER else 0


def _limit(value: object) -> int | None:
    return value if type(value) is int and 0 <= value < _MAX_NUMBER else None
