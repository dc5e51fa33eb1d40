"""The chunks of one prompt: its variant, its blocks, and the checks of what callers give."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from numbers import Real
from typing import Any

from attrs import astuple, field, frozen

from lmkv.chunks.hashing import KeyChain
from lmkv.chunks.namespace import Namespace
from lmkv.errors import UsageError, short_repr
from lmkv.memory.copier import ChunkCopy, Run, block_ids
from lmkv.protocols import ChunkKey
from lmkv.store.leases import Lease, Reservation
from lmkv.store.tiered import TieredStore

_FOREVER = 1e9
"""Seconds, more than thirty years: every clock can add them."""


def positive(value: Any, name: str) -> int:
    if isinstance(value, bool) or not isinstance(value, int) or value < 1:
        raise UsageError(f"{name} must be a positive int, not {short_repr(value)}")
    return value


def not_negative(value: Any, name: str) -> int:
    if isinstance(value, bool) or not isinstance(value, int) or value < 0:
        raise UsageError(f"{name} must be an int of at least 0, not {short_repr(value)}")
    return value


def seconds(value: Any, name: str) -> float:
    """The value as a float that every clock can add."""
    if isinstance(value, bool) or not isinstance(value, (float, Real)) or value != value:
        raise UsageError(f"{name} must be a number of seconds, not {short_repr(value)}")
    try:
        return max(min(float(value), _FOREVER), -_FOREVER)
    except OverflowError:  # an int of hundreds of digits
        return -_FOREVER if value < 0.0 else _FOREVER


@frozen
class Variant:
    """Everything besides tokens that two prompts must have in common to share KV.

    Parameters
    ----------
    cache_salt
        Separates tenants.
    lora
        Name and path of an adapter.
    tags
        Anything else, by name.

    Notes
    -----
    Immutable: threads may share it.

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
    """The root of the chunk keys of a prompt. Raises UsageError for a variant whose parts have other types."""
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
    """The `keys` of the whole chunks that `blocks` covers, each of `chunk_size` tokens and `pages` blocks."""

    def __init__(self, chain: KeyChain, blocks: object, chunk_size: int, pages: int) -> None:
        self._chain = chain
        self._blocks = block_ids(blocks)
        self._chunk_size = chunk_size
        self._pages = pages
        self.keys = chain.keys[: len(self._blocks) // pages]

    def chunks_in(self, tokens: object) -> int:
        """How many of the chunks lie in the first `tokens` tokens. Raises UsageError for anything but a count."""
        return min(not_negative(tokens, "skip_tokens") // self._chunk_size, len(self.keys))

    def reserve(self, store: TieredStore, first: int, end: int) -> Reservation:
        """Reserve slots for chunks [first, end)."""
        keys = self.keys[first:end]
        ids = self._chain.token_bytes(first, first + len(keys))
        store.hints.prompt(keys, len(self.keys) * self._chunk_size)
        return store.reserve(keys, parent=self._chain.parent(first), tokens=ids, protect=self.keys)

    def copies_to_slots(self, slots: Mapping[ChunkKey, int], first: int, end: int) -> list[ChunkCopy]:
        """Copies that fill these slots. The chunks are some of [first, end)."""
        keys = enumerate(self.keys[first:end], first)
        return [self._copy(slots[key], index) for index, key in keys if key in slots]

    def copies_to_blocks(self, slots: Sequence[int], first: int) -> list[ChunkCopy]:
        """Copies from the slots of chunks `first`, `first` + 1, ..."""
        return [self._copy(slot, index) for index, slot in enumerate(slots, first)]

    def _copy(self, slot: int, index: int) -> ChunkCopy:
        start = index * self._pages
        return ChunkCopy(slot, (Run(0, self._blocks[start : start + self._pages]),))


_MARGIN = 60.0
"""Seconds from the end of a wait to the lease that follows it, at most."""


def look_up_shared(store: TieredStore, keys: Sequence[ChunkKey], timeout: float) -> None:
    """Ask shared tiers for chunks that the indexes do not know, for at most `timeout` seconds."""
    limit, lookup = seconds(timeout, "timeout"), store.look_up_shared(keys)
    if lookup is not None:
        lookup.wait(limit)


def lease_window(store: TieredStore, keys: Sequence[ChunkKey], timeout: float) -> Lease:
    """A lease on the leading chunks in host memory; if the first is not there, on the chunks that can be promoted."""
    lease = store.lease(keys)
    if lease:
        return lease
    limit = seconds(timeout, "timeout")
    # At most half of host memory: the rest serves everybody else meanwhile. It ends by itself should an exception come
    # before it is known here.
    promotion = store.promote(keys, limit=max(1, store.slab.num_slots // 2), ttl=max(limit, 0.0) + _MARGIN)
    try:
        promotion.wait(limit)
        return store.lease(promotion.keys)
    finally:
        promotion.release()
