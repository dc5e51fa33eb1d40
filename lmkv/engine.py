"""Engine: store, retrieve, look up and prefetch KV by the tokens of a prompt, without any server.

Orchestration only: keys come from `hashing`, bytes move in `copier`, chunks live in `tiered`.
"""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from types import TracebackType
from typing import Self

import torch
from attrs import field, frozen

from lmkv.build import build_store
from lmkv.chunks.hashing import Tokens, chunk_keys, token_bytes
from lmkv.chunks.layout import KVLayout
from lmkv.chunks.namespace import Namespace
from lmkv.config import Config
from lmkv.errors import ClosedError, UsageError
from lmkv.memory.copier import ChunkCopy, Copier, Run
from lmkv.memory.copiers import make_copier
from lmkv.memory.layerwise import LayerReader, LayerWriter
from lmkv.memory.paged import PagedMemory
from lmkv.protocols import ChunkKey
from lmkv.store.leases import Lease, Reservation
from lmkv.store.prefetch import Prefetch
from lmkv.store.promotion import Promotion
from lmkv.store.tiered import TieredStore
from lmkv.store.tiers.iopool import Priority
from lmkv.store.tiers.stats import StoreStats

_READ_TIMEOUT = 30.0


@frozen
class Variant:
    """What separates two prompts of equal tokens. Prompts share KV only when all of it is equal."""

    cache_salt: str | None = None
    lora: tuple[str, str] | None = None
    tags: Mapping[str, str] = field(factory=dict)


@frozen
class EngineStats:
    """Totals of the engine's calls in tokens, and the store's state."""

    stored_tokens: int
    retrieved_tokens: int
    requested_tokens: int
    store: StoreStats


_PLAIN = Variant()


class Engine:
    """KV of token prefixes, between paged tensors and a `TieredStore`.

    `store`: owned by the engine from now on, closed with it. `namespace`: what the bytes mean; it roots the
    keys. `memory` and `block_size`: the paged tensors and how many tokens one of their blocks holds; an
    engine without memory can look up, prefetch and pin, but not copy. `rank`: this memory's segment.

    Thread-safe: copies of one engine run one at a time, everything else concurrently.
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
        if layout.slot_bytes > store.slab.slot_bytes:
            raise UsageError(
                f"a chunk of this layout takes {layout.slot_bytes} bytes, the store's slots have "
                f"{store.slab.slot_bytes}; build the primary tier with slot_bytes=layout.slot_bytes"
            )
        self.name = name
        self._store = store
        self._namespace = namespace
        self._layout = layout
        self._pin_ttl = pin_ttl
        self._copier: Copier | None = make_copier(memory, layout, store.slab, rank) if memory else None
        self._copying = threading.Lock()
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
        """An engine over paged KV tensors, one a layer, with the tiers that `config` names.

        Each tensor has blocks of `block_size` tokens along `block_axis` (0, or 1 for `[2, block, ...]`).
        `model` and `revision` must tell apart whatever computes different KV.
        """
        config = config or Config.load()
        tensors = list(kv_caches.values() if isinstance(kv_caches, Mapping) else kv_caches)
        memory = PagedMemory.of(tensors, block_axis=block_axis)
        layout = memory.layout(config.chunk_size, [block_size])
        namespace = Namespace(
            model=model,
            revision=revision,
            dtype=str(tensors[0].dtype),
            chunk_size=config.chunk_size,
            block_size=block_size,
            layout=repr([tuple(tensor.shape[block_axis + 1 :]) for tensor in tensors]),
        )
        pinned = memory.device.type != "cpu"
        store = build_store(config, namespace, layout, shared=False, pinned=pinned)
        try:
            return cls(store, namespace, layout=layout, memory=memory, pin_ttl=config.pin_ttl, name=name)
        except BaseException:
            store.close()
            raise

    # -- keys ---------------------------------------------------------------------------------------------

    @property
    def chunk_size(self) -> int:
        """Tokens a chunk: only whole chunks are stored and found."""
        return self._layout.chunk_size

    def keys(self, tokens: Tokens, variant: Variant = _PLAIN) -> list[ChunkKey]:
        """The chunk keys of a prompt, one for each whole chunk."""
        root = self._namespace.root(
            cache_salt=variant.cache_salt,
            lora=variant.lora,
            extra={f"tag.{name}": value for name, value in variant.tags.items()},
        )
        return chunk_keys(tokens, root, self.chunk_size)

    # -- copying ------------------------------------------------------------------------------------------

    def store(
        self, tokens: Tokens, blocks: Sequence[int], *, variant: Variant = _PLAIN, wait: float = 0.0
    ) -> int:
        """Store the KV of a prompt that lies in `blocks`, the first of which holds its first token.

        Only whole chunks that `blocks` covers are stored; those already in some tier are not copied again.
        Returns how many leading tokens are in the store now: fewer than covered when there was no room.

        Without `wait` it copies into host memory and returns; when lower tiers cannot follow, they miss some
        chunks. With it, it goes at their pace for at most so many seconds: then every tier gets every chunk
        that it takes, and a prompt may be longer than the host tier.
        """
        self._check_copies()
        keys = self.keys(tokens, variant)[: self._covered(blocks)]
        deadline = time.monotonic() + wait
        window = self._store.store_window if wait else len(keys)
        done = self._store.match(keys)[1]
        idle = False
        while done < len(keys):
            accepted = self._store_piece(tokens, blocks, keys, done, done + window)
            done += accepted
            # Once nothing was under way and there still was no slot, there will be none.
            stuck, idle = idle and not accepted, not accepted
            if stuck or done == len(keys) or not self._store.drain(deadline - time.monotonic()):
                break
        return done * self.chunk_size

    def _store_piece(
        self, tokens: Tokens, blocks: Sequence[int], keys: Sequence[ChunkKey], first: int, end: int
    ) -> int:
        """Store chunks [first, end) as far as there are slots; how many are taken care of."""
        with self._reserve(tokens, keys, first, end) as reservation:
            copies = self._copies_of(reservation, keys[first:end], blocks, first)
            with self._copies() as copier:
                copier.store(copies).wait()
                self._stored += len(copies) * self.chunk_size
            reservation.commit()
            return reservation.accepted

    def _reserve(self, tokens: Tokens, keys: Sequence[ChunkKey], first: int, end: int) -> Reservation:
        wanted = keys[first:end]
        parent = keys[first - 1] if first else b""
        ids = token_bytes(tokens[first * self.chunk_size : (first + len(wanted)) * self.chunk_size])
        return self._store.reserve(wanted, parent=parent, tokens=ids, protect=keys)

    def _copies_of(
        self, reservation: Reservation, keys: Sequence[ChunkKey], blocks: Sequence[int], first: int
    ) -> list[ChunkCopy]:
        """What fills the reserved slots. `keys`: of the chunks from number `first`."""
        slots = reservation.slots
        return [
            self._copy(slots[key], blocks, index) for index, key in enumerate(keys, first) if key in slots
        ]

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

        Tokens before `skip_tokens`, rounded down to a chunk, are left alone. Lower tiers are read piece by
        piece through host memory, so that the prefix may be longer than the host tier; a piece that is not
        there within `timeout` seconds ends the prefix.
        """
        self._check_copies()
        keys = self.keys(tokens, variant)[: self._covered(blocks)]
        start = done = min(skip_tokens // self.chunk_size, len(keys))
        while done < len(keys):
            with self._next_piece(keys[done:] if done else keys, timeout) as lease:
                copies = self._loads(lease, blocks, done)
                with self._copies() as copier:
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
        what host memory holds at once. Leaving the context finishes all layers and waits for the copies.
        """
        copier = self._check_copies()
        keys = self.keys(tokens, variant)[: self._covered(blocks)]
        first = min(skip_tokens // self.chunk_size, len(keys))
        with self._next_piece(keys[first:], timeout) as lease:
            copies = self._loads(lease, blocks, first)
            done = first + len(copies)
            reader = LayerReader(copier, copies, tokens=done * self.chunk_size, guard=self._copies)
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
        keys = self.keys(tokens, variant)[: self._covered(blocks)]
        first = self._store.match(keys)[1]
        with self._reserve(tokens, keys, first, len(keys)) as reservation:
            copies = self._copies_of(reservation, keys[first:], blocks, first)
            tokens_stored = (first + reservation.accepted) * self.chunk_size
            writer = LayerWriter(copier, copies, tokens=tokens_stored, guard=self._copies)
            try:
                yield writer
                writer.finish()
            finally:
                # Before the slots are anybody else's.
                writer.last.wait()
            with self._copying:
                self._stored += len(copies) * self.chunk_size
            reservation.commit()

    def _loads(self, lease: Lease, blocks: Sequence[int], first: int) -> list[ChunkCopy]:
        """What fills the blocks of the leased chunks, the first of which is number `first`."""
        return [self._copy(slot, blocks, index) for index, slot in enumerate(lease.slots, first)]

    def _note_retrieved(self, keys: Sequence[ChunkKey], start: int, done: int) -> None:
        """Numbers [start, done) of the chunks asked for were loaded, which is a use of all before `done`."""
        self._store.touch(keys[:done])
        with self._copying:
            self._requested += len(keys) * self.chunk_size
            self._retrieved += (done - start) * self.chunk_size

    def _next_piece(self, keys: Sequence[ChunkKey], timeout: float) -> Lease:
        """A lease on the leading chunks that are here, or if the first is not, on what can be brought up."""
        lease = self._store.lease(keys)
        if lease:
            return lease
        # Half of the host tier at most: the rest serves everybody else meanwhile.
        promotion = self._store.promote(keys, limit=max(1, self._store.slab.num_slots // 2))
        try:
            promotion.wait(timeout)
            return self._store.lease(promotion.keys)
        finally:
            promotion.release()

    def _covered(self, blocks: Sequence[int]) -> int:
        return len(blocks) // self._layout.pages_per_chunk(0)

    def _copy(self, slot: int, blocks: Sequence[int], index: int) -> ChunkCopy:
        pages = self._layout.pages_per_chunk(0)
        return ChunkCopy(slot, (Run(0, list(blocks[index * pages : (index + 1) * pages])),))

    def _check_copies(self) -> Copier:
        self._check_open()
        if self._copier is None:
            raise UsageError(
                f"engine {self.name!r} has no paged memory: give it `memory` to store and retrieve"
            )
        return self._copier

    @contextlib.contextmanager
    def _copies(self) -> Iterator[Copier]:
        """Locks `_copying`. An engine that was closed meanwhile copies nothing, and must not say it did."""
        with self._copying:
            yield self._check_copies()

    def _check_open(self) -> None:
        if self._closed:
            raise ClosedError(f"engine {self.name!r} is closed")

    # -- looking ahead ------------------------------------------------------------------------------------

    def lookup(self, tokens: Tokens, *, variant: Variant = _PLAIN) -> int:
        """How many leading tokens are stored, in whichever tier. Changes nothing and promises nothing."""
        self._check_open()
        _, found = self._store.match(self.keys(tokens, variant))
        return found * self.chunk_size

    def prefetch(self, tokens: Tokens, *, variant: Variant = _PLAIN) -> Prefetch:
        """Start to bring a prompt's KV into host memory and return at once.

        Demanded loads go first. Prefetches share a bounded part of the host tier; what does not fit, or is
        not stored, is left out. What has arrived is held for the engine's `pin_ttl` seconds.
        """
        self._check_open()
        promotion: Promotion = self._store.promote(
            self.keys(tokens, variant), priority=Priority.PREFETCH, ttl=self._pin_ttl
        )
        return Prefetch(promotion, self.chunk_size, self._layout.chunk_bytes)

    def pin(self, tokens: Tokens, *, ttl: float | None = None, variant: Variant = _PLAIN) -> int:
        """Keep what host memory has of a prompt there for `ttl` seconds; returns how many tokens that is."""
        self._check_open()
        seconds = self._pin_ttl if ttl is None else ttl
        return self._store.pin(self.keys(tokens, variant), seconds) * self.chunk_size

    def unpin(self, tokens: Tokens, *, variant: Variant = _PLAIN) -> int:
        """End the pins of a prompt; returns how many tokens were pinned."""
        self._check_open()
        return self._store.unpin(self.keys(tokens, variant)) * self.chunk_size

    # -- the rest -----------------------------------------------------------------------------------------

    def clear(self, tokens: Tokens | None = None, *, variant: Variant = _PLAIN) -> int:
        """Remove a prompt's chunks, or everything, from every tier; returns how many tokens that were."""
        self._check_open()
        if tokens is None:
            return self._store.clear() * self.chunk_size
        return self._store.delete(self.keys(tokens, variant)) * self.chunk_size

    @property
    def closed(self) -> bool:
        return self._closed

    def stats(self) -> EngineStats:
        return EngineStats(self._stored, self._retrieved, self._requested, self._store.stats())

    def wait_indexed(self, timeout: float | None = None) -> bool:
        """Wait until what persistent tiers hold is known, at most `timeout` seconds. Nothing has to wait."""
        return self._store.wait_indexed(timeout)

    def drain(self, timeout: float = 10.0) -> bool:
        """Wait until what was stored is in every tier that takes it, at most `timeout` seconds."""
        return self._store.drain(timeout)

    def close(self) -> None:
        """Finish the I/O under way, bounded in time, and release memory and files. Idempotent."""
        with self._copying:
            if self._closed:
                return
            self._closed = True
            if self._copier is not None:
                self._copier.close()
        self._store.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()
