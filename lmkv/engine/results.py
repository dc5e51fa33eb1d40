"""What calls of an engine return: `Prefetch` and `EngineStats`."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Generator, Mapping
from types import MappingProxyType

from attrs import frozen

from lmkv.store.promotion import Promotion
from lmkv.store.stats import StoreStats


@frozen
class EngineStats:
    """Totals of an engine's calls since it was opened, in tokens, and its store's state; from `Engine.stats`.

    Notes
    -----
    A snapshot, which never changes. `requested_tokens`: tokens of the chunks that callers asked to load.
    """

    stored_tokens: int
    retrieved_tokens: int
    requested_tokens: int
    store: StoreStats


@frozen
class Progress:
    """How far a prefetch is: tokens and bytes that some tier stores, and those in host memory by now."""

    found_tokens: int
    ready_tokens: int
    found_bytes: int
    ready_bytes: int

    @property
    def share(self) -> float:
        return self.ready_tokens / self.found_tokens if self.found_tokens else 1.0


class Prefetch:
    """A handle on chunks that are being promoted to host memory, as `Engine.prefetch` returns it.

    Notes
    -----
    Awaitable and thread-safe. Chunks that have arrived stay in host memory until `cancel`, or until the engine's
    `pin_ttl` is over.

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

    def __init__(self, promotion: Promotion, chunk_size: int, chunk_bytes: int) -> None:
        self._promotion = promotion
        self._chunk_size = chunk_size
        self._chunk_bytes = chunk_bytes

    def __repr__(self) -> str:
        return f"<Prefetch: {self._promotion!r}>"

    @property
    def done(self) -> bool:
        return self._promotion.done

    @property
    def tokens(self) -> int:
        """Leading tokens that are in host memory by now."""
        return self._promotion.ready * self._chunk_size

    @property
    def progress(self) -> Progress:
        found, ready = len(self._promotion), self._promotion.ready
        return Progress(
            found * self._chunk_size, ready * self._chunk_size, found * self._chunk_bytes, ready * self._chunk_bytes
        )

    @property
    def sources(self) -> Mapping[str, int]:
        """Tokens by the tier that had them."""
        chunks = self._promotion.sources
        return MappingProxyType({name: count * self._chunk_size for name, count in chunks.items()})

    def wait(self, timeout: float | None = None) -> bool:
        """Wait until done, at most `timeout` seconds. Returns `done`."""
        return self._promotion.wait(timeout)

    def cancel(self) -> None:
        """Drop the references, and skip the reads that have not begun. Idempotent."""
        self._promotion.release()

    def __await__(self) -> Generator[object, None, int]:
        """Wait on the running event loop, blocking no thread; the result is `tokens`."""
        loop = asyncio.get_running_loop()
        finished: asyncio.Future[None] = loop.create_future()

        def wake() -> None:
            if not finished.done():
                finished.set_result(None)

        def wake_from_any_thread() -> None:
            # The loop may be closed by now; then nobody waits any more.
            with contextlib.suppress(RuntimeError):
                loop.call_soon_threadsafe(wake)

        # Raises in a forked child, where nobody would call back.
        self._promotion.wait(0)
        self._promotion.add_done_callback(wake_from_any_thread)
        yield from finished
        return self.tokens
