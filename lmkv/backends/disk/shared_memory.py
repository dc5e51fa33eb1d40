"""`SharedMemoryBackend`: chunks as files in memory, which other processes of the host read where they are."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import ExitStack
from functools import cache, partial
from typing import Literal

from attrs import define, field

from lmkv.backends.disk.backend import LocalDiskBackend
from lmkv.backends.disk.fileio import OpenFiles
from lmkv.backends.disk.root import Root
from lmkv.outcomes import Read, ReadStatus
from lmkv.protocols import ChunkKey, Place


@define(eq=False, repr=False)
class SharedMemoryBackend(LocalDiskBackend):
    """`LocalDiskBackend` on a tmpfs, with its parameters, errors and locks. It needs neither O_DIRECT nor syncs.

    Examples
    --------
    >>> import tempfile
    >>> from lmkv.protocols import Chunk
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     backend = SharedMemoryBackend(folder, bytes(32))
    ...     written = backend.write(Chunk(bytes(32), memoryview(b"payload")))
    ...     parts = bytearray(3), bytearray(4)
    ...     reader = SharedMemoryBackend.at(backend.place)
    ...     (read,) = reader.read_scattered([(bytes(32), [*map(memoryview, parts)])])
    >>> read.status, parts
    (<ReadStatus.HIT: 'hit'>, (bytearray(b'pay'), bytearray(b'load')))
    """

    direct: Literal["auto", "on", "off"] = field(default="off", kw_only=True)
    shared: bool = field(default=True, kw_only=True)
    name: str = field(default="shared_memory", kw_only=True)
    in_memory: bool = field(default=True, init=False)
    """False where the folder turned out to be on a disk, which its readers would wait for."""

    @classmethod
    def at(cls, place: Place) -> SharedMemoryBackend:
        """The chunks at `place`, for a process that only reads them. Raises `OSError` when there is no such folder."""
        Root.checked(place.path)
        return cls(place.path, place.namespace)

    @property
    def place(self) -> Place | None:
        """Where other processes read the chunks; None with an authentication key, which they do not have."""
        readable = self.in_memory and not self.authentication_key
        return Place(self.path, self.namespace) if readable else None

    def read_scattered(self, wanted: Sequence[tuple[ChunkKey, Sequence[memoryview]]]) -> list[Read]:
        """Read chunks, each into pieces of memory that are together as long as its payload. Verifies checksums alone.

        Ends with the first that fails. All files are opened before the first is read, so at most some dozens.
        """
        self._check_keys([key for key, _ in wanted])
        found, opened = list[Read](), list[Callable[[], Read]]()

        def open_next(key: ChunkKey, into: Sequence[memoryview]) -> Read:
            folder, name = self._folder.place_in(namespace(), key, files)

            def begin() -> None:
                read = self._files.opened(folder, name, key, into, files)
                opened.append(partial(self._read_in, folder, name, key, read))

            return self._read_in(folder, name, key, begin)

        with ExitStack() as stack, OpenFiles() as files:
            namespace = cache(lambda: stack.enter_context(self._folder.entered()))
            for key, into in wanted:
                found.append(self._tried(key, partial(open_next, key, into)))
                if found[-1].status is not ReadStatus.HIT:
                    break
            for number, (read, (key, _)) in enumerate(zip(opened, wanted, strict=False)):
                found[number] = self._tried(key, read)
                if found[number].status is not ReadStatus.HIT:
                    return found[: number + 1]
        return found
