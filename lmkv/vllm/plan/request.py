"""`Request`: one request's options, its chunk keys, and how far its loads, stores and audits are.

Each part has one writer, which is named by it. All are read everywhere, on the scheduling thread only.
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
from lmkv.outcomes import miss_in_words
from lmkv.protocols import ChunkKey
from lmkv.store.leases import Lease
from lmkv.store.promotion import Promotion, SharedLookup
from lmkv.vllm.plan.identity import Adapters, request_root
from lmkv.vllm.plan.media import Media, UnnamedMediaError
from lmkv.vllm.plan.options import MAX_TOKENS, RequestOptions

STALL = 0.8
"""Seconds without a chunk after which a request computes, while the time to compute is not known."""


BlockTables = Sequence[list[int]]
"""Block ids of a request in the order of its tokens, one list for each KV cache group."""


@define
class Patience:
    """The waits of one request, one after the other. All together last `deadline` seconds at most.

    A wait has a limit of its own. It lasts from the first call of `lasts` to `end`: a request that has been
    promised its chunks and waits for KV space alone is not waiting for them.
    """

    deadline: float
    late: bool = field(default=False, init=False)
    """Whether a wait took too long. Then no other wait follows."""
    spent: float = field(default=0.0, init=False)
    """Seconds of all waits, up to the last call."""
    _since: float | None = field(default=None, init=False)
    _limit: float | None = field(default=None, init=False)
    _arrived: int = field(default=0, init=False)

    def lasts(self, now: float, limit: Callable[[], float | None], arrived: int) -> bool:
        """Whether the request may wait on. `arrived`: chunks that are there by now.

        `limit`: seconds that this wait may last; asked once, at its beginning. None: not known, and the wait
        goes on as long as chunks arrive, at least one every `STALL` seconds.
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
        """Seconds of all waits."""
        return self.spent + (0.0 if self._since is None else now - self._since)

    def end(self, now: float) -> None:
        """The chunks that the request waited for are there, or given up."""
        if self._since is not None:
            self._spend(now)
            self._since = None

    def _spend(self, now: float) -> None:
        if self._since is not None:
            self.spent, self._since = self.spent + now - self._since, now


@frozen
class Miss:
    """`tokens` of a request were not loaded for a `reason` (see `lmkv.vllm.scheduler.telemetry.REASONS`).

    `tier`: where they were, or are. `seconds_ago`: when they were evicted.
    """

    reason: str
    tokens: int
    tier: str | None = None
    seconds_ago: float | None = None

    @property
    def looked_up(self) -> int:
        """The tokens that were looked up, and missed: none of a request that wants no load, or may have none."""
        return 0 if self.reason in ("skip_load", "unidentified") else self.tokens

    @property
    def told(self) -> str:
        """The reason for whoever must not learn of other salts."""
        return "not_stored" if self.reason == "other_salt" else self.reason

    def __str__(self) -> str:
        when = "" if self.seconds_ago is None else f" {self.seconds_ago:.0f} s ago"
        return f"{self.tokens} missed: {miss_in_words(self.reason, self.tier)}{when}"

    def report(self) -> dict[str, object]:
        """The miss in the request's report, which must not tell whether another salt's requests share the prompt."""
        fields = {"reason": self.told, "tokens": self.tokens, "tier": self.tier, "seconds_ago": self.seconds_ago}
        return {name: value for name, value in fields.items() if value is not None}


@define(eq=False)
class Audit:
    """The hit's chunks from number `first` up to `end`, and the states behind them; `next` is compared next.

    `tiers`: which tier would have delivered each of these chunks. `computed`: tokens of vLLM's own hit before them,
    which may have been loaded earlier. `tail`: of the prompt, if it comes next and has whole pages.
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
        """The tier that would have delivered this chunk."""
        return self.tiers[min(chunk - self.first, len(self.tiers) - 1)]


class VLLMRequest(Protocol):
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
class Waiting:
    """What a request waits for, and what was decided about its lookup. Written by `Matcher`.

    `computed`: the tokens of vLLM's own hit at the last lookup. `lease`: on the chunks that this lookup promised, until
    they are loaded or the step ends; `between_steps`: whether that load is asynchronous. `shared_lookup`, `promotion`:
    the question to shared tiers, and the chunks, that it waits for. `stored_elsewhere`: leading chunks found of those
    that another server stores for it; `look_at`: when to look for more. `worth_loading`: how many leading chunks are
    sooner loaded than computed; None until decided. `longest_hit`: most leading chunks of a hit, as the states behind
    more are slower to load than to compute. `deferred_since`: when vLLM was first told to ask again.
    """

    patience: Patience
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
    """Chunks that were brought up for this request, by the tier that they came from."""
    deferred_since: float | None = None

    def release(self) -> None:
        """Release the lease and the promotion."""
        self.release_lease()
        self.cancel()

    def release_lease(self) -> None:
        if self.lease is not None:
            self.lease.release()
            self.lease = None

    def cancel(self) -> None:
        """Wait for the promotion no more."""
        if self.promotion is not None:
            self.note_promoted()
            self.promotion.release()
            self.promotion = None

    def note_promoted(self) -> None:
        """Note from which tiers the promotion has brought chunks, without those found in host memory."""
        for tier, count in self.promotion.arrived.items() if self.promotion is not None else ():
            self.promoted[tier] = max(count, self.promoted.get(tier, 0))


@define
class Loading:
    """How its loads went. Written by `Loads`.

    `begun`: how many loads between steps have begun. `failed`: it computes the rest, and no further load is offered.
    """

    begun: int = 0
    failed: bool = False


@define(eq=False)
class Storing:
    """How far its stores are. Written by `ChunkStores` and `StateStores`.

    `stored`: leading chunks that are stored or being stored. `tail_due`: whether the tail has still to be stored.
    `kept`: leading chunks up to the last states that are kept for other requests. `last_states`: the same up to the
    last states of its answer, which are replaced by the next. `copying`: stores that have not ended.
    """

    stored: int = 0
    tail_due: bool = True
    kept: int = 0
    last_states: int = 0
    copying: int = 0
    _at_end: list[Callable[[], None]] = field(init=False, factory=list, repr=False)

    def begin_again(self, chunk: int) -> None:
        """Store the chunks from this one on, and the tail, once more."""
        self.stored, self.tail_due = min(self.stored, chunk), True

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


@define(eq=False)
class Auditing:
    """Whether its hits and loads are audited. Written by `HitAudits` and `LoadAudits`.

    `decided`: whether it was drawn if its hit is audited. `audit`: the hit that it computes all the same.
    `reads_back`: its next load is read back in any case. `tenure`: how often it has given up its blocks.
    """

    decided: bool = False
    audit: Audit | None = None
    reads_back: bool = False
    tenure: int = 0


@define(eq=False)
class Report:
    """What was promised and loaded, and why not more. Written by `SchedulerObserver`.

    `sources`: tokens that were promised last, by the tier that has them; `source_chunks`: the same in chunks.
    `promised`: keys of the chunks of that promise, and of vLLM's own hit before them. `miss`: why the rest was not.
    `counted`: whether the metrics have counted its hit and miss, as they do when it is first scheduled.
    `last_log_line`: the tokens of it.
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


@define(eq=False)
class Request:
    """One request between its arrival and its end; made by `Request.of`. `vllm`: vLLM's. `root`: of its chunk keys."""

    vllm: VLLMRequest = field(repr=lambda request: request.request_id)
    root: bytes = field(repr=False)
    options: RequestOptions = field(repr=False)
    waiting: Waiting = field(repr=False)
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
    states: int = field(default=0, repr=False)
    """State entries of each boundary between chunks."""
    unidentified: bool = False
    """Its weights, adapter or images have no identity, or changed while it ran."""
    loading: Loading = field(init=False, factory=Loading, repr=False)
    storing: Storing = field(init=False, factory=Storing, repr=False)
    auditing: Auditing = field(init=False, factory=Auditing, repr=False)
    report: Report = field(init=False, factory=Report, repr=False)
    chain: KeyChain = field(init=False, repr=lambda chain: f"<{len(chain.keys)} keys>")
    hashed_tokens: int = field(init=False, default=-1)
    """Length of the prompt that `chain` and `tail` belong to; the prompt of a session grows with each input."""
    tail: TailKey | None = field(init=False, default=None, repr=False)
    """Key of the tokens after the last whole chunk; None without such tokens, or if tails are not stored."""
    tail_chunk: int = field(init=False, default=0)
    """How many whole chunks come before the tail."""

    @classmethod
    def of(
        cls,
        vllm: VLLMRequest,
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
        """A new request, with the keys of its prompt.

        `identity`: of what the workers have loaded; None: unknown, the request is not cached. `media`, `adapters`: of
        the engine. `save_tails`: its tail gets a key, too. `states`: entries of each boundary. `longest`: tokens of the
        longest prompt.
        """
        options = RequestOptions.of(vllm, longest)
        lora = getattr(vllm, "lora_request", None)
        adapter = "" if lora is None else adapters.identity(lora)
        request = cls(
            vllm,
            request_root(namespace, vllm, options.tags, identity or "", adapter),
            options,
            Waiting(patience),
            chunk_size,
            save_tails,
            printable(vllm.request_id),
            tenants_of(getattr(vllm, "cache_salt", None), options.tags),
            media,
            identity or "",
            (int(getattr(lora, "lora_int_id", 0)), adapter),
            states,
        )
        if identity is None or (lora is not None and not adapter):
            request.leave_out()
        request.follow()
        return request

    def follow(self) -> None:
        """Hash the prompt; again when a streamed session has got its next input, perhaps with images.

        vLLM then drops the last token that was sampled; the others that it has computed become prompt.
        """
        prompt_tokens: int = getattr(self.vllm, "num_prompt_tokens", 0)
        if prompt_tokens == self.hashed_tokens:
            return
        self.hashed_tokens = prompt_tokens
        try:
            extras = self.media.extras(self.vllm, self.chunk_size, self.weights, self.adapter[1])
        except UnnamedMediaError:
            extras = {}
            self.leave_out()
        tokens, tail = self.known_tokens, self.save_tails
        self.chain, self.tail = hash_prompt(tokens, self.root, self.chunk_size, extras, tail=tail)
        self.tail_chunk, self.storing.tail_due = len(self.chain.keys), True

    def leave_out(self) -> None:
        """Store and load nothing: it is unknown what the request is computed with, in part at least."""
        self.unidentified = self.options.skip_save = self.options.skip_load = True

    @property
    def lora_name(self) -> str | None:
        """The name of its adapter, by which vLLM's own prefix cache knows that."""
        lora = getattr(self.vllm, "lora_request", None)
        return None if lora is None else str(lora.lora_name)

    @property
    def request_id(self) -> str:
        return self.vllm.request_id

    @property
    def num_tokens(self) -> int:
        """Known tokens."""
        return self.vllm.num_tokens

    @property
    def prompt_tokens(self) -> int:
        """Tokens of the prompt, as of now."""
        tokens: int = getattr(self.vllm, "num_prompt_tokens", self.vllm.num_tokens)
        return tokens

    @property
    def last_token(self) -> int:
        """Number of the last token, which is always computed: vLLM needs its logits."""
        return self.vllm.num_tokens - 1

    @property
    def loadable(self) -> int:
        """Leading tokens that a load may end with, at most."""
        limit = self.options.max_load_tokens
        return self.last_token if limit is None else min(self.last_token, self.waiting.computed + limit)

    @property
    def known_tokens(self) -> Sequence[int]:
        # vLLM's read-only view copies twice when it is sliced; the list behind it once.
        return getattr(self.vllm, "_all_token_ids", self.vllm.all_token_ids)

    @property
    def answer(self) -> dict[str, object]:
        """The answer to `lmkv.report` when the request ends."""
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
