"""Engine: store, retrieve, look up and prefetch KV by the tokens of a prompt, without a server.

Orchestration only: `chunks` names what is stored, `memory` moves the bytes, `store` keeps them.
"""

from __future__ import annotations

import contextlib
import sys
import threading
import time
import warnings
from collections.abc import Iterable, Iterator, Mapping, Sequence
from numbers import Real
from typing import Any, Self

import torch
from attrs import astuple, field, frozen

from lmkv.build import build_store
from lmkv.chunks.hashing import Tokens, chunk_keys, token_bytes
from lmkv.chunks.layout import KVLayout
from lmkv.chunks.namespace import Namespace
from lmkv.config import Config
from lmkv.errors import ClosedError, UsageError, short_repr
from lmkv.memory.copier import ChunkCopy, Copier, Run, block_ids
from lmkv.memory.copiers import make_copier
from lmkv.memory.layerwise import LayerReader, LayerWriter
from lmkv.memory.paged import PagedMemory
from lmkv.protocols import ChunkKey
from lmkv.store.leases import Lease, Reservation
from lmkv.store.prefetch import Prefetch
from lmkv.store.tiered import TieredStore
from lmkv.store.tiers.iopool import Priority
from lmkv.store.tiers.stats import StoreStats

_READ_TIMEOUT = 30.0
_FOREVER = 1e9


@frozen
class Variant:
    """What keeps prompts of equal tokens apart: they share KV only when all of this is equal.

    Parameters
    ----------
    cache_salt
        Of a tenant.
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


@frozen
class EngineStats:
    """Totals of the engine's calls in tokens, and the store's state, as `Engine.stats` returns them.

    Notes
    -----
    A snapshot, since the engine was opened: nothing in it changes, and no lock is held after it was taken.
    `requested_tokens` are those of the chunks that callers asked to be loaded.
    """

    stored_tokens: int
    retrieved_tokens: int
    requested_tokens: int
    store: StoreStats


_PLAIN = Variant()


class Engine:
    """KV of token prefixes, between paged tensors and a `TieredStore`.

    Parameters
    ----------
    store : TieredStore
        Owned by the engine from now on, and closed with it.
    namespace : Namespace
        What the bytes mean; it roots the keys.
    layout : KVLayout
        How a chunk lies in a slot of the store.
    memory : PagedMemory, optional
        The paged tensors. Without them the engine can look up, prefetch and pin, but not copy.
    rank : int
        Which of the layout's ranks this memory is.
    pin_ttl : float
        Seconds that pins and prefetches last.
    name : str
        For messages.

    Raises
    ------
    UsageError
        The layout's chunks do not fit the store's slots, or the memory is not as the layout says.

    Notes
    -----
    Thread-safe: the copies of one engine run one at a time, everything else concurrently. Close it, or use it
    as a context manager: it owns threads, memory and files. A process that was forked from the engine's
    cannot use it: every call raises ClosedError.

    Examples
    --------
    >>> import torch
    >>> from lmkv import Config, Engine
    >>> paged = [torch.randn(8, 16, 2, 4) for _ in range(3)]  # 3 layers: 8 blocks of 16 tokens, 2 heads of 4
    >>> config = Config(chunk_size=32, max_local_cpu_size=0.001)
    >>> with Engine.open(paged, block_size=16, model="example", config=config) as engine:
    ...     prompt = list(range(70))
    ...     stored = engine.store(prompt, [0, 1, 2, 3])
    ...     found = engine.lookup(prompt + [1, 2, 3])
    ...     loaded = engine.retrieve(prompt, [4, 5, 6, 7])
    >>> stored, found, loaded
    (64, 64, 64)
    >>> bool((paged[0][4:8] == paged[0][0:4]).all())
    True
    """

    def __init__(
        self,
        store: TieredStore,
        namespace: Namespace,
        *,
        layout: KVLayout,
        memory: PagedMemory | None = None,
        rank: int = 0,
        pin_ttl: float = 300.0,
        name: str = "lmkv",
    ) -> None:
        self.name = name
        self._store = store
        self._closed = True
        if layout.slot_bytes > store.slab.slot_bytes:
            raise UsageError(
                f"a chunk of this layout takes {layout.slot_bytes} bytes, the store's slots have "
                f"{store.slab.slot_bytes}; build the primary tier with slot_bytes=layout.slot_bytes"
            )
        self._namespace = namespace
        self._layout = layout
        self._pages = layout.pages_per_chunk(0)
        self._pin_ttl = pin_ttl
        self._copier: Copier | None = make_copier(memory, layout, store.slab, rank) if memory else None
        self._copy_lock = threading.Lock()
        self._pace_lock = threading.Lock()
        self._stored = self._retrieved = self._requested = 0
        self._closed = False

    @classmethod
    def open(
        cls,
        kv_caches: Mapping[str, torch.Tensor] | Iterable[torch.Tensor],
        *,
        block_size: int,
        model: str,
        config: Config | None = None,
        block_axis: int = 0,
        revision: str = "",
        name: str = "lmkv",
    ) -> Self:
        """An engine over paged KV tensors, one per layer, with the tiers that `config` names.

        Each tensor has blocks of `block_size` tokens along `block_axis` (0, or 1 for `[2, block, ...]`).
        `model` and `revision` must tell apart whatever computes different KV; shapes, strides, dtypes and, of a
        mapping, the names in their order are part of the namespace by themselves. Raises UsageError for tensors
        that are not blocks of dense bytes.
        """
        config = Config.load() if config is None else config
        if not isinstance(config, Config):
            raise UsageError(f"config must be a Config, as Config.load(...) makes one, not {short_repr(config)}")
        try:
            tensors = list(kv_caches.values() if isinstance(kv_caches, Mapping) else kv_caches)
        except TypeError:
            given = "tensor without dimensions" if isinstance(kv_caches, torch.Tensor) else type(kv_caches).__name__
            raise UsageError(f"kv_caches must be tensors, one per layer, not a {given}") from None
        names = (list(kv_caches),) if isinstance(kv_caches, Mapping) else ()
        memory = PagedMemory.of(tensors, block_axis=block_axis)
        layout = memory.layout(config.chunk_size, [_positive(block_size, "block_size")])
        namespace = Namespace(
            model=model,
            revision=revision,
            dtype=str(tensors[0].dtype),
            chunk_size=config.chunk_size,
            block_size=block_size,
            layout=repr((block_axis, [_page_format(tensor, block_axis) for tensor in tensors], *names)),
        )
        store = build_store(config, namespace, layout, shared=False)
        try:
            return cls(store, namespace, layout=layout, memory=memory, pin_ttl=config.pin_ttl, name=name)
        except BaseException:
            store.close()
            raise

    def __repr__(self) -> str:
        return f"<Engine {self.name!r}{' (closed)' if self.closed else ''}: chunks of {self.chunk_size} tokens>"

    # -- keys ---------------------------------------------------------------------------------------------

    @property
    def chunk_size(self) -> int:
        """Tokens per chunk; only whole chunks are stored and found."""
        return self._layout.chunk_size

    def keys(self, tokens: Tokens, variant: Variant = _PLAIN) -> list[ChunkKey]:
        """The chunk keys of a prompt, one for each whole chunk."""
        _check_variant(variant)
        root = self._namespace.root(
            cache_salt=variant.cache_salt,
            lora=variant.lora,
            extra={f"tag.{name}": value for name, value in variant.tags.items()},
        )
        return chunk_keys(tokens, root, self.chunk_size)

    # -- copying ------------------------------------------------------------------------------------------

    def store(self, tokens: Tokens, blocks: Sequence[int], *, variant: Variant = _PLAIN, wait: float = 0.0) -> int:
        """Store the KV of a prompt that lies in `blocks`, the first of which holds its first token.

        Only whole chunks that `blocks` covers are stored; those already in some tier are not copied again.
        Returns how many leading tokens are in the store now: fewer than covered when there was no room, or while
        another thread is still storing some of them.

        Without `wait` it copies into host memory and returns; when lower tiers cannot follow, they miss some
        chunks. With it, it goes at their pace, for at most so many seconds, as do other threads' calls with
        `wait`: then every tier gets every chunk that it takes, and a prompt may be longer than host memory.
        """
        keys, ids = self._request(tokens, blocks, variant)
        deadline = time.monotonic() + _seconds(wait, "wait")
        done = self._store.match(keys)[1]
        if wait and not self._pace_lock.acquire(timeout=max(0.0, deadline - time.monotonic())):
            return self._store.count_stored(keys[:done]) * self.chunk_size
        try:
            idle = False
            while done < len(keys):
                if wait and not self._store.wait_for_room(deadline - time.monotonic()):
                    break
                end = done + self._store.store_window if wait else len(keys)
                accepted = self._store_window(tokens, ids, keys, done, end)
                done += accepted
                # Once nothing was under way and there still was no slot, there will be none.
                stuck, idle = idle and not accepted, not accepted
                if stuck or (idle and not self._store.drain(deadline - time.monotonic())):
                    break
        finally:
            if wait:
                self._pace_lock.release()
        return self._store.count_stored(keys[:done]) * self.chunk_size

    def _store_window(self, tokens: Tokens, blocks: list[int], keys: Sequence[ChunkKey], first: int, end: int) -> int:
        """Store chunks [first, end) as far as there are slots; how many need nothing more."""
        with self._reserve(tokens, keys, first, end) as reservation:
            copies = self._slot_copies(reservation, keys[first:end], blocks, first)
            with self._locked_copier() as copier:
                copier.store(copies).wait()
                self._stored += len(copies) * self.chunk_size
            reservation.commit()
            return reservation.accepted

    def _reserve(self, tokens: Tokens, keys: Sequence[ChunkKey], first: int, end: int) -> Reservation:
        wanted = keys[first:end]
        parent = keys[first - 1] if first else b""
        ids = token_bytes(tokens[first * self.chunk_size : (first + len(wanted)) * self.chunk_size])
        return self._store.reserve(wanted, parent=parent, tokens=ids, protect=keys)

    def _slot_copies(
        self, reservation: Reservation, keys: Sequence[ChunkKey], blocks: list[int], first: int
    ) -> list[ChunkCopy]:
        """What fills the reserved slots. `keys`: of the chunks from number `first`."""
        slots = reservation.slots
        return [self._chunk_copy(slots[key], blocks, index) for index, key in enumerate(keys, first) if key in slots]

    def retrieve(
        self,
        tokens: Tokens,
        blocks: Sequence[int],
        *,
        skip_tokens: int = 0,
        variant: Variant = _PLAIN,
        timeout: float = _READ_TIMEOUT,
    ) -> int:
        """Fill `blocks` with the stored KV of the longest known prefix; returns its length in tokens.

        Tokens before `skip_tokens`, rounded down to a chunk, are not loaded. Lower tiers are read window by
        window through host memory, so that the prefix may be longer than that; a window that is not there
        within `timeout` seconds ends the prefix.
        """
        keys, ids = self._request(tokens, blocks, variant)
        start = done = self._first_chunk(skip_tokens, keys)
        self._discover(keys, timeout)
        while done < len(keys):
            with self._next_window(keys[done:], timeout) as lease:
                copies = self._block_copies(lease, ids, done)
                with self._locked_copier() as copier:
                    copier.load(copies).wait()
            if not copies:
                break
            done += len(copies)
        self._note_retrieved(keys, start, done)
        return done * self.chunk_size

    @contextlib.contextmanager
    def retrieve_layers(
        self,
        tokens: Tokens,
        blocks: Sequence[int],
        *,
        skip_tokens: int = 0,
        variant: Variant = _PLAIN,
        timeout: float = _READ_TIMEOUT,
    ) -> Iterator[LayerReader]:
        """`retrieve` layer by layer, for a model that computes meanwhile: `with ... as reader`.

        `reader.tokens` is what `retrieve` returns, and is true of a layer after `reader.wait(layer)`. At most
        what fits host memory at once. Leaving the context finishes all layers and waits for the copies.
        """
        copier = self._check_copies()
        keys, ids = self._request(tokens, blocks, variant)
        first = self._first_chunk(skip_tokens, keys)
        self._discover(keys, timeout)
        with self._next_window(keys[first:], timeout) as lease:
            copies = self._block_copies(lease, ids, first)
            done = first + len(copies)
            reader = LayerReader(copier, copies, tokens=done * self.chunk_size, guard=self._locked_copier)
            try:
                yield reader
            finally:
                reader.finish().wait()
        self._note_retrieved(keys, first, done)

    @contextlib.contextmanager
    def store_layers(
        self, tokens: Tokens, blocks: Sequence[int], *, variant: Variant = _PLAIN
    ) -> Iterator[LayerWriter]:
        """`store` layer by layer, for a model that is computing: `with ... as writer`.

        `writer.save(layer)` takes a layer once it is computed. Leaving the context takes the rest and
        publishes `writer.tokens` leading tokens; after an exception it publishes nothing.
        """
        copier = self._check_copies()
        keys, ids = self._request(tokens, blocks, variant)
        first = self._store.match(keys)[1]
        with self._reserve(tokens, keys, first, len(keys)) as reservation:
            copies = self._slot_copies(reservation, keys[first:], ids, first)
            tokens_stored = (first + reservation.accepted) * self.chunk_size
            writer = LayerWriter(copier, copies, tokens=tokens_stored, guard=self._locked_copier)
            try:
                yield writer
                writer.finish()
            finally:
                # Before the slots are anybody else's.
                writer.last.wait()
            with self._copy_lock:
                self._stored += len(copies) * self.chunk_size
            reservation.commit()
            # Others were to store some of them, and may not have done it, or not yet.
            writer.tokens = self._store.count_stored(keys) * self.chunk_size

    def _request(self, tokens: Tokens, blocks: Sequence[int], variant: Variant) -> tuple[list[ChunkKey], list[int]]:
        """The keys of the whole chunks that `blocks` covers, and the block ids as plain ints."""
        self._check_copies()
        ids = block_ids(blocks)
        return self.keys(tokens, variant)[: len(ids) // self._pages], ids

    def _first_chunk(self, skip_tokens: Any, keys: Sequence[ChunkKey]) -> int:
        if isinstance(skip_tokens, bool) or not isinstance(skip_tokens, int) or skip_tokens < 0:
            raise UsageError(f"skip_tokens must be an int of at least 0, not {short_repr(skip_tokens)}")
        return min(skip_tokens // self.chunk_size, len(keys))

    def _block_copies(self, lease: Lease, blocks: list[int], first: int) -> list[ChunkCopy]:
        """What fills the blocks of the leased chunks, the first of which is number `first`."""
        return [self._chunk_copy(slot, blocks, index) for index, slot in enumerate(lease.slots, first)]

    def _chunk_copy(self, slot: int, blocks: list[int], index: int) -> ChunkCopy:
        start = index * self._pages
        return ChunkCopy(slot, (Run(0, blocks[start : start + self._pages]),))

    def _note_retrieved(self, keys: Sequence[ChunkKey], start: int, done: int) -> None:
        """Chunks [start, done) of those asked for were loaded, which is a use of all before `done`."""
        self._store.touch(keys[:done])
        with self._copy_lock:
            self._requested += len(keys) * self.chunk_size
            self._retrieved += (done - start) * self.chunk_size

    def _next_window(self, keys: Sequence[ChunkKey], timeout: float) -> Lease:
        """A lease on the leading chunks in host memory; if the first is not, on what can be promoted."""
        lease = self._store.lease(keys)
        if lease:
            return lease
        # Half of the host tier at most: the rest serves everybody else meanwhile.
        promotion = self._store.promote(keys, limit=max(1, self._store.slab.num_slots // 2))
        try:
            promotion.wait(_seconds(timeout, "timeout"))
            return self._store.lease(promotion.keys)
        finally:
            promotion.release()

    def _check_copies(self) -> Copier:
        self._check_open()
        if self._copier is None:
            raise UsageError(f"engine {self.name!r} has no paged memory: give it `memory` to store and retrieve")
        return self._copier

    @contextlib.contextmanager
    def _locked_copier(self) -> Iterator[Copier]:
        """Locks `_copy_lock`. An engine that was closed meanwhile copies nothing, and must not say it did."""
        with self._copy_lock:
            yield self._check_copies()

    def _check_open(self) -> None:
        if self._store.forked:
            raise ClosedError(f"engine {self.name!r} belongs to the process that this one was forked from")
        if self._closed:
            raise ClosedError(f"engine {self.name!r} is closed")

    # -- looking ahead ------------------------------------------------------------------------------------

    def lookup(self, tokens: Tokens, *, variant: Variant = _PLAIN, timeout: float = 1.0) -> int:
        """How many leading tokens are stored, in whichever tier. Promises nothing.

        Shared tiers are asked for what other processes stored there, for at most `timeout` seconds.
        """
        self._check_open()
        keys = self.keys(tokens, variant)
        self._discover(keys, timeout)
        return self._store.count_stored(keys) * self.chunk_size

    def _discover(self, keys: Sequence[ChunkKey], timeout: float) -> None:
        seconds, discovery = _seconds(timeout, "timeout"), self._store.discover(keys)
        if discovery is not None:
            discovery.wait(seconds)

    def prefetch(self, tokens: Tokens, *, variant: Variant = _PLAIN) -> Prefetch:
        """Start to bring a prompt's KV into host memory and return at once.

        Demanded loads go first. Prefetches share a bounded part of the host tier; what does not fit, or is
        not stored, is left out. What has arrived stays there for the engine's `pin_ttl` seconds.
        """
        self._check_open()
        promotion = self._store.promote(
            self.keys(tokens, variant), priority=Priority.PREFETCH, ttl=self._pin_ttl, discover=True
        )
        return Prefetch(promotion, self.chunk_size, self._layout.chunk_bytes)

    def pin(self, tokens: Tokens, *, ttl: float | None = None, variant: Variant = _PLAIN) -> int:
        """Keep what host memory has of a prompt there for `ttl` seconds; returns how many tokens that is."""
        self._check_open()
        seconds = self._pin_ttl if ttl is None else _seconds(ttl, "ttl")
        return self._store.pin(self.keys(tokens, variant), seconds) * self.chunk_size

    def unpin(self, tokens: Tokens, *, variant: Variant = _PLAIN) -> int:
        """End the pins of a prompt; returns how many tokens were pinned."""
        self._check_open()
        return self._store.unpin(self.keys(tokens, variant)) * self.chunk_size

    # -- the rest -----------------------------------------------------------------------------------------

    def clear(self, tokens: Tokens | None = None, *, variant: Variant = _PLAIN) -> int:
        """Remove a prompt's chunks, or everything, from every tier; returns how many tokens those were."""
        self._check_open()
        if tokens is None:
            return self._store.clear() * self.chunk_size
        return self._store.delete(self.keys(tokens, variant)) * self.chunk_size

    @property
    def closed(self) -> bool:
        return self._closed or self._store.forked

    def stats(self) -> EngineStats:
        return EngineStats(self._stored, self._retrieved, self._requested, self._store.stats())

    def wait_indexed(self, timeout: float | None = None) -> bool:
        """Wait until what persistent tiers store is known, at most `timeout` seconds. Nothing requires it."""
        self._check_open()
        return self._store.wait_indexed(None if timeout is None else _seconds(timeout, "timeout"))

    def drain(self, timeout: float = 10.0) -> bool:
        """Wait until what was stored is in every tier that takes it, at most `timeout` seconds."""
        if self._store.forked:
            self._check_open()
        return self._store.drain(_seconds(timeout, "timeout"))

    def close(self) -> None:
        """Finish the I/O under way, bounded in time, and release memory and files. Idempotent."""
        if self.closed:
            return
        with self._copy_lock:
            if self._closed:
                return
            self._closed = True
            try:
                if self._copier is not None:
                    self._copier.close()
            finally:
                self._store.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def __del__(self) -> None:
        if not getattr(self, "_closed", True) and not sys.is_finalizing():
            warnings.warn(f"{self!r} was dropped without close()", ResourceWarning, source=self, stacklevel=2)
            self.close()


def _positive(value: Any, name: str) -> int:
    if isinstance(value, bool) or not isinstance(value, int) or value < 1:
        raise UsageError(f"{name} must be a positive int, not {short_repr(value)}")
    return value


def _check_variant(given: object) -> None:
    """Its types, which decide what a key is made of."""
    parts: Any = astuple(given, recurse=False) if isinstance(given, Variant) else (None, None, None)
    salt, lora, tags = parts
    if isinstance(tags, Mapping) and isinstance(lora, tuple | None):
        texts = (*(lora or ("", "")), *tags, *tags.values(), "" if salt is None else salt)
        if len(lora or "ab") == 2 and all(isinstance(text, str) for text in texts):
            return
    raise UsageError(f"variant must be a Variant of a str, a pair of strs and a mapping, not {short_repr(given)}")


def _seconds(value: Any, name: str) -> float:
    """As a float that every clock can add: more than thirty years are as good as for ever."""
    if isinstance(value, bool) or not isinstance(value, Real) or value != value:
        raise UsageError(f"{name} must be a number of seconds, not {short_repr(value)}")
    try:
        return max(min(float(value), _FOREVER), -_FOREVER)
    except OverflowError:  # an int of hundreds of digits
        return -_FOREVER if value < 0.0 else _FOREVER


def _page_format(tensor: torch.Tensor, block_axis: int) -> tuple[object, ...]:
    """What decides which value each byte of a layer's pages belongs to."""
    inner = block_axis + 1
    return str(tensor.dtype), (*tensor.shape[:block_axis], *tensor.shape[inner:]), tensor.stride()[inner:]
