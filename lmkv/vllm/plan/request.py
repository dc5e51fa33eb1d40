"""`Request`: a request's options and chunk keys, and the state of its loads, stores and audits.

The state is split into classes such as `Waiting`, whose docstrings name the only classes that change the state. All
classes may read the state, on the scheduling thread.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from typing import Protocol, Self

from attrs import define, field, frozen

from lmkv.chunks.hashing import KeyChain, StateKey, TailKey, hash_prompt, state_keys
from lmkv.chunks.namespace import Namespace, tenants_of
from lmkv.errors import printable
from lmkv.protocols import ChunkKey, miss_in_words
from lmkv.store.leases import Lease
from lmkv.store.promotion import Promotion, SharedLookup
from lmkv.vllm.plan.identity import Adapters, Media, UnnamedMediaError, request_root
from lmkv.vllm.plan.options import MAX_TOKENS, RequestOptions

STALL = 0.8
"""If the time to compute is unknown, a request stops waiting after this many seconds without a new chunk, and
computes.
"""


BlockTables = Sequence[list[int]]
"""Block ids of a request in the order of its tokens, one list per KV cache group."""


@define
class WaitLimit:
    """Limits how long one request waits for chunks: all its waits together last at most `deadline` seconds.

    Each wait also has its own limit. A wait begins with a call of `lasts` and ends with a call of `end`. Time in which
    a request only waits for space in vLLM's KV cache does not count.
    """

    deadline: float
    late: bool = field(default=False, init=False)
    """Whether a wait has reached a limit. Then the request never waits again."""
    spent: float = field(default=0.0, init=False)
    """Seconds of all waits so far, updated by calls of the methods."""
    _since: float | None = field(default=None, init=False)
    _limit: float | None = field(default=None, init=False)
    _arrived: int = field(default=0, init=False)

    def lasts(self, now: float, limit: Callable[[], float | None], arrived: int) -> bool:
        """Return whether the request may continue to wait. `now`: the clock's time in seconds. `arrived`: number of
        chunks that have arrived so far.

        `limit`: a function that returns how many seconds this wait may last. The function is called once, when the wait
        begins. If the result is None, the wait continues while at least one chunk arrives every 0.8 seconds (`STALL`).
        """
        if self.late:
            return False
        if self._since is None:
            self._since, self._limit, self._arrived = now, limit(), arrived
        if self._limit is None and arrived > self._arrived:
            self._spend(now)
            self._arrived = arrived
        waited = now - self._since
        if waited > (STALL if self._limit is None else self._limit) or self.spent + waited > self.deadline:
            self.end(now)
            self.late = True
        return not self.late

    def waited(self, now: float) -> float:
        """Return the seconds of all waits until `now`, the clock's time."""
        return self.spent + (0.0 if self._since is None else now - self._since)

    def end(self, now: float) -> None:
        """End the current wait, because the chunks have arrived or the request no longer needs them."""
        if self._since is not None:
            self._spend(now)
            self._since = None

    def _spend(self, now: float) -> None:
        if self._since is not None:
            self.spent, self._since = self.spent + now - self._since, now


@frozen
class Miss:
    """How many tokens of a request were not loaded, and why. `reason`: one of `lmkv.vllm.scheduler.telemetry.REASONS`.

    `tier`: the tier that has, or has evicted, the first chunk or state that was not loaded. `seconds_ago`: seconds
    since the eviction.
    """

    reason: str
    tokens: int
    tier: str | None = None
    seconds_ago: float | None = None

    @property
    def looked_up(self) -> int:
        """Number of tokens that lmkv looked up and did not find: `tokens`, or 0 for a request that may not load."""
        return 0 if self.reason in ("skip_load", "unidentified") else self.tokens

    @property
    def public_reason(self) -> str:
        """The reason as clients may see it: "not_stored" instead of "other_salt", which reveals that a request with
        another salt has the same prompt.
        """
        return "not_stored" if self.reason == "other_salt" else self.reason

    def __str__(self) -> str:
        when = "" if self.seconds_ago is None else f" {self.seconds_ago:.0f} s ago"
        return f"{self.tokens} tokens missed: {miss_in_words(self.reason, self.tier)}{when}"

    def report(self) -> dict[str, object]:
        """Return the miss as JSON fields for the request's report, with `public_reason`."""
        fields = {
            "reason": self.public_reason,
            "tokens": self.tokens,
            "tier": self.tier,
            "seconds_ago": self.seconds_ago,
        }
        return {name: value for name, value in fields.items() if value is not None}


@define(eq=False)
class Audit:
    """An audit of a hit: vLLM computes the hit's tokens, and workers compare the stored chunks with the computed KV.
    The audit covers chunks `first` to `end - 1`, and the states after these chunks.

    `next`: index of the chunk to compare next. `tiers`: for each chunk, the tier from which it would have been loaded.
    `computed`: number of tokens of vLLM's own hit, which precede the audited chunks and are not compared. `tail`: the
    key of the prompt's tail (the tokens after its last whole chunk) if the tail is compared as well, else None.
    """

    first: int
    end: int
    tiers: Sequence[str] = field(repr=False)
    computed: int
    tail: TailKey | None = None
    next: int = field(init=False)

    def __attrs_post_init__(self) -> None:
        self.next = self.first

    def tier(self, chunk: int) -> str:
        """Return the tier from which chunk number `chunk` would have been loaded."""
        return self.tiers[min(chunk - self.first, len(self.tiers) - 1)]


class VLLMRequest(Protocol):
    """The attributes of a vLLM request that lmkv reads."""

    @property
    def request_id(self) -> str: ...

    @property
    def num_tokens(self) -> int:
        """Number of tokens with known ids: the prompt, and the generated tokens except placeholders."""
        ...

    @property
    def num_computed_tokens(self) -> int:
        """Number of tokens that vLLM has computed before the step that is being scheduled. All tokens and drafts of
        running steps count.
        """
        ...

    @property
    def num_in_flight_tokens(self) -> int:
        """How many of the `num_computed_tokens` tokens belong to steps that are still running, including drafts."""
        ...

    @property
    def all_token_ids(self) -> Sequence[int]: ...


@define(eq=False)
class Waiting:
    """The state of a request's lookup and of its waits for chunks. Only `Matcher` changes this state.

    `computed`: number of tokens of vLLM's own hit at the last lookup. `lease`: keeps the promised chunks in host
    memory, until they are loaded or the step ends. `between_steps`: whether the promised load is asynchronous.
    `shared_lookup`, `promotion`: the lookup in shared tiers and the promotion (load into host memory) for which the
    request waits. `worth_loading`: how many of the first chunks are faster to load than to compute; None until decided.
    `longest_hit`: with recurrent layers, the largest number of chunks in a hit that is worth loading. `deferred_since`:
    since when lmkv has told vLLM to ask again; None if the last lookup had another result.

    With the option `wait_for`, a request waits for chunks that another server is storing. `stored_elsewhere`: number of
    these chunks that were found so far. `look_at`: the time of the next lookup for them.
    """

    patience: WaitLimit
    computed: int = 0
    lease: Lease | None = None
    between_steps: bool = False
    shared_lookup: SharedLookup | None = None
    promotion: Promotion | None = None
    stored_elsewhere: int = 0
    look_at: float = 0.0
    worth_loading: float | None = None
    longest_hit: float = math.inf
    promoted: dict[str, int] = field(factory=dict, repr=False)
    """Number of chunks that were promoted for this request, by the tier from which they came."""
    deferred_since: float | None = None

    def release(self) -> None:
        """Release the lease of the promised chunks, and cancel the promotion for which the request waits."""
        self.release_lease()
        self.cancel()

    def release_lease(self) -> None:
        if self.lease is not None:
            self.lease.release()
            self.lease = None

    def cancel(self) -> None:
        """Cancel the promotion for which the request waits."""
        if self.promotion is not None:
            self.note_promoted()
            self.promotion.release()
            self.promotion = None

    def note_promoted(self) -> None:
        """Record how many chunks the promotion has read from each tier."""
        for tier, count in self.promotion.arrived.items() if self.promotion is not None else ():
            self.promoted[tier] = max(count, self.promoted.get(tier, 0))


@define
class Loading:
    """The state of a request's loads. Only `Loads` changes this state.

    `begun`: number of asynchronous loads that have begun. `failed`: whether a load has failed. Then the request
    computes the rest of its tokens and loads nothing more.
    """

    begun: int = 0
    failed: bool = False


@define(eq=False)
class Storing:
    """The state of a request's stores. Only `ChunkStores` and `StateStores` change this state.

    `stored`: how many of the first chunks are stored or being stored. `tail_due`: whether the prompt's tail (the tokens
    after its last whole chunk) must still be stored. `copying`: number of running stores.

    `last_states`: number of chunks before the latest recurrent states of generated tokens; 0 if there are none. Newer
    states replace these states. `kept`: number of chunks before the latest states that newer states do not replace.
    """

    stored: int = 0
    tail_due: bool = True
    kept: int = 0
    last_states: int = 0
    copying: int = 0
    _at_end: list[Callable[[], None]] = field(init=False, factory=list, repr=False)

    def begin_again(self, chunk: int) -> None:
        """Note that the chunks from index `chunk` on, and the prompt's tail, must be stored again."""
        self.stored, self.tail_due = min(self.stored, chunk), True

    def once_stored(self, call: Callable[[], None]) -> None:
        """Call `call` as soon as no store of the request is running: now, or when the last store ends."""
        if self.copying:
            self._at_end.append(call)
        else:
            call()

    def copy_ended(self) -> None:
        """Note that one of the request's stores has ended."""
        self.copying -= 1
        if not self.copying:
            calls, self._at_end = self._at_end, []
            # In their order. One that raises stops no other.
            with ExitStack() as all_of_them:
                for call in reversed(calls):
                    all_of_them.callback(call)


@define(eq=False)
class Auditing:
    """The state of a request's audits. Only `HitAudits` and `LoadAudits` change this state.

    `decided`: whether lmkv has already decided if the hit is audited. `audit`: the audit of the hit, or None.
    `reads_back`: whether the next load must be audited; otherwise a random number decides. `tenure`: how many times the
    request has released its blocks.
    """

    decided: bool = False
    audit: Audit | None = None
    reads_back: bool = False
    tenure: int = 0


@define(eq=False)
class Report:
    """The tokens of a request that lmkv promised, loaded and missed. Only `SchedulerObserver` changes this state.

    `sources`, `source_chunks`: number of tokens and of chunks from each tier in the last promise to vLLM. `promised`:
    the keys of the chunks in vLLM's own hit, and then of the promised chunks. `miss`: why the other tokens were not
    promised. `counted`: whether the metrics have counted the hit and the miss, which happens when vLLM first schedules
    the request.
    """

    sources: dict[str, int] = field(factory=dict)
    source_chunks: dict[str, int] = field(factory=dict, repr=False)
    promised: Sequence[ChunkKey] = field(default=(), repr=False)
    hit_tokens: int = 0
    load_bytes: int = 0
    load_seconds: float = 0.0
    miss: Miss | None = None
    counted: bool = False
    last_log_line: tuple[int, int] | None = field(default=None, repr=False)


@frozen
class KeyMaker:
    """The data from which one engine makes the chunk keys of its requests.

    `save_tails`: whether tails (the tokens after the last whole chunk of a prompt) have keys. `states`: number of slots
    for recurrent layers' states after each chunk. `longest`: length of the longest prompt in tokens.
    """

    namespace: Namespace
    chunk_size: int
    media: Media
    adapters: Adapters
    save_tails: bool = False
    states: int = 0
    longest: int = MAX_TOKENS


@define(eq=False)
class Request:
    """One request from its arrival to its end. `Request.of` makes a request. `vllm`: vLLM's request. `root`: the root
    of the request's chunk keys.
    """

    vllm: VLLMRequest = field(repr=lambda request: request.request_id)
    root: bytes = field(repr=False)
    options: RequestOptions = field(repr=False)
    waiting: Waiting = field(repr=False)
    naming: KeyMaker = field(repr=False)
    name: str = field(repr=False)
    """The request's id, shortened and printable, because clients choose ids."""
    tenants: Sequence[str] = field(repr=False)
    """The request's tenants in quotas: the label of its salt, and each of its tags as `name:value`."""
    weights: str = field(default="", repr=False)
    """The identity of the model's weights when the request arrived."""
    adapter: tuple[int, str] = (0, "")
    """The number of the request's adapter (0 without an adapter), and its identity."""
    unidentified: bool = False
    """Whether the request is not cached, because its weights, adapter or images are unknown or have changed."""
    loading: Loading = field(init=False, factory=Loading, repr=False)
    storing: Storing = field(init=False, factory=Storing, repr=False)
    auditing: Auditing = field(init=False, factory=Auditing, repr=False)
    report: Report = field(init=False, factory=Report, repr=False)
    chain: KeyChain = field(init=False, repr=lambda chain: f"<{len(chain.keys)} keys>")
    hashed_tokens: int = field(init=False, default=-1)
    """Number of prompt tokens that `chain` and `tail` cover. A streamed session's prompt grows with each input."""
    tail: TailKey | None = field(init=False, default=None, repr=False)
    """The key of the tokens after the prompt's last whole chunk; None if there are none, or if tails are not stored."""
    tail_chunk: int = field(init=False, default=0)
    """Number of whole chunks before the tail."""

    @classmethod
    def of(cls, vllm: VLLMRequest, naming: KeyMaker, identity: str | None, patience: WaitLimit) -> Self:
        """Make a request with the keys of its prompt.

        `naming`: the data from which keys are made. `identity`: the identity of the model that the workers have loaded;
        if None, the request is not cached. `patience`: the limit of the request's waits.
        """
        options, weights = RequestOptions.of(vllm, naming.longest), identity or ""
        lora = getattr(vllm, "lora_request", None)
        adapter = "" if lora is None else naming.adapters.identity(lora)
        root = request_root(naming.namespace, vllm, options.tags, weights, adapter)
        tenants = tenants_of(getattr(vllm, "cache_salt", None), options.tags)
        made = vllm, root, options, Waiting(patience), naming, printable(vllm.request_id), tenants, weights
        request = cls(*made, (int(getattr(lora, "lora_int_id", 0)), adapter))
        if identity is None or (lora is not None and not adapter):
            request.leave_out()
        request.follow()
        return request

    def follow(self) -> None:
        """Hash the prompt again if it has grown: a streamed session's prompt grows with each input.

        vLLM then counts earlier generated tokens, except the last one, as part of the prompt.
        """
        prompt_tokens: int = getattr(self.vllm, "num_prompt_tokens", 0)
        if prompt_tokens == self.hashed_tokens:
            return
        self.hashed_tokens = prompt_tokens
        try:
            extras = self.naming.media.extras(self.vllm, self.naming.chunk_size, self.weights, self.adapter[1])
        except UnnamedMediaError:
            extras = {}
            self.leave_out()
        size, tails = self.naming.chunk_size, self.naming.save_tails
        self.chain, self.tail = hash_prompt(self.known_tokens, self.root, size, extras, tail=tails)
        self.tail_chunk, self.storing.tail_due = len(self.chain.keys), True

    def leave_out(self) -> None:
        """Store and load nothing for this request from now on, because its weights, adapter or images are unknown or
        have changed.
        """
        self.unidentified = self.options.skip_save = self.options.skip_load = True

    @property
    def lora_name(self) -> str | None:
        """The name of the request's LoRA adapter; None without an adapter."""
        lora = getattr(self.vllm, "lora_request", None)
        return None if lora is None else str(lora.lora_name)

    @property
    def request_id(self) -> str:
        return self.vllm.request_id

    @property
    def num_tokens(self) -> int:
        """Number of tokens with known ids: the prompt and the generated tokens."""
        return self.vllm.num_tokens

    @property
    def prompt_tokens(self) -> int:
        """Number of prompt tokens, which grows in a streamed session."""
        tokens: int = getattr(self.vllm, "num_prompt_tokens", self.vllm.num_tokens)
        return tokens

    @property
    def last_token(self) -> int:
        """Index of the last token. vLLM always computes this token, because it needs the token's logits."""
        return self.vllm.num_tokens - 1

    @property
    def loadable(self) -> int:
        """Largest number of the request's first tokens that a hit may cover, including vLLM's own hit."""
        limit = self.options.max_load_tokens
        return self.last_token if limit is None else min(self.last_token, self.waiting.computed + limit)

    @property
    def known_tokens(self) -> Sequence[int]:
        # A slice of vLLM's read-only view copies twice; of the list behind it, once.
        return getattr(self.vllm, "_all_token_ids", self.vllm.all_token_ids)

    @property
    def answer(self) -> dict[str, object]:
        """The report that is returned for the option `lmkv.report`."""
        report = self.report
        missed = {} if report.miss is None else {"missed": report.miss.report()}
        return {
            **missed,
            "hit_tokens": report.hit_tokens,
            "sources": dict(report.sources),
            "wait_seconds": self.waiting.patience.spent,
            "load_bytes": report.load_bytes,
            "load_seconds": report.load_seconds,
        }

    def keys(self, count: int) -> list[ChunkKey]:
        """Return the first `count` chunk keys, or fewer if later token ids are not known yet."""
        if count > len(self.chain.keys):
            self.chain.extend(self.known_tokens)
        return self.chain.keys[:count]

    def keys_with_tail(self, count: int) -> list[ChunkKey]:
        """Return the first `count` chunk keys. If these are all whole chunks of the prompt, also return the key of
        the prompt's tail (the remaining tokens), if any.
        """
        keys = self.keys(count)
        return [*keys, self.tail] if self.tail is not None and count == self.tail_chunk else keys

    def state_keys(self, chunks: int) -> Sequence[StateKey]:
        """Return the keys of the states after the first `chunks` chunks. Return none for 0 chunks, or without recurrent
        layers.
        """
        if not (self.naming.states and chunks):
            return ()
        if chunks > len(self.chain.keys):
            self.chain.extend(self.known_tokens)
        return state_keys(self.chain.keys[chunks - 1], self.naming.states)

    def tokens(self, first: int, count: int) -> Sequence[int]:
        """Return up to `count` token ids from index `first` on: fewer if later ids are not known yet."""
        return self.known_tokens[first : first + count]
