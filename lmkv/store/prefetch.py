"""Prefetch: a promotion that a user asked for ahead of need."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Generator, Mapping
from types import MappingProxyType

from attrs import frozen

from lmkv.store.promotion import Promotion


@frozen
class Progress:
    """Of a prefetch: tokens and bytes that were found in some tier, and those in host memory by now."""

    found_tokens: int
    ready_tokens: int
    found_bytes: int
    ready_bytes: int

    @property
    def share(self) -> float:
        return self.ready_tokens / self.found_tokens if self.found_tokens else 1.0


class Prefetch:
    """A handle on chunks that are being brought up. Awaitable; thread-safe.

    What has arrived is held until `cancel`, or until its time is over, so that it is there when it is needed.
    """

    def __init__(self, promotion: Promotion, chunk_size: int, chunk_bytes: int) -> None:
        self._promotion = promotion
        self._chunk_size = chunk_size
        self._chunk_bytes = chunk_bytes

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
        """Let go of the chunks, and leave out what has not begun to be read. Idempotent."""
        self._promotion.release()

    def __await__(self) -> Generator[object, None, int]:
        """Wait on the running event loop, blocking no thread; the result is `tokens`."""
        loop = asyncio.get_running_loop()
        finished: asyncio.Future[None] = loop.create_future()

        def wake() -> None:
            if not finished.done():
                finished.set_result(None)

        def wake_from_any_thread() -> None:
            # A loop that was closed meanwhile has nobody left who waits.
            with contextlib.suppress(RuntimeError):
                loop.call_soon_threadsafe(wake)

        self._promotion.add_done_callback(wake_from_any_thread)
        yield from finished
        return self.tokens
