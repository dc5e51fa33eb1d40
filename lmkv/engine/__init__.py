"""`Engine` stores, loads, looks up and prefetches KV by the tokens of a prompt, without a server."""

from __future__ import annotations

import contextlib
import sys
import threading
import time
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, Self

import torch

from lmkv.build import build_store
from lmkv.chunks.hashing import KeyChain, Tokens
from lmkv.chunks.layout import KVLayout
from lmkv.chunks.namespace import Namespace
from lmkv.config import Config
from lmkv.engine.request import PLAIN, EngineStats, Prefetch, Progress, Request, Variant, root_of, seconds, whole
from lmkv.errors import ClosedError, UsageError, short_repr
from lmkv.memory.copier import Copier, LayerReader, LayerWriter
from lmkv.memory.copiers import make_copier
from lmkv.memory.paged import PagedMemory
from lmkv.protocols import ChunkKey
from lmkv.store.leases import Lease
from lmkv.store.tiered import TieredStore

__all__ = ["Engine", "EngineStats", "Prefetch", "Progress", "Variant", "destroy", "get", "get_or_create"]


def open_store(
    kv_caches: Mapping[str, torch.Tensor] | Iterable[torch.Tensor],
    config: object,
    *,
    block_size: int,
    block_axis: int,
    **identity: Any,
) -> tuple[TieredStore, Namespace, KVLayout, PagedMemory]:
    """Make the store, namespace, layout and paged memory of a new engine. Raises UsageError and ConfigError.

    `identity`: the fields of the namespace that do not follow from the tensors.
    """
    if not isinstance(config, Config):
        raise UsageError(f"config must be a Config, for example Config.load(...), not {short_repr(config)}")
    try:
        tensors = list(kv_caches.values() if isinstance(kv_caches, Mapping) else kv_caches)
    except TypeError:
        given = "tensor without dimensions" if isinstance(kv_caches, torch.Tensor) else type(kv_caches).__name__
        raise UsageError(f"kv_caches must be tensors, one per layer, not a {given}") from None
    names = (list(kv_caches),) if isinstance(kv_caches, Mapping) else ()
    memory = PagedMemory.of(tensors, block_axis=block_axis)
    layout = memory.layout(config.chunk_size, [whole(block_size, "block_size", 1)])
    namespace = Namespace(
        dtype=str(tensors[0].dtype),
        chunk_size=config.chunk_size,
        block_size=block_size,
        layout=repr((block_axis, [_page_format(tensor, block_axis) for tensor in tensors], *names)),
        **identity,
    )
    return build_store(config, namespace, layout, shared=False), namespace, layout, memory


def _page_format(tensor: torch.Tensor, block_axis: int) -> tuple[object, ...]:
    """Return the dtype, and the shape and strides inside a block. These values decide where in a page each number
    is.
    """
    inner = block_axis + 1
    return str(tensor.dtype), (*tensor.shape[:block_axis], *tensor.shape[inner:]), tensor.stride()[inner:]


_READ_TIMEOUT = 30.0
_MARGIN = 60.0
"""Seconds that may pass between the end of a promotion and the lease of its chunks."""


def _look_up_shared(store: TieredStore, keys: Sequence[ChunkKey], timeout: float) -> None:
    """Look in shared tiers, for at most `timeout` seconds, for chunks that the store does not know yet."""
    limit, lookup = seconds(timeout, "timeout"), store.look_up_shared(keys)
    if lookup is not None:
        lookup.wait(limit)


def _lease_window(store: TieredStore, keys: Sequence[ChunkKey], timeout: float) -> Lease:
    """Lease as many consecutive chunks as possible, from `keys[0]` on. If `keys[0]` is not in host memory, read chunks
    from lower tiers first.
    """
    lease = store.lease(keys)
    if lease:
        return lease
    limit = seconds(timeout, "timeout")
    # At most half of host memory, so that the rest serves everybody else. It expires, should an exception come before
    # it is known here.
    promotion = store.promote(keys, limit=max(1, store.slab.num_slots // 2), ttl=max(limit, 0.0) + _MARGIN)
    try:
        promotion.wait(limit)
        return store.lease(promotion.keys)
    finally:
        promotion.release()


class Engine:
    """Stores KV from paged tensors in a `TieredStore`, and loads the KV back. Call `Engine.open` to make an engine.

    Parameters
    ----------
    store : TieredStore
        The store, which the engine closes.
    namespace : Namespace
        The model, layout and versions that prompts must have in common to share KV. All chunk keys depend on these
        values.
    layout : KVLayout
        The order of a chunk's bytes in a slot of host memory.
    memory : PagedMemory, optional
        The paged tensors. Without paged tensors, the engine can look up, prefetch and pin KV, but can neither store nor
        retrieve KV.
    rank : int
        The index of this rank's part in each chunk.
    pin_ttl : float
        Seconds for which pinned and prefetched chunks stay in host memory.
    name : str
        Name of the engine in messages.

    Raises
    ------
    UsageError
        The layout's chunks do not fit into the store's slots, or `memory` has another layout.

    Notes
    -----
    Thread-safe: calls that copy KV run one at a time, and all other calls run concurrently. The engine owns threads,
    memory and files, so close the engine, or use it in a `with` statement. In a forked child every call raises
    ClosedError.

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
                f"a chunk of this layout has {layout.slot_bytes} bytes, but a slot of the store has "
                f"{store.slab.slot_bytes}: make host memory with slot_bytes=layout.slot_bytes"
            )
        self._namespace = namespace
        self._layout = layout
        self._pages = layout.pages_per_chunk(0)
        self._pin_ttl = pin_ttl
        self._copier: Copier | None = make_copier(memory, layout, store.slab, rank) if memory else None
        self._copy_lock = threading.Lock()
        # Reentrant, so only its thread can release it: an exception may come before we know that it is acquired.
        self._pace_lock = threading.RLock()
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
        """Make an engine for paged KV tensors, one per layer, with the tiers that `config` names.

        Each tensor has blocks of `block_size` tokens along its axis `block_axis` (0, or 1 for the shape `[2, block,
        ...]`). Any dtype is possible. Models that compute different KV need different values of `model` or `revision`.
        Engines share KV only if the shapes, strides and dtypes of their blocks are equal. If `kv_caches`
        is a mapping, the names of the tensors must be equal, too. Raises UsageError if a block of a tensor is not dense
        in memory, and ConfigError for settings that cannot work on this machine.
        """
        if model == "":
            raise UsageError("the argument model is empty: name the model, as engines with equal names share KV")
        config = Config.load() if config is None else config
        store, namespace, layout, memory = open_store(
            kv_caches, config, block_size=block_size, block_axis=block_axis, model=model, revision=revision
        )
        try:
            return cls(store, namespace, layout=layout, memory=memory, pin_ttl=config.pin_ttl, name=name)
        except BaseException:
            store.close()
            raise

    def __repr__(self) -> str:
        return f"<Engine {self.name!r}{' (closed)' if self.closed else ''}: chunks of {self.chunk_size} tokens>"

    @property
    def chunk_size(self) -> int:
        """Number of tokens in a chunk. The engine stores and finds only whole chunks."""
        return self._layout.chunk_size

    def keys(self, tokens: Tokens, variant: Variant = PLAIN) -> list[ChunkKey]:
        """Return the chunk keys of a prompt, one for each whole chunk."""
        return self._chain(tokens, variant).keys

    def _chain(self, tokens: Tokens, variant: Variant) -> KeyChain:
        chain = KeyChain(root_of(variant, self._namespace), self.chunk_size)
        chain.extend(tokens)
        return chain

    # -- copying ------------------------------------------------------------------------------------------

    def store(self, tokens: Tokens, blocks: Sequence[int], *, variant: Variant = PLAIN, wait: float = 0.0) -> int:
        """Store the KV of a prompt from `blocks`. Returns how many of the prompt's first tokens are stored now.

        `blocks`: the indexes of the prompt's blocks, in order; the first block holds the first token. Only whole chunks
        that `blocks` covers are stored. Chunks that a tier already has are not copied again. The result is smaller
        than the prompt if there is no space, or while another thread stores some of the chunks.

        Without `wait`, the call copies into host memory and returns; lower tiers get the chunks in the background. If a
        lower tier is slow, some chunks may never be written to this tier. With `wait`, the call waits for slow lower
        tiers, for up to `wait` seconds in total, so that these tiers get all chunks. In this way, a
        prompt larger than host memory can be stored. Calls with `wait` run one at a time.
        """
        request = self._request(tokens, blocks, variant)
        keys = request.keys
        deadline = time.monotonic() + seconds(wait, "wait")
        done = self._found(keys)
        try:
            if wait and not self._pace_lock.acquire(timeout=max(0.0, deadline - time.monotonic())):
                return self._store.catalog.count_stored(keys[:done]) * self.chunk_size
            idle = False
            while done < len(keys):
                if wait and not self._store.wait_for_room(deadline - time.monotonic()):
                    break
                end = done + self._store.max_pending_stores if wait else len(keys)
                accepted = self._store_window(request, done, end)
                done += accepted
                # No slot although nothing was under way: there will be none.
                stuck, idle = idle and not accepted, not accepted
                if stuck or (idle and not self._store.drain(deadline - time.monotonic())):
                    break
        finally:
            # No call before it: an exception could come there.
            try:  # noqa: SIM105
                self._pace_lock.release()
            except RuntimeError:
                pass
        return self._store.catalog.count_stored(keys[:done]) * self.chunk_size

    def _store_window(self, request: Request, first: int, end: int) -> int:
        """Store the chunks with index `first` to `end - 1`, as far as there are free slots. Returns how many of these
        chunks are stored now, by this call or by other calls.
        """
        with request.reserve(self._store, first, end) as reservation:
            copies = request.copies_to_slots(reservation.slots, first, end)
            # Not `_locked_copier`: its generator is slow in the cold caches after a copy.
            with self._copy_lock:
                self._check_copies().store(copies).wait()
                self._stored += len(copies) * self.chunk_size
            reservation.commit()
            return reservation.accepted

    def retrieve(
        self,
        tokens: Tokens,
        blocks: Sequence[int],
        *,
        skip_tokens: int = 0,
        variant: Variant = PLAIN,
        timeout: float = _READ_TIMEOUT,
    ) -> int:
        """Fill `blocks` with the stored KV of a prompt. Return how many of the prompt's first tokens are loaded.

        `blocks`: the indexes of the prompt's blocks, in order. Tokens before `skip_tokens` (rounded down to whole
        chunks) are not loaded, but count in the result. Chunks in lower tiers are first read into host memory, in
        groups that fit, so a prompt may be larger than host memory. Loading stops before a chunk that does not arrive
        within `timeout` seconds.
        """
        request = self._request(tokens, blocks, variant)
        keys = request.keys
        start = done = request.chunks_in(skip_tokens)
        _look_up_shared(self._store, keys, timeout)
        while done < len(keys):
            with _lease_window(self._store, keys[done:], timeout) as lease:
                copies = request.copies_to_blocks(lease.slots, done)
                with self._copy_lock:
                    self._check_copies().load(copies).wait()
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
        variant: Variant = PLAIN,
        timeout: float = _READ_TIMEOUT,
    ) -> Iterator[LayerReader]:
        """Fill `blocks` as `retrieve` does, but layer by layer, while the model computes: `with ... as reader`.

        `reader.wait(layer)` makes later computation wait until the layer is in `blocks`. `reader.tokens`: how many of
        the prompt's first tokens are loaded, at most as many as fit into host memory. At its end, the `with` block
        waits for the copies of all layers.
        """
        copier, request = self._check_copies(), self._request(tokens, blocks, variant)
        keys = request.keys
        first = request.chunks_in(skip_tokens)
        _look_up_shared(self._store, keys, timeout)
        with _lease_window(self._store, keys[first:], timeout) as lease:
            copies = request.copies_to_blocks(lease.slots, first)
            done = first + len(copies)
            reader = LayerReader(copier, copies, tokens=done * self.chunk_size, guard=self._locked_copier)
            try:
                yield reader
            finally:
                reader.finish().wait()
        self._note_retrieved(keys, first, done)

    @contextlib.contextmanager
    def store_layers(self, tokens: Tokens, blocks: Sequence[int], *, variant: Variant = PLAIN) -> Iterator[LayerWriter]:
        """Store KV as `store` does, but layer by layer, while the model computes: `with ... as writer`.

        Call `writer.save(layer)` after the layer is computed. At its end, the `with` block saves all layers that were
        not saved. Lookups then find the first `writer.tokens` tokens of the prompt. If the `with` block raises, nothing
        is stored.
        """
        copier, request = self._check_copies(), self._request(tokens, blocks, variant)
        keys = request.keys
        first = self._found(keys)
        with request.reserve(self._store, first, len(keys)) as reservation:
            copies = request.copies_to_slots(reservation.slots, first, len(keys))
            tokens_stored = (first + reservation.accepted) * self.chunk_size
            writer = LayerWriter(copier, copies, tokens=tokens_stored, guard=self._locked_copier)
            try:
                yield writer
                writer.finish()
            finally:
                # The slots may be given to others next.
                writer.last.wait()
            with self._copy_lock:
                self._stored += len(copies) * self.chunk_size
            reservation.commit()
            # Other threads may not have stored their part of these chunks, or not yet.
            writer.tokens = self._store.catalog.count_stored(keys) * self.chunk_size

    def _request(self, tokens: Tokens, blocks: Sequence[int], variant: Variant) -> Request:
        self._check_copies()
        return Request(self._chain(tokens, variant), blocks, self.chunk_size, self._pages)

    def _found(self, keys: Sequence[ChunkKey]) -> int:
        """Return how many chunks, from `keys[0]` on, are in some tier without a gap. If lower tiers have lost such
        chunks, write them again from host memory.
        """
        found = self._store.catalog.count_prefix(keys)[1]
        self._store.write_lost(keys[:found])
        return found

    def _note_retrieved(self, keys: Sequence[ChunkKey], start: int, done: int) -> None:
        """Count chunks `start` to `done - 1` as loaded, and record a use of every chunk before `done`."""
        self._store.touch(keys[:done])
        with self._copy_lock:
            self._requested += len(keys) * self.chunk_size
            self._retrieved += (done - start) * self.chunk_size

    def _check_copies(self) -> Copier:
        self._check_open()
        if self._copier is None:
            raise UsageError(f"engine {self.name!r} has no paged memory to copy: make an engine with `memory`")
        return self._copier

    @contextlib.contextmanager
    def _locked_copier(self) -> Iterator[Copier]:
        """Yield the copier, and hold `_copy_lock` during the `with` block. Raises ClosedError if the engine is
        closed.
        """
        with self._copy_lock:
            yield self._check_copies()

    def _check_open(self) -> None:
        if self._store.forked:
            raise ClosedError(f"engine {self.name!r} belongs to the parent process: make a new engine after a fork")
        if self._closed:
            raise ClosedError(f"engine {self.name!r} is closed")

    # -- looking ahead ------------------------------------------------------------------------------------

    def lookup(self, tokens: Tokens, *, variant: Variant = PLAIN, timeout: float = 1.0) -> int:
        """Return how many of a prompt's first tokens have stored KV. This KV may be evicted before `retrieve`.

        The call also looks in shared tiers for KV that other processes have stored, for at most `timeout` seconds.
        """
        self._check_open()
        keys = self.keys(tokens, variant)
        _look_up_shared(self._store, keys, timeout)
        return self._store.catalog.count_stored(keys) * self.chunk_size

    def prefetch(self, tokens: Tokens, *, variant: Variant = PLAIN) -> Prefetch:
        """Begin to read a prompt's KV from lower tiers into host memory, and return at once.

        Reads for `retrieve` run before reads for prefetches. All prefetches together get a limited part of host memory;
        chunks beyond this part are not loaded. Loaded chunks stay in host memory for the engine's `pin_ttl` seconds.
        """
        self._check_open()
        keys = self.keys(tokens, variant)
        owner = root_of(variant, self._namespace)
        promotion = self._store.promote(keys, prefetch=True, ttl=self._pin_ttl, owner=owner, look_up_shared=True)
        return Prefetch(promotion, self.chunk_size, self._layout.chunk_bytes)

    def pin(self, tokens: Tokens, *, ttl: float | None = None, variant: Variant = PLAIN) -> int:
        """Keep a prompt's first chunks in host memory for `ttl` seconds. Returns the number of pinned tokens.

        Pinning stops before the first chunk that is not in host memory. `ttl`: the engine's `pin_ttl` by default. Pins
        may fill a limited share of host memory. Beyond this share, the variant with the most pins loses its oldest
        pins.
        """
        self._check_open()
        limit = self._pin_ttl if ttl is None else seconds(ttl, "ttl")
        keys, owner = self.keys(tokens, variant), root_of(variant, self._namespace)
        return self._store.pin(keys, limit, owner) * self.chunk_size

    def unpin(self, tokens: Tokens, *, variant: Variant = PLAIN) -> int:
        """Remove the pins of a prompt, and return how many tokens were pinned."""
        self._check_open()
        return self._store.unpin(self.keys(tokens, variant)) * self.chunk_size

    def clear(self, tokens: Tokens | None = None, *, variant: Variant = PLAIN) -> int:
        """Remove the KV of a prompt from every tier; without `tokens`, remove all KV. Return how many tokens were
        removed.
        """
        self._check_open()
        if tokens is None:
            return self._store.clear() * self.chunk_size
        return self._store.delete(self.keys(tokens, variant)) * self.chunk_size

    @property
    def closed(self) -> bool:
        return self._closed or self._store.forked

    @property
    def tiers(self) -> TieredStore:
        """The store that the engine uses."""
        return self._store

    @property
    def copier(self) -> Copier | None:
        """The engine's copier, or None if the engine has no paged memory or is closed."""
        return self._copier

    def stats(self) -> EngineStats:
        return EngineStats(self._stored, self._retrieved, self._requested, self._store.stats())

    def wait_indexed(self, timeout: float | None = None) -> bool:
        """Wait until all chunks of persistent tiers are listed, for at most `timeout` seconds. Returns whether the
        lists are complete.
        """
        self._check_open()
        return self._store.wait_indexed(None if timeout is None else seconds(timeout, "timeout"))

    def drain(self, timeout: float = 10.0) -> bool:
        """Wait until all stored chunks are written to the lower tiers, for at most `timeout` seconds. Returns False if
        this time was too short.
        """
        if self._store.forked:
            self._check_open()
        return self._store.drain(seconds(timeout, "timeout"))

    def close(self) -> None:
        """Finish I/O that is running, for a limited time, and free memory, threads and files. Idempotent."""
        if self._store.forked:
            return
        with self._copy_lock:
            # The next call carries an interrupted one on.
            self._closed = True
            copier, self._copier = self._copier, None
            try:
                if copier is not None:
                    copier.close()
            finally:
                self._store.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def __del__(self) -> None:
        if not getattr(self, "_closed", True) and not sys.is_finalizing():
            warnings.warn(f"{self!r} was never closed: call close()", ResourceWarning, source=self, stacklevel=2)
            self.close()


_engines: dict[str, Engine] = {}
_lock = threading.Lock()


def get_or_create(name: str, factory: Callable[[], Engine]) -> Engine:
    """Return the open engine called `name`. If there is no such engine, call `factory` to make it; other calls wait
    meanwhile.
    """
    with _lock:
        engine = _engines.get(name)
        if engine is None or engine.closed:
            engine = _engines[name] = factory()
        return engine


def get(name: str) -> Engine:
    """Return the engine called `name`. Raises UsageError for an unknown name."""
    engine = _engines.get(name)
    if engine is None:
        known = ", ".join(sorted(_engines)) or "none"
        raise UsageError(f"there is no engine {name!r}; registered: {known}")
    return engine


def destroy(name: str) -> None:
    """Close the engine called `name`, and remove the name. Does nothing if there is no such engine."""
    with _lock:
        engine = _engines.pop(name, None)
    if engine is not None:
        engine.close()
