"""Arguments and results of an engine's calls: `Variant`, the blocks of a `Request`, `Prefetch`, `EngineStats`."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Generator, Mapping, Sequence
from numbers import Real
from types import MappingProxyType
from typing import Any

from attrs import astuple, define, field, frozen

from lmkv.chunks.hashing import KeyChain
from lmkv.chunks.namespace import Namespace
from lmkv.errors import UsageError, short_repr
from lmkv.memory.copier import ChunkCopy, Run, block_ids
from lmkv.protocols import ChunkKey
from lmkv.store.health import StoreStats
from lmkv.store.leases import Reservation
from lmkv.store.promotion import Promotion
from lmkv.store.tiered import TieredStore

_FOREVER = 1e9
"""More than thirty years, in seconds. Every clock can add this number to its time."""


def whole(value: Any, name: str, least: int) -> int:
    if isinstance(value, bool) or not isinstance(value, int) or value < least:
        raise UsageError(f"{name} must be an int of at least {least}, not {short_repr(value)}")
    return value


def seconds(value: Any, name: str) -> float:
    """Return `value`, a number of seconds, limited to plus or minus thirty years, so that sums with it do not overflow.

    Raises UsageError if `value` is no number. `name`: the name of the argument, for the message.
    """
    if isinstance(value, bool) or not isinstance(value, (float, Real)) or value != value:
        raise UsageError(f"{name} must be a number of seconds, not {short_repr(value)}")
    try:
        return max(min(float(value), _FOREVER), -_FOREVER)
    except OverflowError:  # an int of hundreds of digits
        return -_FOREVER if value < 0.0 else _FOREVER


@frozen
class Variant:
    """Separates prompts with equal tokens: two prompts share KV only if their variants are equal.

    Parameters
    ----------
    cache_salt
        A text that separates tenants: prompts with different salts share no KV.
    lora
        Name and path of the prompt's LoRA adapter.
    tags
        Names and values of anything else that separates prompts.

    Notes
    -----
    Immutable, so any number of threads may share one variant.

    Examples
    --------
    >>> Variant(cache_salt="tenant 1") == Variant(cache_salt="tenant 2")
    False
    """

    cache_salt: str | None = None
    lora: tuple[str, str] | None = None
    tags: Mapping[str, str] = field(factory=dict)


PLAIN = Variant()


def root_of(variant: Variant, namespace: Namespace) -> bytes:
    """Return the root of a prompt's chunk keys: a digest that every key depends on. Raises UsageError if a field of the
    variant has the wrong type.
    """
    _check(variant)
    tags = {f"tag.{name}": value for name, value in variant.tags.items()}
    return namespace.root(cache_salt=variant.cache_salt, lora=variant.lora, extra=tags)


def _check(given: object) -> None:
    parts: Any = astuple(given, recurse=False) if isinstance(given, Variant) else (None, None, None)
    salt, lora, tags = parts
    if isinstance(tags, Mapping) and isinstance(lora, tuple | None):
        texts = (*(lora or ("", "")), *tags, *tags.values(), "" if salt is None else salt)
        if len(lora or "ab") == 2 and all(isinstance(text, str) for text in texts):
            return
    expected = "Variant(cache_salt=str, lora=(str, str), tags={str: str})"
    raise UsageError(f"variant must be {expected}, not {short_repr(given)}")


class Request:
    """The tokens and `blocks` of one call of an engine. `keys`: the keys of the whole chunks that `blocks` covers.
    `chunk_size`: tokens per chunk. `pages`: number of blocks per chunk.
    """

    def __init__(self, chain: KeyChain, blocks: object, chunk_size: int, pages: int) -> None:
        self._chain = chain
        self._blocks = block_ids(blocks)
        self._chunk_size = chunk_size
        self._pages = pages
        self.keys = chain.keys[: len(self._blocks) // pages]

    def chunks_in(self, tokens: object) -> int:
        """Return how many whole chunks the first `tokens` tokens fill. Raises UsageError for a value that is no token
        count.
        """
        return min(whole(tokens, "skip_tokens", 0) // self._chunk_size, len(self.keys))

    def reserve(self, store: TieredStore, first: int, end: int) -> Reservation:
        """Reserve slots of host memory for the chunks with index `first` to `end - 1`."""
        keys = self.keys[first:end]
        ids = self._chain.token_bytes(first, first + len(keys))
        store.hints.prompt(keys, len(self.keys) * self._chunk_size)
        return store.reserve(keys, parent=self._chain.parent(first), tokens=ids, protect=self.keys)

    def copies_to_slots(self, slots: Mapping[ChunkKey, int], first: int, end: int) -> list[ChunkCopy]:
        """Return the copies from blocks to slots. Chunks that have no slot in `slots` are left out.

        `slots`: slots by chunk key. `first`, `end`: copy the chunks `first` to `end - 1`.
        """
        keys = enumerate(self.keys[first:end], first)
        return [self._copy(slots[key], index) for index, key in keys if key in slots]

    def copies_to_blocks(self, slots: Sequence[int], first: int) -> list[ChunkCopy]:
        """Return the copies from `slots` to blocks. `slots`: one slot for each chunk, from chunk `first` on."""
        return [self._copy(slot, index) for index, slot in enumerate(slots, first)]

    def _copy(self, slot: int, index: int) -> ChunkCopy:
        start = index * self._pages
        return ChunkCopy(slot, (Run(0, self._blocks[start : start + self._pages]),))


# -- what calls return ------------------------------------------------------------------------------------


@frozen
class EngineStats:
    """The result of `Engine.stats`: totals of the engine's calls in tokens, and the state of the engine's store.

    Notes
    -----
    `requested_tokens` counts the tokens of all chunks that callers asked to load, loaded or not.
    """

    stored_tokens: int
    retrieved_tokens: int
    requested_tokens: int
    store: StoreStats


@frozen
class Progress:
    """How far a prefetch is: the tokens and bytes that were found in some tier, and those that are in host memory
    now.
    """

    found_tokens: int
    ready_tokens: int
    found_bytes: int
    ready_bytes: int

    @property
    def share(self) -> float:
        return self.ready_tokens / self.found_tokens if self.found_tokens else 1.0


@define(eq=False, repr=False)
class Prefetch:
    """The handle that `Engine.prefetch` returns: waits for the prefetch, shows its progress, or cancels the prefetch.

    Notes
    -----
    Awaitable and thread-safe. Loaded chunks stay in host memory until `cancel`, or for the engine's `pin_ttl` seconds.

    Examples
    --------
    >>> import torch
    >>> from lmkv import Config, Engine
    >>> paged = [torch.randn(8, 16, 2, 4)]
    >>> config = Config(chunk_size=32, max_local_cpu_size=0.001)
    >>> with Engine.open(paged, block_size=16, model="example", config=config) as engine:
    ...     stored = engine.store(range(64), [0, 1, 2, 3])
    ...     prefetch = engine.prefetch(range(64))
    ...     done = prefetch.wait(timeout=10)
    ...     prefetch.tokens, prefetch.progress.share
    (64, 1.0)
    """

    _promotion: Promotion
    _chunk_size: int
    _chunk_bytes: int

    def __repr__(self) -> str:
        return f"<Prefetch: {self._promotion!r}>"

    @property
    def done(self) -> bool:
        return self._promotion.done

    @property
    def tokens(self) -> int:
        """How many of the prompt's first tokens are in host memory now."""
        return self._promotion.ready * self._chunk_size

    @property
    def progress(self) -> Progress:
        found, ready = len(self._promotion), self._promotion.ready
        return Progress(
            found * self._chunk_size, ready * self._chunk_size, found * self._chunk_bytes, ready * self._chunk_bytes
        )

    @property
    def sources(self) -> Mapping[str, int]:
        """Number of tokens that were found in each tier, by the name of the tier."""
        chunks = self._promotion.sources
        return MappingProxyType({name: count * self._chunk_size for name, count in chunks.items()})

    def wait(self, timeout: float | None = None) -> bool:
        """Wait until the prefetch is done, for at most `timeout` seconds. Returns whether the prefetch is done."""
        return self._promotion.wait(timeout)

    def cancel(self) -> None:
        """Stop the prefetch, and allow the eviction of its chunks. Running reads continue to their end. Idempotent."""
        self._promotion.release()

    def __await__(self) -> Generator[object, None, int]:
        """Await the end of the prefetch without blocking a thread. The result of `await` is `tokens`."""
        loop = asyncio.get_running_loop()
        finished: asyncio.Future[None] = loop.create_future()

        def wake() -> None:
            if not finished.done():
                finished.set_result(None)

        def wake_from_any_thread() -> None:
            # If the loop is closed, nobody waits.
            with contextlib.suppress(RuntimeError):
                loop.call_soon_threadsafe(wake)

        # Raises in a forked child, where nobody would call back.
        self._promotion.wait(0)
        self._promotion.add_done_callback(wake_from_any_thread)
        yield from finished
        return self.tokens
