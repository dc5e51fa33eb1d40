"""`LocalDiskBackend`: stores each chunk in an immutable file, and verifies checksums when it reads the file."""

from __future__ import annotations

import contextlib
import logging
import os
import stat
import time
from collections import defaultdict
from collections.abc import Iterator, Sequence
from errno import EDQUOT, EFBIG, ENOSPC, EROFS
from itertools import chain, islice
from operator import attrgetter
from typing import Literal

from attrs import define, field, validators

from lmkv.backends.disk.chunkfile import ChunkFiles, WrongLengthError
from lmkv.backends.disk.fileio import Folder, FreeSpace, ShortReadError, probe_direct
from lmkv.backends.disk.folder import ChunkFolder, Usage
from lmkv.backends.disk.root import NotTrustedError, Root
from lmkv.chunks import codec
from lmkv.chunks.codec import ChunkFormat, FormatError
from lmkv.chunks.hashing import KEY_BYTES
from lmkv.chunks.namespace import Authenticator
from lmkv.errors import (
    BackendError,
    BackendUnavailable,
    ClosedError,
    ConfigError,
    CorruptChunkError,
    NoSpaceError,
    UsageError,
)
from lmkv.protocols import HIT, MISS, PRESENT, STORED, Chunk, ChunkKey, Clock, Listed, Read, Written

logger = logging.getLogger(__name__)

LIST_BATCH = 1024
_PAUSE_AFTER, _PAUSE = 64, 5e-5
"""Number of files after which a listing pauses, and seconds of the pause, so that other threads may run."""
_REFUSED = {ENOSPC, EDQUOT, EROFS, EFBIG}
_MAX_UNREADABLE = 4096


def _absolute(path: str | os.PathLike[str]) -> str:
    return os.path.abspath(os.fspath(path))


@define(eq=False, repr=False)
class LocalDiskBackend:
    """Stores chunks as files below `path`, in one folder per namespace: docs/development/format.md has the format.

    Parameters
    ----------
    path
        The root folder; a missing folder is created. Several processes and namespaces may share the root folder.
    namespace
        `Namespace.digest`, 32 bytes. Chunks of other namespaces are never served.
    sync
        "none": a chunk survives the end of the process, but perhaps not a power failure. Writing is up to twice as fast
        as with "data". "data": the bytes of a chunk are on the medium before the chunk's file gets its name. "full":
        before `write` returns, the file's name is on the medium as well. Checksums detect damage in any case.
    direct
        Whether to use O_DIRECT, which bypasses the page cache: "auto" if the file system supports it, "on" always,
        "off" never. Memory that is not aligned to pages always goes through the page cache. The property `direct_io` is
        True if O_DIRECT is in use.
    min_free
        Bytes of the file system to leave free. If fewer bytes would remain free after a write, the write returns
        REJECTED.
    segment_bytes
        Bytes of payload for each checksum: a multiple of 4096, at most 16 MiB.
    chunk_tokens
        Largest number of token ids that a file records in its header; a longer list is not recorded.
    shared
        Whether the store lists the folder repeatedly, to find chunks of other processes.
    authentication_key
        A secret of 32 random bytes or more. lmkv then serves only chunks that were written with this secret, even if
        others write to the folder. Use a separate namespace for each secret: chunks of another secret count as damaged.
    name
        Name of the tier in logs and statistics.
    clock
        A function that returns monotonic seconds.

    Raises
    ------
    ConfigError
        An argument is invalid, `authentication_key` is too short, or `direct="on"` does not work below `path`.
    BackendUnavailable
        `path` cannot be created, or another user may have created this folder (docs/security.md).

    Notes
    -----
    Thread-safe. If the medium fails, `read` and `write` return the failure. `contains`, `delete`, `reclaim` and the
    listings raise a `BackendError`; `delete` and `reclaim` try all keys first. Each call tries the medium again, even
    after failures. Only a file with wrong bytes is removed. A file that cannot be read is replaced when the same chunk
    is written again.

    Examples
    --------
    >>> import tempfile
    >>> chunk = Chunk(bytes(32), memoryview(b"payload"))
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     first = LocalDiskBackend(folder, namespace=bytes(32))
    ...     first.write(chunk).status
    ...     first.close()
    ...     again = LocalDiskBackend(folder, namespace=bytes(32))
    ...     [[listed.nbytes for listed in batch] for batch in again.list_keys()]
    <WriteStatus.STORED: 'stored'>
    [[8192]]
    """

    path: str = field(converter=_absolute)
    namespace: bytes
    sync: Literal["none", "data", "full"] = field(default="none", kw_only=True)
    direct: Literal["auto", "on", "off"] = field(default="auto", kw_only=True)
    min_free: int = field(default=0, kw_only=True, validator=validators.ge(0))
    segment_bytes: int = field(default=codec.DEFAULT_SEGMENT_BYTES, kw_only=True)
    chunk_tokens: int = field(default=codec.DEFAULT_MAX_TOKENS, kw_only=True, validator=validators.ge(0))
    shared: bool = field(default=False, kw_only=True)
    authentication_key: bytes | None = field(default=None, kw_only=True)
    name: str = field(default="disk", kw_only=True)
    clock: Clock = field(default=time.monotonic, kw_only=True)
    _folder: ChunkFolder = field(init=False)
    _files: ChunkFiles = field(init=False)
    _space: FreeSpace = field(init=False)
    _usage: Usage = field(init=False)
    _unreadable: set[ChunkKey] = field(factory=set, init=False)
    _closed: bool = field(default=False, init=False)

    def __attrs_post_init__(self) -> None:
        check_settings(self.namespace, self.sync, self.direct, self.segment_bytes)
        root = self._prepare_root()
        self._folder = ChunkFolder(root, self.namespace)
        direct = self._prepare_folder()
        authenticator = Authenticator.of(self.authentication_key)
        chunk_format = ChunkFormat(self.namespace, self.segment_bytes, self.chunk_tokens, authenticator)
        self._files = ChunkFiles(chunk_format, self.sync, direct)
        self._space = FreeSpace(self.path, self.min_free, self.clock)
        self._usage = Usage(root)

    def __repr__(self) -> str:
        return f"<LocalDiskBackend {self.name!r}: {self._folder.path}, direct_io={self.direct_io}>"

    @property
    def direct_io(self) -> bool:
        """Whether reads and writes of page-aligned memory bypass the page cache."""
        return self._files.direct

    def stored_bytes(self, payload_bytes: int) -> int:
        """Return the size in bytes of the file for a payload of `payload_bytes` bytes."""
        return self._files.file_bytes(payload_bytes)

    def contains(self, keys: Sequence[ChunkKey]) -> list[bool]:
        """Return, for each key, whether a file with a plausible size exists. Only `read` verifies the bytes of a
        file.
        """
        self._check_keys(keys)
        try:
            with self._folder.entered() as folder:
                return [self._is_there(folder, key) for key in keys]
        except (FileNotFoundError, NotADirectoryError):
            return [False] * len(keys)
        except OSError as error:
            raise self._translated(error, "contains") from error

    def read(self, key: ChunkKey, into: memoryview) -> Read:
        """Read a chunk's payload into the buffer `into`. Returns a failure as a value, and removes a damaged file."""
        self._check_keys([key])
        try:
            with self._folder.place_of(key) as (folder, name):
                return self._read_in(folder, name, key, into.cast("B"))
        except (FileNotFoundError, NotADirectoryError):
            return MISS
        except OSError as error:
            if len(self._unreadable) < _MAX_UNREADABLE:
                self._unreadable.add(key)
            return Read.failed(self._translated(error, "read", key))

    def write(self, chunk: Chunk) -> Written:
        self._check_keys([chunk.key])
        chunk.check()
        try:
            # Two retries, for two absent things: the folder, and the temporary file, which another process deletes as
            # stale if it finds it before it is locked.
            for _ in range(2):
                with contextlib.suppress(FileNotFoundError):
                    return self._write_once(chunk)
                self._make_place_of(chunk.key)
            return self._write_once(chunk)
        except FileExistsError:
            return PRESENT
        except OSError as error:
            return Written.failed(self._translated(error, "write", chunk.key))

    def delete(self, keys: Sequence[ChunkKey]) -> None:
        """Remove the files of the chunks `keys`.

        If a file cannot be removed, the others are removed first; then `BackendError` is raised.
        """
        self._check_keys(keys)
        self.reclaim(keys)

    def reclaim(self, keys: Sequence[ChunkKey]) -> int:
        """Delete chunks of any namespace, and return the number of freed bytes. May raise `BackendError`.

        A key of another namespace consists of the namespace's digest and the chunk's key.
        """
        self._check_open()
        freed, failed = 0, []
        for key in keys:
            try:
                with self._folder.place_of(key) as (folder, name):
                    freed += self._unlink(folder, name)
            except (FileNotFoundError, NotADirectoryError):
                pass
            except OSError as error:
                failed.append(self._translated(error, "delete", key))
        if failed:
            raise failed[0]
        return freed

    def _unlink(self, folder: Folder, name: str) -> int:
        """Remove a file, and return the number of freed bytes. Raises `OSError`, for example if the file is missing."""
        nbytes = folder.stat(name).st_size
        # Before the removal. A listing that sets the count in between still counts the file: too much until
        # the next one. The other way round the file would be subtracted twice, and the count be too low.
        self._usage.subtract(nbytes)
        try:
            folder.unlink(name)
        except OSError:
            # Another process may have removed it, and its bytes, first.
            self._usage.subtract(-nbytes)
            raise
        self._space.give_back(nbytes)
        return nbytes

    def reserve_bytes(self, nbytes: int) -> int:
        """Count `nbytes` bytes that the caller is about to write. Returns the bytes that all processes use below the
        root folder, including `nbytes`.
        """
        return self._usage.reserve_bytes(nbytes)

    def release_bytes(self, nbytes: int) -> None:
        """Subtract `nbytes` bytes that `reserve_bytes` has counted and that were not written."""
        self._usage.release_bytes(nbytes)

    def list_keys(self) -> Iterator[list[Listed]]:
        """Yield the chunks of this namespace in batches, least recently used first, without opening files.

        Times of use are exact to a minute. The listing also removes stale temporary files and files with impossible
        sizes. Raises `BackendError`.
        """
        self._check_open()
        return self._listing(self._folder.scan())

    def list_all(self) -> Iterator[list[Listed]]:
        """Yield the chunks of all namespaces below the root, as `list_keys` does. Raises `BackendError`.

        At the end, the byte count of `reserve_bytes` is set to the sum of the listed sizes, plus the bytes that the
        listing may have missed.
        """
        self._check_open()
        return self._listing(self._count_all())

    def close(self) -> None:
        self._closed = True
        self._usage.close()

    def _listing(self, scan: Iterator[Listed]) -> Iterator[list[Listed]]:
        minutes: defaultdict[float, list[Listed]] = defaultdict(list)
        try:
            for number, each in enumerate(scan):
                minutes[each.last_used // 60].append(each)
                if number % _PAUSE_AFTER == 0:
                    time.sleep(_PAUSE)
        except OSError as error:
            raise self._translated(error, "list_keys") from error
        # Sorting a million at once would hold the GIL for a second. Within a minute the latest use comes first, so a
        # chain's tail is evicted before its head.
        ordered = (sorted(minutes[minute], key=attrgetter("last_used"), reverse=True) for minute in sorted(minutes))
        found = chain.from_iterable(ordered)
        while batch := list(islice(found, LIST_BATCH)):
            yield batch

    def _count_all(self) -> Iterator[Listed]:
        since, used = self._usage.listed_from(), 0
        for found in chain(self._folder.scan(), self._folder.scan_others()):
            used += found.nbytes
            yield found
        self._usage.set(used, since)

    def _read_in(self, folder: Folder, name: str, key: ChunkKey, into: memoryview) -> Read:
        try:
            self._files.read(folder, name, key, into)
        except WrongLengthError as error:
            return Read.failed(BackendError(self.name, "read", key.hex(), str(error)))
        except (FormatError, ShortReadError, OSError) as error:
            if not _is_damage(error, folder, name):
                raise
            with contextlib.suppress(OSError):
                self._folder.discard(folder, name)
            return Read.failed(CorruptChunkError(self.name, "read", key.hex(), str(error)))
        self._unreadable.discard(key)
        return HIT

    def _write_once(self, chunk: Chunk) -> Written:
        with self._folder.place_of(chunk.key) as (folder, name):
            replaced = self._bytes_to_replace(chunk, folder, name)
            if replaced is None:
                return PRESENT
            nbytes = self.stored_bytes(len(chunk.payload))
            if lacking := self._space.claim(nbytes):
                return Written.rejected(f"less than disk_min_free is free: {lacking:,} bytes are missing", lacking)
            self._files.write(chunk, folder, name, replace=replaced > 0)
        self._unreadable.discard(chunk.key)
        self._usage.wrote(nbytes)
        if replaced:
            self._usage.subtract(replaced)
        return STORED

    def _bytes_to_replace(self, chunk: Chunk, folder: Folder, name: str) -> int | None:
        """Return None if the chunk is stored, 0 if it has no file, or the size of its file if the file cannot be read.

        A file with another chunk, another length or damage is removed first, because each read of the file would fail.
        """
        try:
            stored = self._files.header(folder, name, chunk.key).payload_bytes == len(chunk.payload)
            if stored and chunk.key not in self._unreadable:
                return None
        except FileNotFoundError:
            return 0
        except (FormatError, ShortReadError, OSError) as error:
            stored = not _is_damage(error, folder, name)
        if stored:
            return folder.stat(name).st_size
        self._folder.discard(folder, name)
        return 0

    def _make_place_of(self, key: ChunkKey) -> None:
        self._folder.make_place_of(key)
        if self.sync == "full":
            with self._folder.root.entered() as root, self._folder.entered() as folder:
                root.sync()
                folder.sync()

    def _is_there(self, folder: Folder, key: ChunkKey) -> bool:
        try:
            # One stat of a path of two names: it may follow a link in place of the inner folder, but reads nothing.
            return codec.plausible_file_bytes(folder.stat(self._folder.name_of(key)).st_size)
        except (FileNotFoundError, NotADirectoryError):
            return False

    def _prepare_root(self) -> Root:
        """Create the root folder. Raises `BackendUnavailable` if other users may have created the folder."""
        try:
            return Root.made(self.path)
        except NotTrustedError as error:
            raise BackendUnavailable(self.name, "open", reason=str(error)) from error
        except OSError as error:
            if isinstance(error, FileExistsError | NotADirectoryError) and not os.path.isdir(self.path):
                reason = f"a file is in the way of folder {self.path}: remove the file, or name another folder"
                raise BackendUnavailable(self.name, "open", reason=reason) from error
            raise self._translated(error, "open") from error

    def _prepare_folder(self) -> bool:
        """Create the namespace's folder if possible. Returns whether to use O_DIRECT; raises ConfigError if "on" does
        not work.
        """
        try:
            self._folder.make()
            with self._folder.entered() as folder:
                direct = self.direct != "off" and probe_direct(folder)
        except OSError as error:
            logger.warning("lmkv: tier %r cannot use %s: %s; lmkv will try again", self.name, self._folder.path, error)
            direct = False
        if self.direct == "on" and not direct:
            raise ConfigError(f"disk_direct is on, but {self._folder.path} has no O_DIRECT: set disk_direct to auto")
        return direct

    def _translated(self, error: OSError, action: str, key: ChunkKey = b"") -> BackendError:
        """Return an error of the operating system as a `BackendError`."""
        kind = NoSpaceError if getattr(error, "errno", None) in _REFUSED else BackendUnavailable
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
                raise UsageError(f"a chunk key must have {KEY_BYTES} bytes, not {len(key)}")


def _is_damage(error: Exception, folder: Folder, name: str) -> bool:
    """Return whether an error shows that a file is damaged or not a regular file. Other errors may be temporary."""
    if not isinstance(error, OSError):
        return True
    try:
        return not stat.S_ISREG(folder.stat(name).st_mode)
    except OSError:
        return False


def check_settings(namespace: bytes, sync: str, direct: str, segment_bytes: int) -> None:
    """Raise ConfigError if one of the arguments is invalid."""
    if len(namespace) != KEY_BYTES:
        raise ConfigError(f"namespace must have {KEY_BYTES} bytes, not {len(namespace)}")
    if sync not in ("none", "data", "full"):
        raise ConfigError(f"sync must be 'none', 'data' or 'full', not {sync!r}")
    if direct not in ("auto", "on", "off"):
        raise ConfigError(f"direct must be 'auto', 'on' or 'off', not {direct!r}")
    if segment_bytes % codec.PAGE or not codec.PAGE <= segment_bytes <= codec.MAX_SEGMENT_BYTES:
        raise ConfigError(f"segment_bytes must be a multiple of 4096 up to 16777216, not {segment_bytes}")


def clear_namespace(root: str, digest: bytes) -> int:
    """Delete all chunks of a namespace, and return the number of deleted chunks. Raises BackendError.

    Running engines no longer find the deleted chunks.
    """
    backend = LocalDiskBackend(root, digest, direct="off")
    try:
        chunks = [chunk.key for batch in backend.list_keys() for chunk in batch]
        backend.reclaim(chunks)
    finally:
        backend.close()
    return len(chunks)
