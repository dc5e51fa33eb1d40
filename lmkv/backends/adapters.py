"""Adapters: `AsyncAdapter` runs coroutines, `WrapperBackend` forwards all calls, and `NullBackend` stores nothing."""

from __future__ import annotations

import asyncio
import concurrent.futures
import contextlib
import logging
import os
import secrets
import threading
from collections.abc import AsyncIterator, Callable, Coroutine, Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any, Protocol, TypeVar, runtime_checkable

import aiofiles
import aiofiles.os
from attrs import define, evolve, field

from lmkv.errors import BackendError, BackendUnavailable, ClosedError
from lmkv.medium import Medium, MediumError
from lmkv.protocols import (
    HIT,
    MISS,
    PRESENT,
    STORED,
    Backend,
    Chunk,
    ChunkKey,
    Listed,
    ListsKeys,
    Read,
    ReadStatus,
    RegistersMemory,
    Shared,
    SharesCapacity,
    SizesChunks,
    Written,
)

T = TypeVar("T")

logger = logging.getLogger(__name__)


class AsyncBackend(Protocol):
    """The methods of `Backend` as coroutines, with the same arguments, results and errors.

    Notes
    -----
    All coroutines run in the one event loop of the `AsyncAdapter`, so the code between two `await`s needs no lock. A
    coroutine may be cancelled at any `await`. No coroutine is called after `close`.

    Examples
    --------
    >>> class Memory:  # only the methods that this example calls; a real backend has more
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
    >>> from lmkv.protocols import STORED
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
    """An asynchronous backend that can list its chunks. `list_keys` returns an asynchronous iterator, usually a
    generator.
    """

    def list_keys(self) -> AsyncIterator[list[Listed]]: ...


class AsyncAdapter:
    """A `Backend` that runs the coroutines of an `AsyncBackend`, in an event loop on a separate thread.

    Parameters
    ----------
    inner
        The asynchronous backend. The adapter closes it.
    deadline
        Seconds for one call. A read or write that takes longer returns FAILED with a `BackendUnavailable`. Other calls
        that take longer raise `BackendUnavailable`.

    Notes
    -----
    A coroutine may keep running after its deadline, because a thread in a system call cannot be cancelled. Such a
    coroutine must not use the caller's memory. Therefore each write copies the payload first, and each read fills a
    separate buffer. If this copy is too slow, write a blocking backend.

    Thread-safe. No lock is held while a call runs.

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
        """Cancel running calls, close the inner backend, and stop the thread.

        Raises `BackendUnavailable` if closing takes longer than the deadline.
        """
        with self._lock:
            if self._closed:
                return
            # From here on no coroutine starts, so `_cancel_and_close` sees every one.
            self._closed = True
        closing = asyncio.run_coroutine_threadsafe(self._cancel_and_close(), self._loop)
        try:
            closing.result(self.deadline)
        except TimeoutError as error:
            reason = f"closing takes more than {self.deadline} s"
            raise BackendUnavailable(self.name, "close", reason=reason) from error
        finally:
            self._stopped = True
            self._loop.call_soon_threadsafe(self._loop.stop)
            self._thread.join(self.deadline)

    def _call(self, action: str, work: Coroutine[Any, Any, T], key: ChunkKey = b"") -> T:
        """Run a coroutine in the event loop, and return its result. Raises `BackendUnavailable` after the deadline."""
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
            raise BackendUnavailable(self.name, action, key.hex(), f"no answer within {self.deadline} s") from error

    def _run(self) -> None:
        asyncio.set_event_loop(self._loop)
        while not self._stopped:
            # SystemExit in a coroutine, for one, ends the loop, but not the other calls.
            try:
                self._loop.run_forever()
            except BaseException as error:
                logger.exception(
                    "lmkv: %s in the event loop of backend %r; the event loop continues",
                    type(error).__name__,
                    self.inner,
                )
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


# -- one of them: files -----------------------------------------------------------------------------------


_SUFFIX = ".chunk"


class AsyncFileBackend:
    """Stores chunks as files, with coroutines: an example of an `AsyncBackend`.

    To serve a model from a disk, use `LocalDiskBackend`, which also verifies checksums and limits its capacity.

    Parameters
    ----------
    folder
        Folder for the files, on a file system with hard links. A missing folder is created so that only this user may
        use it.

    Raises
    ------
    OSError
        The folder cannot be created.

    Notes
    -----
    A file gets its name only when the file is complete and on the medium. Afterwards the file never changes. A read
    returns FAILED if the file has another length than the buffer. Bytes that have changed on the medium are not
    detected. Links are not followed, but nothing checks who owns the folder.

    Examples
    --------
    >>> import tempfile
    >>> from lmkv.backends import AsyncAdapter
    >>> from lmkv.protocols import Chunk
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     backend = AsyncAdapter(AsyncFileBackend(folder))
    ...     written = backend.write(Chunk(bytes(32), memoryview(b"payload")))
    ...     found = backend.contains([bytes(32)])
    ...     backend.close()
    >>> written.status, found
    (<WriteStatus.STORED: 'stored'>, [True])
    """

    name = "files"

    def __init__(self, folder: str | os.PathLike[str]) -> None:
        self.folder = Path(folder)
        self.folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        self._medium = Medium(str(self.folder))

    def __repr__(self) -> str:
        return f"AsyncFileBackend({str(self.folder)!r})"

    async def contains(self, keys: Sequence[ChunkKey]) -> list[bool]:
        try:
            await self._check_medium()
            return await asyncio.gather(*(aiofiles.os.path.exists(self._path(key)) for key in keys))
        except OSError as error:
            raise self._translated(error, "contains") from error

    async def read(self, key: ChunkKey, into: memoryview) -> Read:
        try:
            await self._check_medium()
            opener = lambda path, flags: os.open(path, flags | os.O_NOFOLLOW | os.O_NONBLOCK)  # noqa: E731
            async with aiofiles.open(self._path(key), "rb", opener=opener) as file:
                whole = os.fstat(file.fileno()).st_size == len(into) == await file.readinto(into)
        except FileNotFoundError:
            return MISS
        except OSError as error:
            return Read.failed(self._translated(error, "read", key))
        return HIT if whole else Read.failed(BackendError(self.name, "read", key.hex(), "the file has a wrong length"))

    async def write(self, chunk: Chunk) -> Written:
        unfinished = self.folder / f"{secrets.token_hex(8)}.tmp"
        try:
            await self._check_medium()
            async with aiofiles.open(unfinished, "xb") as file:
                await file.write(chunk.payload)
                await file.flush()
                # Otherwise a power failure could leave the name, and not the bytes.
                await asyncio.to_thread(os.fdatasync, file.fileno())
            # A hard link, because a rename would replace the file of another writer of this key.
            await aiofiles.os.link(unfinished, self._path(chunk.key))
        except FileExistsError:
            return PRESENT
        except OSError as error:
            return Written.failed(self._translated(error, "write", chunk.key))
        finally:
            with contextlib.suppress(OSError):
                await aiofiles.os.unlink(unfinished)
        return STORED

    async def delete(self, keys: Sequence[ChunkKey]) -> None:
        try:
            await self._check_medium()
            await asyncio.gather(*(asyncio.to_thread(self._path(key).unlink, True) for key in keys))
        except OSError as error:
            raise self._translated(error, "delete") from error

    async def list_keys(self) -> AsyncIterator[list[Listed]]:
        try:
            await self._check_medium()
            found = await asyncio.to_thread(lambda: sorted(self._scan(), key=lambda listed: listed.last_used))
        except OSError as error:
            raise self._translated(error, "list_keys") from error
        yield found

    async def close(self) -> None: ...

    async def _check_medium(self) -> None:
        """Raise `MediumError` if the folder is on another medium than when the backend was created.

        A removed folder counts as empty.
        """
        with contextlib.suppress(FileNotFoundError):
            await asyncio.to_thread(self._medium.check)

    def _translated(self, error: OSError, action: str, key: ChunkKey = b"") -> BackendError:
        kind = BackendUnavailable if isinstance(error, MediumError) else BackendError
        return kind(self.name, action, key.hex(), str(error))

    def _scan(self) -> Iterator[Listed]:
        for path in self.folder.glob(f"*{_SUFFIX}"):
            # It is no chunk's name, or somebody deletes the file.
            with contextlib.suppress(ValueError, FileNotFoundError):
                # The status of a link itself: its target may not exist.
                status = path.lstat()
                yield Listed(bytes.fromhex(path.stem), status.st_size, status.st_mtime)

    def _path(self, key: ChunkKey) -> Path:
        return self.folder / f"{key.hex()}{_SUFFIX}"


class WrapperBackend:
    """Forwards all calls to another backend, and has that backend's optional methods. A base class for your wrappers.

    Parameters
    ----------
    inner
        The backend that gets the calls.

    Notes
    -----
    To see every call, override `around`; to change a call, override its method. The wrapper has no locks.

    Examples
    --------
    >>> from lmkv.backends.adapters import NullBackend
    >>> class Printing(WrapperBackend):
    ...     def around(self, verb, call):
    ...         print(verb)
    ...         return call()
    >>> Printing(NullBackend()).contains([bytes(32)])
    contains
    [False]
    """

    def __init__(self, inner: Backend) -> None:
        self.inner = inner
        # On the instance, because `isinstance` looks for the attribute and not every inner backend has it.
        if isinstance(inner, ListsKeys):
            self.list_keys = lambda: self.around("list_keys", inner.list_keys)
        if isinstance(inner, SizesChunks):
            self.stored_bytes = inner.stored_bytes
        if isinstance(inner, SharesCapacity):
            self.reserve_bytes, self.release_bytes = inner.reserve_bytes, inner.release_bytes
            self.reclaim = lambda keys: self.around("reclaim", lambda: inner.reclaim(keys))
            self.list_all = lambda: self.around("list_all", inner.list_all)
        if isinstance(inner, RegistersMemory):
            self.register_memory = inner.register_memory
        if isinstance(inner, Shared):
            self.shared = inner.shared

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self.inner!r})"

    @property
    def name(self) -> str:
        return self.inner.name

    def around(self, verb: str, call: Callable[[], T]) -> T:
        """Forward one call: return `call()`. Every method except `close` uses `around`. `verb`: the name of the
        method.
        """
        return call()

    def contains(self, keys: Sequence[ChunkKey]) -> list[bool]:
        return self.around("contains", lambda: self.inner.contains(keys))

    def read(self, key: ChunkKey, into: memoryview) -> Read:
        return self.around("read", lambda: self.inner.read(key, into))

    def write(self, chunk: Chunk) -> Written:
        return self.around("write", lambda: self.inner.write(chunk))

    def delete(self, keys: Sequence[ChunkKey]) -> None:
        self.around("delete", lambda: self.inner.delete(keys))

    def close(self) -> None:
        self.inner.close()


@define(eq=False)
class NullBackend:
    """A backend that stores nothing: every write is REJECTED, and every read is a MISS.

    Parameters
    ----------
    name
        Name of the tier in logs and statistics.

    Raises
    ------
    ClosedError
        A method was called after `close`.

    Notes
    -----
    Thread-safe.

    Examples
    --------
    >>> from lmkv.protocols import Chunk
    >>> backend = NullBackend()
    >>> backend.write(Chunk(bytes(32), memoryview(b"payload"))).status
    <WriteStatus.REJECTED: 'rejected'>
    """

    name: str = "null"
    closed: bool = field(default=False, init=False)

    def contains(self, keys: Sequence[ChunkKey]) -> list[bool]:
        self._check_open()
        return [False] * len(keys)

    def read(self, key: ChunkKey, into: memoryview) -> Read:
        self._check_open()
        return MISS

    def write(self, chunk: Chunk) -> Written:
        self._check_open()
        return Written.rejected("a NullBackend stores nothing", None)

    def delete(self, keys: Sequence[ChunkKey]) -> None:
        self._check_open()

    def close(self) -> None:
        self.closed = True

    def _check_open(self) -> None:
        if self.closed:
            raise ClosedError(f"backend {self.name!r} is closed")
