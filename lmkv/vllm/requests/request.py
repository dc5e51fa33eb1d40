"""`RequestState`: one request's options, its chunk keys, and how far its loads and stores are."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from typing import Protocol, Self

from attrs import define, field

from lmkv.chunks.hashing import KeyChain, StateKey, TailKey, hash_prompt, state_keys
from lmkv.chunks.namespace import Namespace, tenants_of
from lmkv.errors import printable
from lmkv.protocols import ChunkKey
from lmkv.store.leases import Lease
from lmkv.store.promotion import Promotion
from lmkv.store.shared_lookup import SharedLookup
from lmkv.vllm.identity import Adapters, request_root
from lmkv.vllm.media import Media, UnnamedMediaError
from lmkv.vllm.requests.audit import Audit
from lmkv.vllm.requests.miss import Miss
from lmkv.vllm.requests.options import MAX_TOKENS, RequestOptions
from lmkv.vllm.requests.patience import Patience

BlockTables = Sequence[list[int]]
"""Block ids of a request in the order of its tokens, one list for each KV cache group."""


class Request(Protocol):
    """The attributes of a vLLM request that lmkv reads."""

    @property
    def request_id(self) -> str: ...

    @property
    def num_tokens(self) -> int:
        """Known tokens, without placeholders for those that are being sampled."""
        ...

    @property
    def num_computed_tokens(self) -> int:
        """Tokens before the step that is being scheduled, as if all drafts of steps in flight were accepted."""
        ...

    @property
    def num_in_flight_tokens(self) -> int:
        """Tokens among `num_computed_tokens` of steps whose outputs are not known yet, drafts included."""
        ...

    @property
    def all_token_ids(self) -> Sequence[int]: ...


@define(eq=False)
class RequestState:
    """One request between its arrival and its end; made by `RequestState.of`.

    `root`: the root of its chunk keys. `StorePlanner` writes `stored`, how many leading chunks are stored or being
    stored. `LoadPlanner` writes the rest: `computed`, the tokens of vLLM's own hit at the last lookup; `lease`, on
    the chunks that this lookup promised, until they are loaded or the step ends; `shared_lookup`, the question to
    shared tiers, and `promotion`, of chunks, that the request waits for with `patience`; `between_steps`, whether
    the promised load is asynchronous; `async_loads`, how many such loads have begun; `pays`, how many leading
    chunks are sooner loaded than computed, None until it is decided; `logged`, the tokens logged last.
    """

    request: Request = field(repr=lambda request: request.request_id)
    root: bytes = field(repr=False)
    options: RequestOptions = field(repr=False)
    patience: Patience = field(repr=False)
    chunk_size: int = field(repr=False)
    save_tails: bool = field(repr=False)
    name: str = field(repr=False)
    """Its id for people: clients choose ids, so it is cut, and printable."""
    tenants: Sequence[str] = field(repr=False)
    """Names that a quota may have for this request: the label of its salt, and its tags as `name:value`."""
    media: Media = field(repr=False)
    weights: str = field(default="", repr=False)
    """Their identity."""
    adapter: tuple[int, str] = (0, "")
    """Its number, 0 without one, and its identity."""
    chain: KeyChain = field(init=False, repr=lambda chain: f"<{len(chain.keys)} keys>")
    prompt_tokens: int = -1
    """Length of the prompt that `chain` and `tail` belong to; the prompt of a session grows with each input."""
    tail: TailKey | None = field(default=None, repr=False)
    """Key of the tokens after the last whole chunk; None without such tokens, or if tails are not stored."""
    tail_chunk: int = 0
    """How many whole chunks come before the tail."""
    tail_due: bool = True
    """Whether the tail has still to be stored."""
    stored: int = 0
    computed: int = 0
    lease: Lease | None = None
    shared_lookup: SharedLookup | None = None
    arrived: int = 0
    """Leading chunks that were found of those that another server stores for it."""
    look_at: float = 0.0
    """When to look for more of them."""
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
    """Whether the metrics have counted its hit and miss, as they do when it is first scheduled."""
    deferred_since: float | None = None
    """When vLLM was first told to ask again."""
    states: int = field(default=0, repr=False)
    """State entries of each boundary between chunks."""
    kept: int = 0
    """Leading chunks up to the last states that are kept for other requests."""
    last_states: int = 0
    """Leading chunks up to the last states of its answer, which are replaced by the next."""
    resumable: float = math.inf
    """Most leading chunks of a hit. The states behind more of them are slower to load than to compute."""
    drawn: bool = False
    """Whether it was decided if its hit is audited."""
    audit: Audit | None = field(default=None, repr=False)
    """The hit that it computes all the same."""
    audits_load: bool = False
    """Whether its next load is read back in any case."""
    tenure: int = 0
    """How often it has given up its blocks."""
    unidentified: bool = False
    """Its weights, adapter or images have no identity, or changed while it ran."""
    disabled: bool = False
    """A load of this request failed: it computes the rest, and no further load is offered."""
    copying: int = 0
    """Stores of its chunks and states that have not ended."""
    _at_end: list[Callable[[], None]] = field(init=False, factory=list, repr=False)

    @classmethod
    def of(
        cls,
        request: Request,
        namespace: Namespace,
        identity: str | None,
        chunk_size: int,
        patience: Patience,
        *,
        media: Media,
        adapters: Adapters,
        save_tails: bool,
        states: int = 0,
        longest: int = MAX_TOKENS,
    ) -> Self:
        """The state of a new request, with the keys of its prompt.

        `identity`: of what the workers have loaded; None: unknown, the request is not cached. `media`, `adapters`: of
        the engine. `save_tails`: its tail gets a key, too. `states`: entries of each boundary. `longest`: tokens of the
        longest prompt.
        """
        options = RequestOptions.of(request, longest)
        lora, adapter = getattr(request, "lora_request", None), ""
        if lora is not None:
            adapter = adapters.identity(lora)
        root = request_root(namespace, request, options.tags, identity or "", adapter)
        number = int(getattr(lora, "lora_int_id", 0))
        tenants = tenants_of(getattr(request, "cache_salt", None), options.tags)
        state = cls(
            request,
            root,
            options,
            patience,
            chunk_size,
            save_tails,
            printable(request.request_id),
            tenants,
            media,
            identity or "",
            (number, adapter),
            states=states,
        )
        if identity is None or (lora is not None and not adapter):
            state.leave_out()
        state.follow()
        return state

    def follow(self) -> None:
        """Hash the prompt; again when a streamed session has got its next input, perhaps with images.

        vLLM then drops the last token that was sampled; the others that it has computed become prompt.
        """
        prompt_tokens: int = getattr(self.request, "num_prompt_tokens", 0)
        if prompt_tokens == self.prompt_tokens:
            return
        self.prompt_tokens = prompt_tokens
        try:
            extras = self.media.extras(self.request, self.chunk_size, self.weights, self.adapter[1])
        except UnnamedMediaError:
            extras = {}
            self.leave_out()
        tokens, tail = self.known_tokens, self.save_tails
        self.chain, self.tail = hash_prompt(tokens, self.root, self.chunk_size, extras, tail=tail)
        self.tail_chunk, self.tail_due = len(self.chain.keys), True

    def leave_out(self) -> None:
        """Store and load nothing: it is unknown what the request is computed with, in part at least."""
        self.unidentified = self.options.skip_save = self.options.skip_load = True

    def once_stored(self, call: Callable[[], None]) -> None:
        """Call as soon as no store of its chunks is under way, which may be now."""
        if self.copying:
            self._at_end.append(call)
        else:
            call()

    def copy_ended(self) -> None:
        """A store of its chunks has ended."""
        self.copying -= 1
        if not self.copying:
            calls, self._at_end = self._at_end, []
            # In their order; one that raises ends no other.
            with ExitStack() as all_of_them:
                for call in reversed(calls):
                    all_of_them.callback(call)

    @property
    def lora_name(self) -> str | None:
        """The name of its adapter, by which vLLM's own prefix cache knows that."""
        lora = getattr(self.request, "lora_request", None)
        return None if lora is None else str(lora.lora_name)

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

    def state_keys(self, chunks: int) -> Sequence[StateKey]:
        """The keys of the states behind the first `chunks` chunks; none for 0 chunks, or without recurrent layers."""
        if not (self.states and chunks):
            return ()
        if chunks > len(self.chain.keys):
            self.chain.extend(self.known_tokens)
        return state_keys(self.chain.keys[chunks - 1], self.states)

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
        """Note from which tiers the promotion has brought chunks, without those found in host memory."""
        for tier, count in self.promotion.arrived.items() if self.promotion is not None else ():
            self.promoted[tier] = max(count, self.promoted.get(tier, 0))

    def report(self) -> dict[str, object]:
        """The answer to `lmkv.report` when the request ends."""
        missed = {} if self.miss is None else {"missed": self.miss.report()}
        return {
            **missed,
            "hit_tokens": self.hit_tokens,
            "sources": dict(self.sources),
            "wait_seconds": self.patience.spent,
            "load_bytes": self.load_bytes,
            "load_seconds": self.load_seconds,
        }
