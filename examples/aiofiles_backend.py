"""A working asynchronous backend in forty lines: one file a chunk, published at once, no checksums.

Use it as `AsyncAdapter(AiofilesBackend("/some/folder"))` wherever a `Backend` is wanted.
"""

from __future__ import annotations

import asyncio
import os
from collections.abc import Sequence
from pathlib import Path

import aiofiles
import aiofiles.os

from lmkv.errors import BackendError
from lmkv.outcomes import HIT, MISS, PRESENT, STORED, Read, Written
from lmkv.protocols import Chunk, ChunkKey


class AiofilesBackend:
    name = "aiofiles"

    def __init__(self, folder: str | os.PathLike[str]) -> None:
        self.folder = Path(folder)
        self.folder.mkdir(parents=True, exist_ok=True)

    async def contains(self, keys: Sequence[ChunkKey]) -> list[bool]:
        return [await aiofiles.os.path.exists(self._path(key)) for key in keys]

    async def read(self, items: Sequence[tuple[ChunkKey, memoryview]]) -> list[Read]:
        return await asyncio.gather(*(self._read(key, into) for key, into in items))

    async def write(self, chunks: Sequence[Chunk]) -> list[Written]:
        return await asyncio.gather(*map(self._write, chunks))

    async def delete(self, keys: Sequence[ChunkKey]) -> None:
        await asyncio.gather(*(asyncio.to_thread(self._path(key).unlink, missing_ok=True) for key in keys))

    async def close(self) -> None: ...

    async def _read(self, key: ChunkKey, into: memoryview) -> Read:
        try:
            async with aiofiles.open(self._path(key), "rb") as file:
                whole = os.fstat(file.fileno()).st_size == len(into) == await file.readinto(into)
        except FileNotFoundError:
            return MISS
        except OSError as error:
            return Read.failed(BackendError(self.name, "read", key.hex(), str(error)))
        return HIT if whole else Read.failed(BackendError(self.name, "read", key.hex(), "another length"))

    async def _write(self, chunk: Chunk) -> Written:
        unfinished = self.folder / f"{os.urandom(8).hex()}.tmp"
        try:
            async with aiofiles.open(unfinished, "xb") as file:
                await file.write(chunk.payload)
            await aiofiles.os.link(unfinished, self._path(chunk.key))
        except FileExistsError:
            return PRESENT
        except OSError as error:
            return Written.failed(BackendError(self.name, "write", chunk.key.hex(), str(error)))
        finally:
            await asyncio.to_thread(unfinished.unlink, missing_ok=True)
        return STORED

    def _path(self, key: ChunkKey) -> Path:
        return self.folder / key.hex()
