"""A request from its arrival to its end, as both directions see it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Protocol, Self

from attrs import define, field

from lmkv.chunks.hashing import KeyChain
from lmkv.protocols import ChunkKey
from lmkv.store.leases import Lease
from lmkv.store.promotion import Promotion


@define
class RequestOptions:
    """What the keys mean, each with the prefix `lmkv.`:

    `skip_save`, `skip_load`: leave this request out. `report`: answer with what was loaded. `prefetch`: bring
    up and hold this prompt's chunks. `prefetch_tokens`: token ids of another prompt to bring up.
    `pin`: seconds to hold the request's chunks after it ends. `tag.<name>`: share only with equal tags.
    """

    skip_save: bool = False
    skip_load: bool = False
    report: bool = False
    prefetch: bool = False
    prefetch_tokens: tuple[int, ...] = ()
    pin_seconds: float = 0.0
    tags: tuple[tuple[str, str], ...] = ()

    @classmethod
    def of(cls, request: Any) -> Self:
        """Read them off a request. Prompts given as embeddings have no tokens to be found by: no caching."""
        params = getattr(request, "kv_transfer_params", None)
        params = params if isinstance(params, Mapping) else {}
        no_tokens = getattr(request, "prompt_embeds", None) is not None
        return cls(
            skip_save=no_tokens or _is_true(params.get("lmkv.skip_save")),
            skip_load=no_tokens or _is_true(params.get("lmkv.skip_load")),
            report=_is_true(params.get("lmkv.report")),
            prefetch=_is_true(params.get("lmkv.prefetch")),
            prefetch_tokens=_token_ids(params.get("lmkv.prefetch_tokens")),
            pin_seconds=_seconds(params.get("lmkv.pin")),
            tags=tuple(
                sorted((str(k)[9:], str(v)) for k, v in params.items() if str(k).startswith("lmkv.tag."))
            ),
        )


def _is_true(value: object) -> bool:
    return value is True or (isinstance(value, str) and value.lower() in ("1", "true", "yes", "on"))


def _token_ids(value: object) -> tuple[int, ...]:
    """What is not a list of token ids is ignored: a client's mistake must not cost the request."""
    if not isinstance(value, list | tuple):
        return ()
    valid = all(isinstance(token, int) and 0 <= token < 2**32 for token in value)
    return tuple(value) if valid else ()


def _seconds(value: object) -> float:
    return float(value) if isinstance(value, int | float) and 0 < value < 86_400 else 0.0


BlockTables = Sequence[Sequence[int]]
"""Block ids of a request in the order of its tokens, one list for each KV cache group."""


class Request(Protocol):
    """What is read of a vLLM request."""

    @property
    def request_id(self) -> str: ...

    @property
    def num_tokens(self) -> int:
        """Known tokens, without placeholders for those that are being sampled."""
        ...

    @property
    def all_token_ids(self) -> Sequence[int]: ...


@define(eq=False)
class RequestState:
    """`root`: of its chunk keys. The rest is written by one side each:

    storing: `stored`, the leading chunks that are stored or being stored.
    loading: `computed`, vLLM's own hit at the last lookup; `lease`, what that lookup promised, until it is
    used or the step ends; `promotion`, chunks being brought up while it waits, since `waiting_since`;
    `between_steps` and `async_loads`, whether the last promise is loaded between steps and how many were.
    """

    request: Request
    root: bytes
    chain: KeyChain
    options: RequestOptions
    stored: int = 0
    computed: int = 0
    lease: Lease | None = None
    promotion: Promotion | None = None
    waiting_since: float | None = None
    worth: bool | None = None
    between_steps: bool = False
    async_loads: int = 0
    logged: tuple[int, int] | None = None
    sources: dict[str, int] = field(factory=dict)
    """Tokens that were promised last, by the tier that had them."""
    hit_tokens: int = 0
    load_bytes: int = 0
    load_seconds: float = 0.0
    disabled: bool = False
    """A load of this request failed: it computes the rest by itself and is not offered anything again."""

    @property
    def request_id(self) -> str:
        return self.request.request_id

    def keys(self, count: int) -> list[ChunkKey]:
        """The first `count` keys, hashing what has become known since the last call."""
        if count > len(self.chain.keys):
            # vLLM's read-only view copies twice when it is sliced; the list behind it once.
            self.chain.extend(getattr(self.request, "_all_token_ids", self.request.all_token_ids))
        return self.chain.keys[:count]

    def tokens(self, first: int, count: int) -> list[int]:
        """So many of its tokens from number `first` on, as far as they are known."""
        return list(self.request.all_token_ids[first : first + count])

    def release(self) -> None:
        """Let go of everything that was promised or brought up."""
        self.drop_lease()
        self.drop_promotion()

    def drop_lease(self) -> None:
        if self.lease is not None:
            self.lease.release()
            self.lease = None

    def drop_promotion(self) -> None:
        if self.promotion is not None:
            self.promotion.release()
            self.promotion = None

    def report(self) -> dict[str, object]:
        """What a request that asks for it is told when it ends."""
        return {
            "hit_tokens": self.hit_tokens,
            "sources": dict(self.sources),
            "load_bytes": self.load_bytes,
            "load_seconds": self.load_seconds,
        }
