"""`LocalDiskBackend`: one immutable file a chunk, verified before it is used, whatever crashed before."""

from __future__ import annotations

import errno
import os
import stat
import time
from collections.abc import Iterator, Sequence
from itertools import chain, islice
from typing import Literal

from attrs import define, field, validators

from lmkv.backends.disk.chunkfile import ChunkFiles, WrongLengthError
from lmkv.backends.disk.fileio import FreeSpace, ShortReadError, probe_direct, sync_folder
from lmkv.backends.disk.folder import ChunkFolder
from lmkv.backends.disk.usage import NAME, Usage
from lmkv.chunks import codec
from lmkv.chunks.codec import FormatError
from lmkv.chunks.hashing import KEY_BYTES
from lmkv.errors import (
    BackendError,
    BackendUnavailable,
    ClosedError,
    ConfigError,
    CorruptChunkError,
    NoSpaceError,
    UsageError,
)
from lmkv.outcomes import HIT, MISS, PRESENT, STORED, Read, Written
from lmkv.protocols import Chunk, ChunkKey, Clock, Listed

LIST_BATCH = 1024
_REFUSED = {errno.ENOSPC, errno.EDQUOT, errno.EROFS, errno.EFBIG}
_AWAY = {
    errno.EACCES,
    errno.EPERM,
    errno.EIO,
    errno.ENOENT,
    errno.ENOTDIR,
    errno.ENODEV,
    errno.ENXIO,
    errno.ESTALE,
}


def _absolute(path: str | os.PathLike[str]) -> str:
    return os.path.abspath(os.fspath(path))


@define(eq=False)
class LocalDiskBackend:
    """Chunks as files under `path`, in a folder of their namespace, as docs/format.md specifies.

    `sync`: what a chunk survives once `write` said STORED. A cache needs integrity always and durability by
    choice, and integrity does not depend on this: checksums turn whatever a crash left behind into a miss.
    `"none"`, the default, survives any death of the process (the kernel has the bytes) but not of the
    machine: a power cut loses the last seconds of a cache, and they are recomputed, while syncing each chunk
    would cost up to half of the disk's speed on every store. `"data"` makes the bytes durable before they get
    their name, `"full"` the name as well.

    `direct`: O_DIRECT, which spares the page cache a second copy of what the memory tier holds. `"auto"` uses
    it where a probe of `path` works, `"on"` insists (`ConfigError`), `"off"` uses the page cache. Memory that
    is not page-aligned always goes through the page cache. `direct_io` says what is in use.

    `min_free`: bytes of the file system left to others; a chunk that would take them is REJECTED.
    `chunk_tokens`: room for token ids in a header; longer lists are not recorded. `shared`: whether other
    processes' chunks are to be looked for too; several may use one folder safely either way.
    `keep_corrupt`: bad files kept for inspection under `quarantine/`, on top of the tier's capacity.

    Raises on construction: `ConfigError`, and `BackendUnavailable` when `path` cannot be made. Afterwards a
    medium that fails is a value per key, and the next call tries again, so the backend works as soon as the
    medium does. The exceptions are `delete` and `list_keys`, which have no such values: they raise a
    `BackendError` once they have done what they could.

    Locks: none but the one inside `FreeSpace`; every verb may run in any number of threads.
    """

    path: str = field(converter=_absolute)
    namespace: bytes = field(repr=bytes.hex)
    sync: Literal["none", "data", "full"] = field(default="none", kw_only=True)
    direct: Literal["auto", "on", "off"] = field(default="auto", kw_only=True)
    min_free: int = field(default=0, kw_only=True, validator=validators.ge(0))
    segment_bytes: int = field(default=codec.DEFAULT_SEGMENT_BYTES, kw_only=True)
    chunk_tokens: int = field(default=512, kw_only=True, validator=validators.ge(0))
    keep_corrupt: int = field(default=0, kw_only=True, validator=validators.ge(0))
    shared: bool = field(default=False, kw_only=True)
    name: str = field(default="disk", kw_only=True)
    clock: Clock = field(default=time.monotonic, kw_only=True, repr=False)
    _folder: ChunkFolder = field(init=False, repr=False)
    _files: ChunkFiles = field(init=False, repr=False)
    _space: FreeSpace = field(init=False, repr=False)
    _usage: Usage = field(init=False, repr=False)
    _closed: bool = field(default=False, init=False)

    def __attrs_post_init__(self) -> None:
        _check_settings(self)
        self._folder = ChunkFolder(self.path, self.namespace, self.keep_corrupt)
        direct = self._prepare_folder()
        self._files = ChunkFiles(self.namespace, self.segment_bytes, self.chunk_tokens, self.sync, direct)
        self._space = FreeSpace(self.path, self.min_free, self.clock)
        self._usage = Usage(os.path.join(self.path, NAME))

    @property
    def direct_io(self) -> bool:
        """Whether page-aligned memory is read and written past the page cache."""
        return self._files.direct

    def stored_bytes(self, payload_bytes: int) -> int:
        """Exact size of the file of such a payload."""
        return self._files.file_bytes(payload_bytes)

    def contains(self, keys: Sequence[ChunkKey]) -> list[bool]:
        """Whether a file of plausible size is there. Its bytes are verified when they are read."""
        self._check_keys(keys)
        return [self._is_there(self._folder.path_of(key)) for key in keys]

    def read(self, items: Sequence[tuple[ChunkKey, memoryview]]) -> list[Read]:
        self._check_keys([key for key, _ in items])
        return [self._read(key, into.cast("B")) for key, into in items]

    def write(self, chunks: Sequence[Chunk]) -> list[Written]:
        self._check_keys([chunk.key for chunk in chunks])
        for chunk in chunks:
            _check_chunk(chunk)
        return [self._write(chunk) for chunk in chunks]

    def delete(self, keys: Sequence[ChunkKey]) -> None:
        """Remove the files; then raise `BackendError` for the first that the medium would not let go of."""
        self._check_keys(keys)
        self.reclaim(keys)

    def reclaim(self, keys: Sequence[ChunkKey]) -> int:
        """The same for keys of other namespaces, too, which begin with that; returns the bytes it freed."""
        self._check_open()
        freed, failed = 0, []
        for key in keys:
            try:
                freed += self._unlink(self._folder.path_of(key))
            except OSError as error:
                failed.append(self._translated(error, "delete", key))
        if failed:
            raise failed[0]
        return freed

    def _unlink(self, path: str) -> int:
        """Remove a file; returns the bytes that this freed. Raises `OSError` unless it is gone.

        It is uncounted first: a listing that ends in between then counts it once more than there is, and not
        once less, as if it were subtracted twice.
        """
        try:
            nbytes = os.lstat(path).st_size
        except (FileNotFoundError, NotADirectoryError):
            return 0
        self._usage.release_bytes(nbytes)
        try:
            os.unlink(path)
        except OSError as error:
            self._usage.release_bytes(-nbytes)
            if isinstance(error, FileNotFoundError | NotADirectoryError):
                return 0
            raise
        return nbytes

    def reserve_bytes(self, nbytes: int) -> int:
        """Count bytes that are about to be written; returns what all processes have below the root."""
        return self._usage.reserve_bytes(nbytes)

    def release_bytes(self, nbytes: int) -> None:
        """They were not written."""
        self._usage.release_bytes(nbytes)

    def list_keys(self) -> Iterator[list[Listed]]:
        """What is there, least recently used first (to the minute), by names and sizes alone.

        Files of impossible size are quarantined and dead writers' temporaries deleted. Raises `BackendError`.
        """
        self._check_open()
        return self._listing(self._folder.scan())

    def list_all(self) -> Iterator[list[Listed]]:
        """The same of all namespaces below the root. Sets the count of bytes right that `claim` keeps."""
        self._check_open()
        return self._listing(self._count_all())

    def close(self) -> None:
        self._closed = True

    def _listing(self, scan: Iterator[Listed]) -> Iterator[list[Listed]]:
        try:
            found = iter(sorted(scan, key=_oldest_use))
        except OSError as error:
            raise self._translated(error, "list_keys") from error
        while batch := list(islice(found, LIST_BATCH)):
            yield batch

    def _count_all(self) -> Iterator[Listed]:
        reserved, used = self._usage.reserved(), 0
        for found in chain(self._folder.scan(), self._folder.scan_others()):
            used += found.nbytes
            yield found
        self._usage.set(used, reserved)

    def _read(self, key: ChunkKey, into: memoryview) -> Read:
        """Read one chunk; what goes wrong with it becomes a value, and a bad file is set aside."""
        path = self._folder.path_of(key)
        try:
            self._files.read(path, key, into)
        except (FileNotFoundError, NotADirectoryError):
            return MISS
        except WrongLengthError as error:
            return Read.failed(BackendError(self.name, "read", key.hex(), str(error)))
        except (FormatError, ShortReadError, OSError) as error:
            if not _is_damage(error, path):
                return Read.failed(self._translated(error, "read", key))
            self._folder.quarantine(path)
            return Read.failed(CorruptChunkError(self.name, "read", key.hex(), str(error)))
        return HIT

    def _write(self, chunk: Chunk) -> Written:
        path = self._folder.path_of(chunk.key)
        try:
            if self._is_stored(chunk, path):
                return PRESENT
            if not self._space.take(self.stored_bytes(len(chunk.payload))):
                return Written.rejected("min_free")
            self._store(chunk, path)
        except FileExistsError:
            return PRESENT
        except OSError as error:
            return Written.failed(self._translated(error, "write", chunk.key))
        return STORED

    def _is_stored(self, chunk: Chunk, path: str) -> bool:
        """Whether a sound header of this chunk is there. Anything else at its place is set aside.

        A key's chunk has one length only, so a file of another one would fail its readers for ever.
        """
        try:
            if self._files.header(path, chunk.key).payload_bytes == len(chunk.payload):
                return True
        except FileNotFoundError:
            return False
        except (FormatError, ShortReadError, OSError) as error:
            if not _is_damage(error, path):
                raise
        self._folder.quarantine(path)
        return False

    def _store(self, chunk: Chunk, path: str) -> None:
        """Write the file, making its folder if need be.

        Twice anew, because two things may be missing: the folder, and then the temporary file, when another
        process swept it in the moment between its making and its locking.
        """
        for _ in range(2):
            try:
                return self._files.write(chunk, path)
            except FileNotFoundError:
                self._make_folder(os.path.dirname(path))
        return self._files.write(chunk, path)

    def _make_folder(self, folder: str) -> None:
        self._folder.make(folder)
        if self.sync == "full":
            sync_folder(self.path)
            sync_folder(self._folder.path)

    def _is_there(self, path: str) -> bool:
        try:
            return codec.plausible_file_bytes(os.lstat(path).st_size)
        except OSError:
            return False

    def _prepare_folder(self) -> bool:
        """Make the folders and say whether to use O_DIRECT there."""
        try:
            os.makedirs(self.path, 0o700, exist_ok=True)
            self._folder.make()
        except OSError as error:
            if not os.path.isdir(self.path):
                raise self._translated(error, "open") from error
        direct = self.direct != "off" and probe_direct(self._folder.path)
        if self.direct == "on" and not direct:
            raise ConfigError(f"direct='on', but O_DIRECT does not work in {self._folder.path}")
        return direct

    def _translated(self, error: Exception, action: str, key: ChunkKey = b"") -> BackendError:
        """The one place where errors of the operating system become lmkv's."""
        code = error.errno if isinstance(error, OSError) else None
        kind = NoSpaceError if code in _REFUSED else BackendUnavailable if code in _AWAY else BackendError
        translated = kind(self.name, action, key.hex(), str(error))
        translated.__cause__ = error
        return translated

    def _check_open(self) -> None:
        if self._closed:
            raise ClosedError(f"backend {self.name!r} is closed")

    def _check_keys(self, keys: Sequence[ChunkKey]) -> None:
        self._check_open()
        for key in keys:
            if len(key) != KEY_BYTES:
                raise UsageError(f"a key of {len(key)} bytes instead of {KEY_BYTES}")


def _oldest_use(found: Listed) -> tuple[float, float]:
    """Within a minute the other way round: a chain is written and read head first, and its head goes last."""
    return found.last_used // 60, -found.last_used


def _is_damage(error: Exception, path: str) -> bool:
    """Whether the file itself is at fault, rather than the medium as a whole or the caller.

    EIO counts: it is a bad sector, or a mismatch of the file system's own checksum, and a chunk that stayed
    would be in the way of its next store for ever.
    """
    if not isinstance(error, OSError) or error.errno == errno.EIO:
        return True
    try:
        return not stat.S_ISREG(os.lstat(path).st_mode)
    except OSError:
        return False


def _check_chunk(chunk: Chunk) -> None:
    if not len(chunk.payload) or chunk.payload.ndim != 1 or chunk.payload.itemsize != 1:
        raise UsageError("a payload is a flat view of at least one byte")
    if len(chunk.parent) not in (0, KEY_BYTES) or len(chunk.tokens) % 4:
        raise UsageError("a parent is a key or empty, tokens are uint32")


def _check_settings(backend: LocalDiskBackend) -> None:
    if len(backend.namespace) != KEY_BYTES:
        raise ConfigError(f"a namespace of {len(backend.namespace)} bytes instead of {KEY_BYTES}")
    if backend.sync not in ("none", "data", "full"):
        raise ConfigError(f"sync={backend.sync!r} is none of 'none', 'data', 'full'")
    if backend.direct not in ("auto", "on", "off"):
        raise ConfigError(f"direct={backend.direct!r} is none of 'auto', 'on', 'off'")
    if (
        backend.segment_bytes % codec.PAGE
        or not codec.PAGE <= backend.segment_bytes <= codec.MAX_SEGMENT_BYTES
    ):
        raise ConfigError(f"segment_bytes={backend.segment_bytes} is not 1 to 4096 pages of 4096 bytes")
