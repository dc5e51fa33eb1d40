"""Backends that are written as coroutines, and the adapter that makes a `Backend` of one."""

from __future__ import annotations

import asyncio
import concurrent.futures
import logging
import threading
from collections.abc import AsyncIterator, Coroutine, Iterator, Sequence
from functools import partial
from typing import Any, Protocol, TypeVar, runtime_checkable

from attrs import evolve

from lmkv.errors import BackendError, BackendUnavailable, ClosedError
from lmkv.outcomes import Read, ReadStatus, Written
from lmkv.protocols import Chunk, ChunkKey, Listed

T = TypeVar("T")

logger = logging.getLogger(__name__)


class AsyncBackend(Protocol):
    """The verbs of `Backend` as coroutines, with the same meaning, results and errors.

    Notes
    -----
    All run on one event loop, that of its `AsyncAdapter`, so that none needs a lock against another between two
    `await`s. A coroutine may be cancelled at any `await`, and nothing is called after `close`.

    Examples
    --------
    >>> class Memory:  # the two verbs that this example calls; a backend has all of them
    ...     name = "memory"
    ...     def __init__(self):
    ...         self.values = {}
    ...     async def write(self, chunk):
    ...         self.values[chunk.key] = bytes(chunk.payload)
    ...         return STORED
    ...     async def contains(self, keys):
    ...         return [key in self.values for key in keys]
    ...     async def close(self):
    ...         self.values.clear()
    >>> from lmkv.outcomes import STORED
    >>> backend = AsyncAdapter(Memory())
    >>> backend.write(Chunk(bytes(32), memoryview(b"payload"))).status
    <WriteStatus.STORED: 'stored'>
    >>> backend.contains([bytes(32), bytes(31) + b"a"])
    [True, False]
    >>> backend.close()
    """

    @property
    def name(self) -> str: ...

    async def contains(self, keys: Sequence[ChunkKey]) -> list[bool]: ...

    async def read(self, key: ChunkKey, into: memoryview) -> Read: ...

    async def write(self, chunk: Chunk) -> Written: ...

    async def delete(self, keys: Sequence[ChunkKey]) -> None: ...

    async def close(self) -> None: ...


@runtime_checkable
class AsyncListsKeys(Protocol):
    """`ListsKeys` for an asynchronous backend; `list_keys` is usually an asynchronous generator."""

    def list_keys(self) -> AsyncIterator[list[Listed]]: ...


class AsyncAdapter:
    """An `AsyncBackend` as a `Backend`: its coroutines run on an event loop in a thread of the adapter's own.

    Parameters
    ----------
    inner
        The asynchronous backend, closed with the adapter.
    deadline
        Seconds for one call. A read or write that takes longer is FAILED with `BackendUnavailable`; the other
        verbs raise it.

    Notes
    -----
    A coroutine that missed its deadline may run on, because a thread in a system call cannot be cancelled. It
    must not reach the caller's memory then, so each call copies the payload, or reads into a buffer of its own.
    Write a backend for which that copy matters as a blocking one.

    One lock keeps a call from being started after `close`; no call runs under it.

    Examples
    --------
    >>> class Nothing:
    ...     name = "nothing"
    ...     async def contains(self, keys):
    ...         return [False] * len(keys)
    ...     async def close(self):
    ...         pass
    >>> backend = AsyncAdapter(Nothing(), deadline=5.0)
    >>> backend.contains([bytes(32)])
    [False]
    >>> backend.close()
    """

    def __init__(self, inner: AsyncBackend, *, deadline: float = 30.0) -> None:
        self.inner = inner
        self.deadline = deadline
        self._lock = threading.Lock()
        self._closed = self._stopped = False
        self._thread = threading.Thread(target=self._run, name=f"lmkv-aio-{inner.name}", daemon=True)
        self._loop = asyncio.new_event_loop()
        try:
            self._thread.start()
        except RuntimeError:
            self._loop.close()
            raise
        if isinstance(inner, AsyncListsKeys):
            # On the instance, because `isinstance` looks for the attribute and not every backend has it.
            self.list_keys = partial(self._list_keys, inner)

    def __repr__(self) -> str:
        return f"AsyncAdapter({self.inner!r}, deadline={self.deadline})"

    @property
    def name(self) -> str:
        return self.inner.name

    def contains(self, keys: Sequence[ChunkKey]) -> list[bool]:
        return self._call("contains", self.inner.contains(keys))

    def read(self, key: ChunkKey, into: memoryview) -> Read:
        buffer = memoryview(bytearray(len(into)))
        try:
            result = self._call("read", self.inner.read(key, buffer), key)
        except BackendError as error:
            return Read.failed(error)
        if result.status is ReadStatus.HIT:
            into[:] = buffer
        return result

    def write(self, chunk: Chunk) -> Written:
        staged = evolve(chunk, payload=memoryview(bytes(chunk.payload)))
        try:
            return self._call("write", self.inner.write(staged), chunk.key)
        except BackendError as error:
            return Written.failed(error)

    def delete(self, keys: Sequence[ChunkKey]) -> None:
        self._call("delete", self.inner.delete(keys))

    def _list_keys(self, inner: AsyncListsKeys) -> Iterator[list[Listed]]:
        batches = inner.list_keys()
        while (batch := self._call("list_keys", _next(batches))) is not None:
            yield batch

    def close(self) -> None:
        """Cancel what still runs, close the inner backend, and end the thread, all within the deadline."""
        with self._lock:
            if self._closed:
                return
            # No coroutine is started any more, so that `_cancel_and_close` sees all that ever were.
            self._closed = True
        closing = asyncio.run_coroutine_threadsafe(self._cancel_and_close(), self._loop)
        try:
            closing.result(self.deadline)
        except TimeoutError as error:
            reason = f"it took more than {self.deadline} s"
            raise BackendUnavailable(self.name, "close", reason=reason) from error
        finally:
            self._stopped = True
            self._loop.call_soon_threadsafe(self._loop.stop)
            self._thread.join(self.deadline)

    def _call(self, action: str, work: Coroutine[Any, Any, T], key: ChunkKey = b"") -> T:
        """Run a coroutine on the loop and wait for its result, at most until the deadline."""
        with self._lock:
            if self._closed:
                work.close()
                raise ClosedError(f"backend {self.name!r} is closed")
            running = asyncio.run_coroutine_threadsafe(work, self._loop)
        try:
            return running.result(self.deadline)
        except concurrent.futures.CancelledError as error:
            raise ClosedError(f"backend {self.name!r} was closed during {action}") from error
        except TimeoutError as error:
            running.cancel()
            raise BackendUnavailable(self.name, action, key.hex(), f"no answer in {self.deadline} s") from error

    def _run(self) -> None:
        asyncio.set_event_loop(self._loop)
        while not self._stopped:
            # SystemExit in a coroutine, for one, ends the loop, but not the other calls.
            try:
                self._loop.run_forever()
            except BaseException as error:
                logger.exception("lmkv: the event loop of %r goes on after %s", self.inner, type(error).__name__)
        self._loop.close()

    async def _cancel_and_close(self) -> None:
        others = [task for task in asyncio.all_tasks() if task is not asyncio.current_task()]
        for task in others:
            task.cancel()
        await asyncio.gather(*others, return_exceptions=True)
        await self._loop.shutdown_asyncgens()
        await self.inner.close()


async def _next(batches: AsyncIterator[T]) -> T | None:
    return await anext(batches, None)
