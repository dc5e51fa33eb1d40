"""`CacheService`: the methods of the agent API, without HTTP."""

from __future__ import annotations

import re
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from types import MappingProxyType
from typing import Any, NamedTuple

from attrs import asdict, define, field, frozen
from cachetools import TTLCache

from lmkv.chunks.hashing import StateKey, TailKey, state_keys
from lmkv.chunks.namespace import tenants_of
from lmkv.errors import LmkvError, UsageError
from lmkv.protocols import ChunkKey, miss_in_words
from lmkv.store.catalog import HitFinder
from lmkv.store.promotion import Promotion
from lmkv.store.tiered import TieredStore

ADVICE = {
    "not_stored": "No tier has these tokens. Each model, data type, salt, tag and adapter has separate chunks.",
    "no_state": "The chunks are stored, but no state of a recurrent layer after these chunks: see state_interval.",
    "evicted": "A larger tier, or one more lower tier, would have kept these tokens.",
    "too_short": "Fewer tokens than a chunk are left, or lmkv found fewer than min_retrieve_tokens.",
    "not_ready": "lmkv is still storing these tokens: a later request finds them.",
    "tier_unavailable": "The tier fails, and counts as empty until the tier answers again: see the log.",
    "deadline": "Loading took longer than computing would, or than prefetch_deadline: prefetch the prompt.",
    "slower": "The model computes these tokens faster than the tier delivers them: see load_or_recompute.",
    "not_promoted": "lmkv could not read the chunks, or host memory had no room: see max_local_cpu_size.",
    "limited": "The request has reached its max_load_tokens.",
    "skip_load": "The request has lmkv.skip_load, no tokens, or tags that lmkv cannot read.",
    "not_taken": "vLLM did not use what lmkv found, because of prompt log-probabilities or another connector.",
    "failed": "A load for this request failed before: see the log.",
    "audited": "lmkv found these tokens, and the model computed them again for an audit: see audit_rate.",
    "switched_off": "An audit has found a wrong chunk, and audit_action ends all loads: see the log, then restart.",
    "unidentified": "lmkv cannot identify the weights, the adapter or an image of this request: see the log.",
}
"""For each reason of a miss, the meaning of the reason and advice."""


def explained(report: Mapping[str, Any]) -> dict[str, Any]:
    """Return a request's report with the field `explanation`, which describes the request's misses in words."""
    return {**report, "explanation": " ".join(_sentences(report))}


def _sentences(report: Mapping[str, Any]) -> list[str]:
    loaded = " and ".join(f"{tokens:,} from {tier}" for tier, tokens in report["sources"].items()) or "none"
    found = f"vLLM's own cache had {report['vllm_tokens']:,} of {report['tokens']:,} tokens; lmkv loaded {loaded}."
    missed = report.get("missed")
    return [found] if missed is None else [found, _miss(missed), ADVICE.get(missed["reason"], "")]


def _miss(missed: Mapping[str, Any]) -> str:
    ago, why = missed.get("seconds_ago"), miss_in_words(missed["reason"], missed.get("tier"))
    return f"{missed['tokens']:,} tokens were missed: {why}{'' if ago is None else f' {ago:.0f} s before'}."


_MAX_KEYS = 1 << 18
"""Largest number of keys of all named prefetches together."""
_OF_A_CALL = r"(?:(\d+)_)?{}(?:[-_](\d+))?(?:-[0-9a-f]{{8}})?"
"""A pattern for the id of a request in vLLM. Its parts are: [number of the answer_] id in the answer [-number of the
prompt] [-eight hexadecimal digits].
"""
_USUAL, _WIDEST = 8, 128
"""Characters per token: a number above the average of texts, and the largest possible number."""
_AT_A_CUT = 256
"""Largest number of tokens by which a cut in a text may increase the number of its tokens."""
_SHARED_LOOKUP_LIMIT = 1.0
"""Seconds that a lookup waits for the answers of shared tiers."""


@frozen
class Prompt:
    """A prompt: exactly one of a text, the messages of a chat, and token ids.

    `cache_salt`, `tags`: the salt and tags of the prompt's requests. A request hits only chunks that were stored with
    an equal salt and equal tags. `template`: further arguments of the model's chat template, such as `tools`.
    """

    text: str | None = None
    messages: Sequence[Mapping[str, Any]] | None = None
    tokens: Sequence[int] | None = None
    cache_salt: str | None = None
    tags: Mapping[str, str] = field(factory=dict)
    template: Mapping[str, Any] = field(factory=dict)


Tokenize = Callable[[str | Sequence[Mapping[str, Any]], Mapping[str, Any]], Sequence[int]]
"""A function that returns the token ids of a text or of a chat. The arguments are the text or messages, and
`Prompt.template`. The result ends before the beginning of an answer.
"""

RootOf = Callable[[str | None, Mapping[str, str]], bytes | None]
"""A function that returns the root of the keys of prompts, or None if the root is unknown. The arguments are the cache
salt and the tags of the prompts.

The root owns the pins, prefetches and sessions of these prompts.
"""

KeysOf = Callable[[Sequence[int], str | None, Mapping[str, str]], list[ChunkKey]]
"""A function that returns the keys of a prompt's chunks. The arguments are the prompt's tokens, cache salt and tags."""

Requests = Callable[[], Mapping[str, Any]]
"""A function that returns the reports of the last `requests`, newest first, the complete `ids` of these requests,
and the sums `lookup_tokens` and `hit_tokens`.
"""


ClearNamespace = Callable[[str], int]
"""A function that deletes the chunks of a namespace, and returns the number of these chunks. The argument is the
beginning of the namespace's hexadecimal digest.
"""


Deleted = Callable[[Sequence[ChunkKey] | None], None]
"""A function that is called with the keys of chunks that a caller has deleted, or with None for all keys."""


def _characters(message: Mapping[str, Any]) -> int:
    """Return the number of characters in a message's content, which is a text or a list of parts."""
    content = message.get("content")
    parts = [each.get("text") for each in content if isinstance(each, dict)] if isinstance(content, list) else [content]
    return sum(len(part) for part in parts if isinstance(part, str))


_NO_REQUESTS = {"lookup_tokens": 0, "hit_tokens": 0, "requests": [], "ids": []}


class _Prefetch(NamedTuple):
    """A prefetch with a name. `ended`: a future that is cancelled when the reads have ended or the prefetch is
    cancelled.
    """

    promotion: Promotion
    keys: Sequence[ChunkKey]
    ended: Future[None]

    def size(self) -> int:
        return min(1 + len(self.keys), _MAX_KEYS)

    def end(self) -> None:
        self.ended.cancel()


@define(eq=False, repr=False, slots=False)
class CacheService:
    """Looks up, prefetches, pins and deletes the chunks of prompts in one store.

    Parameters
    ----------
    store : TieredStore
        The store of the engine. The service does not close the store.
    keys_of, tokenize
        Functions that return the chunk keys of a prompt, and the token ids of a text or chat (`KeysOf` and `Tokenize`).
    chunk_size : int
        Tokens per chunk.
    pin_ttl : float
        Seconds for which pins and prefetches last by default.
    root_of : callable, optional
        Returns the owner (client) of a prompt's pins, prefetches and sessions; see `RootOf`. By default, all have one
        owner.
    requests : callable, optional
        Returns the reports of the engine's requests.
    clear_namespace : callable, optional
        Deletes the chunks of a namespace in the engine's folder (see `ClearNamespace`).
    deleted : callable, optional
        A function that is called with the keys of deleted chunks.
    longest : int, optional
        Number of tokens of the longest prompt that the engine accepts.
    trace, value : callable, optional
        `trace(number)` returns the recorded requests from request `number` on. `value()` returns estimates of the hits
        with more or less memory.
    loads_off : callable, optional
        Returns whether an audit (a check of loaded KV) has switched loads off.
    states : int
        Number of slots for the states of recurrent layers after each chunk; 0 for a model without such layers.

    Raises
    ------
    UsageError
        A call got a prompt that is invalid or has more than `longest` tokens.

    Notes
    -----
    Thread-safe. The service holds no lock while it waits for the store, so the engine's requests continue.

    Examples
    --------
    >>> from lmkv.backends.cpu import CPUPinnedBackend
    >>> from lmkv.chunks.hashing import chunk_keys
    >>> from lmkv.policies import LRU
    >>> from lmkv.protocols import Tier
    >>> store = TieredStore(Tier(CPUPinnedBackend(1 << 16, 4096), LRU()))
    >>> def keys_of(tokens, cache_salt=None, tags=None):
    ...     return chunk_keys(tokens, root=bytes(32), chunk_size=4)
    >>> service = CacheService(store, keys_of, lambda text, template: list(text.encode()), chunk_size=4, pin_ttl=60)
    >>> with store.reserve(keys_of(list(b"the prompt"))) as reservation:
    ...     reservation.commit()
    >>> service.lookup(Prompt(text="the prompt is longer"))
    {'total_tokens': 20, 'hit_tokens': 8, 'sources': {'cpu': 8}}
    >>> store.close()
    """

    _store: TieredStore
    _keys_of: KeysOf
    _tokenize: Tokenize
    _chunk_size: int = field(kw_only=True)
    _pin_ttl: float = field(kw_only=True)
    _root_of: RootOf = field(default=lambda cache_salt, tags: b"", kw_only=True)
    _requests: Requests = field(default=lambda: _NO_REQUESTS, kw_only=True)
    _clear_namespace: ClearNamespace | None = field(default=None, kw_only=True)
    _deleted: Deleted = field(default=lambda keys: None, kw_only=True)
    _longest: int | None = field(default=None, kw_only=True)
    trace: Callable[[int], Mapping[str, Any]] = field(default=lambda after: {"next": 0, "requests": []}, kw_only=True)
    value: Callable[[], Mapping[str, Any]] = field(default=lambda: {"tiers": []}, kw_only=True)
    _loads_off: Callable[[], bool] = field(default=lambda: False, kw_only=True)
    _states: int = field(default=0, kw_only=True)
    _lock: threading.Lock = field(factory=threading.Lock, init=False)

    def __attrs_post_init__(self) -> None:
        self._boundaries = HitFinder(self._store.catalog, self._states)
        # Not thread-safe by itself.
        self._prefetches: TTLCache[str, _Prefetch] = TTLCache(_MAX_KEYS, self._pin_ttl, getsizeof=_Prefetch.size)

    def __repr__(self) -> str:
        return f"<CacheService of {self._store!r}>"

    def lookup(self, prompt: Prompt) -> dict[str, Any]:
        """Return how many tokens a request with this prompt would load, and from which tiers.

        The last token does not count, because vLLM always computes it.
        """
        tokens, keys = self._read(prompt)
        keys = self._found(keys, len(tokens))
        ready, found = self._store.catalog.count_prefix(keys)
        left = max(0, len(tokens) - 1)
        sources: dict[str, int] = {}
        for number, key in enumerate(keys[:found]):
            tier = (number >= ready and self._store.catalog.tier_of(key)) or self._store.primary_name
            counted = min(left, self._tokens([key]))
            left -= counted
            if counted:
                sources[tier] = sources.get(tier, 0) + counted
        return {"total_tokens": len(tokens), "hit_tokens": sum(sources.values()), "sources": sources}

    def prefetch(self, prompt: Prompt, name: str) -> tuple[Callable[[], dict[str, Any]], Future[None]]:
        """Start to load a prompt's chunks into host memory, where the chunks stay for `pin_ttl` seconds.

        Returns `(progress, ended)`. `progress`: a function that returns the progress. `ended`: a future that never
        has a result. lmkv cancels this future when the prefetch is done or stopped. A later prefetch with the same
        `name` replaces this prefetch.
        """
        tokens, keys = self._read(prompt)
        keys = self._found(keys, len(tokens)) if self._boundaries.states else keys
        owner = self._owner(prompt)
        self._store.hints.label(keys, tenants_of(prompt.cache_salt, prompt.tags.items()))
        promotion = self._store.promote(keys, prefetch=True, ttl=self._pin_ttl, owner=owner, look_up_shared=True)
        prefetch = _Prefetch(promotion, keys, Future())
        self.cancel(name, prefetch)
        promotion.add_done_callback(prefetch.end)
        return lambda: self._state(name, prefetch), prefetch.ended

    def prefetched(self, name: str) -> dict[str, Any] | None:
        """Return the progress of the prefetch with this name, or None if the name is unknown or has expired."""
        with self._lock:
            prefetch = self._prefetches.get(name)
        return None if prefetch is None else self._state(name, prefetch)

    def cancel(self, name: str, instead: _Prefetch | None = None) -> bool:
        """Stop the prefetch with this name and release its chunks. Returns whether there was such a prefetch.

        `instead`: a new prefetch that gets the name.
        """
        with self._lock:
            prefetch = self._prefetches.pop(name, None)
            if instead is not None:
                self._prefetches[name] = instead
        if prefetch is not None:
            prefetch.promotion.release()
            prefetch.end()
        return prefetch is not None

    def end_session(
        self, name: str, cache_salt: str | None = None, tags: Mapping[str, str] = MappingProxyType({})
    ) -> bool:
        """End a session: chunks that belong only to this session are evicted first. Returns whether the session was
        known.

        `name`: the session's id. Another salt or other tags mean a different session.
        """
        owner = self._root_of(cache_salt, tags)
        return owner is not None and self._store.hints.end_session(owner, name)

    def _owner(self, prompt: Prompt) -> bytes:
        return self._root_of(prompt.cache_salt, prompt.tags) or b""

    def pin(self, prompt: Prompt, seconds: float | None = None) -> dict[str, Any]:
        """Pin a prompt's leading chunks that are in host memory now, for `seconds` or for the default time."""
        keys = self._boundaries.keys_to_promote(self._read(prompt)[1])
        seconds = self._pin_ttl if seconds is None else seconds
        return {
            "pinned_tokens": self._tokens(keys[: self._store.pin(keys, seconds, self._owner(prompt))]),
            "seconds": seconds,
        }

    def unpin(self, prompt: Prompt) -> dict[str, Any]:
        """Remove the pins of a prompt's chunks."""
        _, keys = self._read(prompt)
        self._store.unpin(self._states_of(keys))
        return {"unpinned_chunks": self._store.unpin(keys)}

    def clear(self, prompt: Prompt | None = None) -> dict[str, Any]:
        """Delete a prompt's chunks from every tier, even if other prompts share these chunks. Without a prompt, delete
        all chunks.
        """
        keys = None if prompt is None else self._read(prompt)[1]
        states = self._states_of(keys or ())
        count = self._store.clear() if keys is None else self._store.delete(keys)
        self._store.delete(states)
        self._deleted(keys if keys is None else [*keys, *states])
        return {"deleted_chunks": count}

    def clear_namespace(self, beginning: str) -> dict[str, Any]:
        """Delete the chunks of one namespace. `beginning`: the first digits of its digest, see `lmkv inspect`."""
        if self._clear_namespace is None:
            raise UsageError("this engine cannot clear other namespaces: leave out namespace")
        return {"deleted_chunks": self._clear_namespace(beginning)}

    def stats(self) -> dict[str, Any]:
        """Return the store's counters by tier, the bytes of each tenant, and the numbers of requested and hit
        tokens.
        """
        found = self._requests()
        totals = {name: found[name] for name in ("lookup_tokens", "hit_tokens")}
        tenants = self._store.hints.used_bytes()
        state = {"tenants": tenants, "loads_off": self._loads_off()}
        return {"time": time.time(), **asdict(self._store.stats()), **state, **totals}

    def requests(self) -> dict[str, Any]:
        """Return the reports of the last requests, newest first."""
        return {name: value for name, value in self._requests().items() if name != "ids"}

    def explain(self, request: str) -> dict[str, Any] | None:
        """Return a request's report with an explanation, or None if the request is not among the last requests.

        `request`: the id in vLLM's response. vLLM splits a client's call with several prompts or outputs into several
        requests. The result is then the report of the first of these requests, with all their reports in `parts`.
        """
        ids = re.compile(_OF_A_CALL.format(re.escape(request)))
        parts: dict[tuple[int, int], dict[str, Any]] = {}
        known = self._requests()
        for name, each in reversed(list(zip(known["ids"], known["requests"], strict=True))):
            if found := ids.fullmatch(name):
                # The newest of several reports with the same id wins.
                parts[int(found[2] or 0), int(found[1] or 0)] = each
        reports = [explained(parts[place]) for place in sorted(parts)]
        return {**reports[0], "parts": reports} if len(reports) > 1 else next(iter(reports), None)

    def _read(self, prompt: Prompt) -> tuple[Sequence[int], list[ChunkKey]]:
        given = [each for each in (prompt.text, prompt.messages, prompt.tokens) if each is not None]
        if len(given) != 1:
            raise UsageError("give exactly one of text, messages and tokens")
        tokens = self._tokens_of(prompt) if prompt.tokens is None else prompt.tokens
        self._check(len(tokens))
        return tokens, self._keys_of(tokens, prompt.cache_salt, prompt.tags)

    def _found(self, keys: list[ChunkKey], tokens: int) -> list[ChunkKey]:
        """Return the keys that a request with a prompt of `tokens` tokens may load. First looks up the keys in shared
        tiers.
        """
        if (lookup := self._store.look_up_shared(keys, self._boundaries.states)) is not None:
            lookup.wait(_SHARED_LOOKUP_LIMIT)
        # A hit that has to end behind a chunk leaves the last token to be computed.
        whole = (tokens - 1) // self._chunk_size
        return self._boundaries.stored_hit(keys[:whole]) if self._boundaries.states else keys

    def _states_of(self, keys: Sequence[ChunkKey]) -> list[ChunkKey]:
        """Return the keys of the recurrent layers' states after each of these chunks."""
        return [state for key in keys for state in state_keys(key, self._boundaries.states)]

    def _check(self, tokens: int, more: str = "") -> None:
        if self._longest is not None and tokens > self._longest:
            reason = f"the prompt has {more}{tokens:,} tokens, and this engine takes {self._longest:,} at most"
            raise UsageError(f"{reason} (max_model_len)")

    def _tokens_of(self, prompt: Prompt) -> Sequence[int]:
        """Return the token ids of a text or a chat. Raises UsageError if the prompt is too long.

        A prompt that is much too long is not tokenized completely.
        """
        text, messages = prompt.text, prompt.messages or ()
        try:
            if text is not None:
                usual = len(text) if self._longest is None else _USUAL * self._longest
                if len(text) > usual:
                    self._check(len(self._tokenize(text[:usual], prompt.template)) - _AT_A_CUT, "more than ")
                return self._tokenize(text, prompt.template)
            # A template may leave parts out.
            self._check(max(len(messages), sum(map(_characters, messages)) // _WIDEST), "at least ")
            return self._tokenize(messages, prompt.template)
        except LmkvError:
            raise
        except Exception as error:
            # Tokenizers and templates may raise any exception.
            raise UsageError(f"the tokenizer refuses this prompt with {type(error).__name__}") from error

    def _tokens(self, keys: Sequence[ChunkKey]) -> int:
        """Return the number of tokens in the chunks with these keys. Keys of states count 0 tokens."""
        chunks = (key for key in keys if not isinstance(key, StateKey))
        return sum(key.tokens if isinstance(key, TailKey) else self._chunk_size for key in chunks)

    def _state(self, name: str, prefetch: _Prefetch) -> dict[str, Any]:
        return {
            "id": name,
            "done": prefetch.promotion.done,
            "found_tokens": self._tokens(prefetch.keys[: len(prefetch.promotion)]),
            "ready_tokens": self._tokens(prefetch.keys[: prefetch.promotion.ready]),
        }
