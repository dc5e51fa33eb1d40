"""`AsyncFileBackend`: one file per chunk, read and written with asyncio."""

from __future__ import annotations

import asyncio
import contextlib
import os
import secrets
from collections.abc import AsyncIterator, Iterator, Sequence
from pathlib import Path

import aiofiles
import aiofiles.os

from lmkv.errors import BackendError, BackendUnavailable
from lmkv.medium import Medium, MediumError
from lmkv.outcomes import HIT, MISS, PRESENT, STORED, Read, Written
from lmkv.protocols import Chunk, ChunkKey, Listed

_SUFFIX = ".chunk"


def _open_no_link(path: str, flags: int) -> int:
    return os.open(path, flags | os.O_NOFOLLOW | os.O_NONBLOCK)


class AsyncFileBackend:
    """The reference for backends that are written as coroutines; `AsyncAdapter` makes a `Backend` of it.

    To serve a model from a disk take `LocalDiskBackend`: it verifies checksums, avoids the page cache, shares
    its capacity with other processes, and removes the temporary files of processes that were killed.

    Parameters
    ----------
    folder
        Where the files are; created where missing, for its user only. Its file system needs hard links.

    Raises
    ------
    OSError
        When the folder cannot be created.

    Notes
    -----
    A file gets its name when it is complete and on the medium, and never changes afterwards. A file of
    another length than the buffer is FAILED; bytes that changed on the medium are not detected. Links are not
    followed, but the folder's owner is not checked.

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
            async with aiofiles.open(self._path(key), "rb", opener=_open_no_link) as file:
                whole = os.fstat(file.fileno()).st_size == len(into) == await file.readinto(into)
        except FileNotFoundError:
            return MISS
        except OSError as error:
            return Read.failed(self._translated(error, "read", key))
        return HIT if whole else Read.failed(BackendError(self.name, "read", key.hex(), "another length"))

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
        """Raise `MediumError` on another medium than at first. A folder that was removed has no chunks."""
        with contextlib.suppress(FileNotFoundError):
            await asyncio.to_thread(self._medium.check)

    def _translated(self, error: OSError, action: str, key: ChunkKey = b"") -> BackendError:
        kind = BackendUnavailable if isinstance(error, MediumError) else BackendError
        return kind(self.name, action, key.hex(), str(error))

    def _scan(self) -> Iterator[Listed]:
        for path in self.folder.glob(f"*{_SUFFIX}"):
            # Not a chunk's name, or a file that was deleted meanwhile.
            with contextlib.suppress(ValueError, FileNotFoundError):
                status = path.stat()
                yield Listed(bytes.fromhex(path.stem), status.st_size, status.st_mtime)

    def _path(self, key: ChunkKey) -> Path:
        return self.folder / f"{key.hex()}{_SUFFIX}"
