"""What is known of one request: its options, its chunk keys, and the state of its loads and stores."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Protocol, Self

from attrs import define, field

from lmkv.chunks.hashing import KeyChain, TailKey
from lmkv.protocols import ChunkKey
from lmkv.store.discovery import Discovery
from lmkv.store.leases import Lease
from lmkv.store.promotion import Promotion
from lmkv.vllm.cacheable import has_tokens, must_be_computed
from lmkv.vllm.scheduler.hints import AgentHint, seconds
from lmkv.vllm.scheduler.miss import Miss
from lmkv.vllm.scheduler.patience import Patience


@define
class RequestOptions:
    """What a request asks for in its `kv_transfer_params`, under keys with the prefix `lmkv.`:

    `skip_save`, `skip_load`: store or load nothing. `report`: answer with what was loaded. `prefetch`:
    promote this prompt's chunks and keep them for a while. `prefetch_tokens`: token ids of another prompt to
    prefetch. `pin`: seconds to pin the request's chunks after it ends. `tag.<name>`: share only with equal
    tags. `wait_for`: wait until so many leading tokens are found, for another server is just storing them.

    `max_load_tokens`, `max_offload_tokens`, which are vLLM's: at most so many tokens are loaded beyond vLLM's own
    hit, and only so many leading tokens are stored. `agent_hint`, of vLLM's RFC 52113: see `AgentHint`.

    `do_remote_decode`, also vLLM's: another server will decode. A `kv_producer` then answers with the
    `wait_for` to give to that server.
    """

    skip_save: bool = False
    skip_load: bool = False
    report: bool = False
    prefetch: bool = False
    prefetch_tokens: tuple[int, ...] = ()
    pin_seconds: float = 0.0
    wait_for: int = 0
    max_load_tokens: int | None = None
    max_offload_tokens: int | None = None
    remote_decode: bool = False
    tags: tuple[tuple[str, str], ...] = ()

    @classmethod
    def of(cls, request: Any) -> Self:
        """The options of a vLLM request."""
        params = getattr(request, "kv_transfer_params", None)
        params = params if isinstance(params, Mapping) else {}
        nameless, whole = not has_tokens(request), must_be_computed(request)
        hint = AgentHint.of(getattr(request, "agent_hint", None) or params.get("agent_hint"))
        return cls(
            skip_save=nameless or _is_true(params.get("lmkv.skip_save")),
            skip_load=nameless or whole or _is_true(params.get("lmkv.skip_load")),
            report=_is_true(params.get("lmkv.report")),
            prefetch=_is_true(params.get("lmkv.prefetch")) or hint.prefetch,
            prefetch_tokens=_token_ids(params.get("lmkv.prefetch_tokens")),
            pin_seconds=seconds(params.get("lmkv.pin")) or hint.ttl,
            wait_for=_tokens(params.get("lmkv.wait_for")),
            max_load_tokens=_limit(params.get("max_load_tokens")),
            max_offload_tokens=_limit(params.get("max_offload_tokens")),
            remote_decode=_is_true(params.get("do_remote_decode")),
            tags=tuple(sorted((str(k)[9:], str(v)) for k, v in params.items() if str(k).startswith("lmkv.tag."))),
        )


def _is_true(value: object) -> bool:
    return value is True or (isinstance(value, str) and value.lower() in ("1", "true", "yes", "on"))


def _token_ids(value: object) -> tuple[int, ...]:
    """() for anything but a list of token ids: a client's mistake must not fail the request."""
    if not isinstance(value, list | tuple):
        return ()
    valid = all(isinstance(token, int) and 0 <= token < 2**32 for token in value)
    return tuple(value) if valid else ()


def _tokens(value: object) -> int:
    return value if isinstance(value, int) and 0 < value < 2**32 else 0


def _limit(value: object) -> int | None:
    return value if type(value) is int and value >= 0 else None


BlockTables = Sequence[list[int]]
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
    """One request between its arrival and its end. `root`: of its chunk keys.

    Written by `StorePlanner`: `stored`, how many leading chunks are stored or being stored. The rest by
    `LoadPlanner`: `computed`, the tokens of vLLM's own hit at the last lookup; `lease`, on the chunks that
    this lookup promised, until they are loaded or the step ends; `discovery`, the question to shared tiers,
    and `promotion`, of chunks, that the request waits for with `patience`; `between_steps`, whether
    the promised load is asynchronous; `async_loads`, how many such loads have begun; `pays`, how many leading
    chunks are sooner loaded than computed, None until it is decided; `logged`, what was logged last.
    """

    request: Request = field(repr=lambda request: request.request_id)
    root: bytes = field(repr=False)
    chain: KeyChain = field(repr=lambda chain: f"<{len(chain.keys)} keys>")
    options: RequestOptions = field(repr=False)
    patience: Patience = field(repr=False)
    prompt_tokens: int = -1
    """Of the prompt that `chain` and `tail` were made for: that of a session grows with each input."""
    tail: TailKey | None = field(default=None, repr=False)
    """Of the prompt's tokens after its last whole chunk; None when there are none, or tails are not stored."""
    tail_chunk: int = 0
    """How many whole chunks come before the tail."""
    tail_due: bool = True
    """Whether the tail has still to be stored."""
    stored: int = 0
    computed: int = 0
    lease: Lease | None = None
    discovery: Discovery | None = None
    promotion: Promotion | None = None
    promoted: dict[str, int] = field(factory=dict, repr=False)
    """Chunks that were brought up for this request, by the tier that they came from."""
    pays: float | None = None
    between_steps: bool = False
    async_loads: int = 0
    logged: tuple[int, int] | None = field(default=None, repr=False)
    sources: dict[str, int] = field(factory=dict)
    """Tokens that were promised last, by the tier that has them."""
    promised: list[ChunkKey] = field(factory=list, repr=False)
    """The chunks of that promise, and those of vLLM's own hit before them."""
    hit_tokens: int = 0
    load_bytes: int = 0
    load_seconds: float = 0.0
    source_chunks: dict[str, int] = field(factory=dict, repr=False)
    """The same in chunks."""
    miss: Miss | None = None
    """Why the rest was not promised."""
    counted: bool = False
    """Whether what was found and missed is in the metrics: once, when the request is first scheduled."""
    deferred_since: float | None = None
    """When vLLM was first told to ask again."""
    disabled: bool = False
    """A load of this request failed: it computes the rest, and no further load is offered."""

    @property
    def request_id(self) -> str:
        return self.request.request_id

    @property
    def last_token(self) -> int:
        """Number of the last token, which is always computed: vLLM needs its logits."""
        return self.request.num_tokens - 1

    @property
    def loadable(self) -> int:
        """Leading tokens that a load may end with, at most."""
        limit = self.options.max_load_tokens
        return self.last_token if limit is None else min(self.last_token, self.computed + limit)

    @property
    def known_tokens(self) -> Sequence[int]:
        # vLLM's read-only view copies twice when it is sliced; the list behind it once.
        return getattr(self.request, "_all_token_ids", self.request.all_token_ids)

    def keys(self, count: int) -> list[ChunkKey]:
        """The first `count` keys. Hashes the tokens that have become known since the last call."""
        if count > len(self.chain.keys):
            self.chain.extend(self.known_tokens)
        return self.chain.keys[:count]

    def keys_with_tail(self, count: int) -> list[ChunkKey]:
        """The first `count` keys, and that of the prompt's tail if it comes next."""
        keys = self.keys(count)
        return [*keys, self.tail] if self.tail is not None and count == self.tail_chunk else keys

    def find_tail(self) -> None:
        """Compute the key of the prompt's tail, once all keys of the prompt are."""
        self.tail = self.chain.tail(self.known_tokens)
        self.tail_chunk = len(self.chain.keys)

    def tokens(self, first: int, count: int) -> Sequence[int]:
        """Up to `count` token ids from number `first` on, as far as they are known."""
        return self.known_tokens[first : first + count]

    def release(self) -> None:
        """Release the lease and the promotion."""
        self.drop_lease()
        self.drop_promotion()

    def drop_lease(self) -> None:
        if self.lease is not None:
            self.lease.release()
            self.lease = None

    def drop_promotion(self) -> None:
        if self.promotion is not None:
            self.note_promoted()
            self.promotion.release()
            self.promotion = None

    def note_promoted(self) -> None:
        """Note from which tiers the promotion has brought chunks. Those that it found in host memory came before."""
        for tier, count in self.promotion.arrived.items() if self.promotion is not None else ():
            self.promoted[tier] = max(count, self.promoted.get(tier, 0))

    def report(self) -> dict[str, object]:
        """What `lmkv.report` answers when the request ends."""
        missed = {} if self.miss is None else {"missed": self.miss.report()}
        return {
            **missed,
            "hit_tokens": self.hit_tokens,
            "sources": dict(self.sources),
            "load_bytes": self.load_bytes,
            "load_seconds": self.load_seconds,
        }
