"""Manages the namespace folders below a root folder, their descriptions, and the count of all bytes below the root.

This module does not read or write payloads. Any number of threads and processes may use a folder at the same time. A
file that another process has just removed counts as absent.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import json
import os
import secrets
import stat
import struct
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from attrs import asdict, define, evolve, field, frozen

from lmkv.backends.disk.fileio import TEMPORARY_SUFFIX, Folder, OwnFile, is_abandoned, publish, temporary, write_fully
from lmkv.backends.disk.root import Root, warn_once
from lmkv.chunks import codec
from lmkv.chunks.hashing import KEY_BYTES
from lmkv.chunks.namespace import Namespace
from lmkv.errors import UsageError
from lmkv.protocols import ChunkKey, Listed

SUFFIX = f".kv{codec.VERSION}"
QUARANTINE = "quarantine"
_NAME_LENGTH = 2 * KEY_BYTES + len(SUFFIX)


@frozen
class ChunkFolder:
    """The files of a namespace: `<root>/<namespace>/<first byte of the key>/<key>.kv1`, in lower-case hexadecimal.

    Names consist of digests, which can neither collide nor point outside the folder. The operator owns the root: if
    somebody removes the root, lmkv does not create it again. lmkv owns everything below the root. The files are open
    only to the process's user and, if `Folder.for_group` is true, to the root's group.
    """

    root: Root
    namespace: bytes = field(repr=bytes.hex)

    @property
    def path(self) -> str:
        return os.path.join(self.root.path, self.namespace.hex())

    def path_of(self, key: ChunkKey) -> str:
        """Return the path of a chunk's file, for messages. A key of more than 32 bytes belongs to another namespace."""
        return os.path.join(self.root.path, *self._names_of(key))

    def _names_of(self, key: ChunkKey) -> tuple[str, str, str]:
        namespace, key = key[:-KEY_BYTES] or self.namespace, key[-KEY_BYTES:]
        return namespace.hex(), key[:1].hex(), key.hex() + SUFFIX

    def name_of(self, key: ChunkKey) -> str:
        """Return the path of a chunk's file, relative to the folder of this namespace."""
        return "/".join(self._names_of(key)[1:])

    @contextlib.contextmanager
    def place_of(self, key: ChunkKey) -> Iterator[tuple[Folder, str]]:
        """Yield `(folder, name)` for a `with` block: the open folder of a chunk's file, and the file's name.

        Raises `FileNotFoundError` if there is no such folder, and `OSError` if the folder cannot be opened.
        """
        *folders, name = self._names_of(key)
        with self.root.entered(*folders) as folder:
            yield folder, name

    @contextlib.contextmanager
    def entered(self, *below: str) -> Iterator[Folder]:
        """Open the namespace's folder, or its subfolder `below`, for a `with` block. Raises `OSError`."""
        with self.root.entered(self.namespace.hex(), *below) as folder:
            yield folder

    def make(self, *below: str) -> None:
        """Create the namespace's folder and its subfolder `below`. Raises `OSError` if there is no root."""
        self.root.make(self.namespace.hex(), *below)

    def make_place_of(self, key: ChunkKey) -> None:
        """Create the folder for the file of a chunk of this namespace. Raises `OSError`."""
        self.make(self._names_of(key)[1])

    def discard(self, folder: Folder, name: str) -> None:
        """Remove a damaged file. An entry that cannot be removed, such as a folder, is moved to `quarantine/`.

        Raises `OSError` if neither is possible.
        """
        try:
            folder.unlink(name)
        except OSError:
            self.make(QUARANTINE)
            with self.entered(QUARANTINE) as quarantine:
                moved = f"{name}.{secrets.token_hex(4)}"
                os.rename(name, moved, src_dir_fd=folder.fd, dst_dir_fd=quarantine.fd)

    def scan_others(self) -> Iterator[Listed]:
        """Yield the chunks of other namespaces that this user may delete. Each key begins with the digest of its
        namespace.
        """
        for namespace in namespaces(self.root):
            if namespace != self.namespace:
                other = ChunkFolder(self.root, namespace)
                with _left_out_if_forbidden(other.path):
                    for found in other.scan(to_evict=True):
                        yield evolve(found, key=namespace + found.key)

    def scan(self, *, to_evict: bool = False) -> Iterator[Listed]:
        """Yield all chunks of the namespace, in no particular order, without opening files. Raises `OSError`.

        Also removes stale temporary files. `to_evict`: whether to raise `PermissionError` if this user may not delete
        files in a folder.
        """
        folders = []
        with _absent_if_removed(), self.entered() as folder:
            for entry in folder.entries():
                if len(entry.name) == 2 and entry.is_dir(follow_symlinks=False):
                    folders.append(entry.name)
                else:
                    _remove_if_stale(folder, entry.name)
        for name in folders:
            with _absent_if_removed(), self.entered(name) as folder:
                if to_evict and not os.access(".", os.W_OK | os.X_OK, dir_fd=folder.fd):
                    raise PermissionError(f"this user may not delete files in {folder.path}: chown that folder")
                yield from self._scan_folder(folder, name)

    def _scan_folder(self, folder: Folder, prefix: str) -> Iterator[Listed]:
        for entry in folder.entries():
            key = _key_of(entry.name, prefix)
            if key is None:
                _remove_if_stale(folder, entry.name)
                continue
            with contextlib.suppress(FileNotFoundError):
                status = entry.stat(follow_symlinks=False)
                if stat.S_ISREG(status.st_mode) and codec.plausible_file_bytes(status.st_size):
                    yield Listed(key, status.st_size, status.st_mtime)
                    continue
                with contextlib.suppress(OSError):
                    self.discard(folder, entry.name)


def namespaces(root: Root) -> list[bytes]:
    """Return the digests of the namespaces below a root. Raises `OSError`."""
    with _absent_if_removed(), root.entered() as folder:
        names = [entry.name for entry in folder.entries() if entry.is_dir(follow_symlinks=False)]
        return [digest for name in names if (digest := _digest_of(name))]
    return []


@contextlib.contextmanager
def _absent_if_removed() -> Iterator[None]:
    """Ignore, in a `with` block, that a folder is missing or is a file."""
    with contextlib.suppress(FileNotFoundError, NotADirectoryError):
        yield


@contextlib.contextmanager
def _left_out_if_forbidden(path: str) -> Iterator[None]:
    """Ignore, in a `with` block, that this user may not read or delete a namespace. Logs this once per `path`."""
    try:
        yield
    except PermissionError as error:
        warn_once("lmkv: the disk tier neither counts nor evicts the chunks in %s: %s", path, str(error))


def _key_of(name: str, folder: str) -> ChunkKey | None:
    """Return the key of a chunk's file. Returns None for any other name, and for a file in the wrong folder."""
    if len(name) != _NAME_LENGTH or not name.endswith(SUFFIX) or name[:2] != folder:
        return None
    return _digest_of(name[: -len(SUFFIX)])


def _digest_of(digits: str) -> bytes | None:
    try:
        digest = bytes.fromhex(digits)
    except ValueError:
        return None
    return digest if len(digest) == KEY_BYTES and digest.hex() == digits else None


def _remove_if_stale(folder: Folder, name: str) -> None:
    """Remove a temporary file if its writer has ended."""
    if name.startswith(".") and name.endswith(TEMPORARY_SUFFIX) and is_abandoned(folder, name):
        with contextlib.suppress(OSError):
            folder.unlink(name)


def digests(root: str | Path, beginning: str = "") -> list[bytes]:
    """Return the sorted digests of the namespaces below `root`. Raises OSError.

    `beginning`: only digests that begin with these hexadecimal digits are returned.
    """
    return sorted(digest for digest in namespaces(Root.checked(root)) if digest.hex().startswith(beginning.lower()))


# -- their descriptions -----------------------------------------------------------------------------------


DESCRIPTION_FILE = "namespace.json"
_MAX_DESCRIPTION_BYTES = 1 << 16


def describe(root: str, namespace: Namespace) -> None:
    """Write the description of a namespace into its folder, unless there is a description already.

    Never raises, because the folder can store chunks even without a description.
    """
    fields = {**asdict(namespace, recurse=False), "extra": dict(namespace.extra)}
    text = json.dumps(fields, indent=1, ensure_ascii=True) + "\n"
    with contextlib.suppress(OSError):
        place = ChunkFolder(Root.checked(root), namespace.digest)
        with place.entered() as folder, temporary(folder, 0) as (fd, unfinished):
            write_fully(fd, [memoryview(text.encode())])
            publish(folder, unfinished, DESCRIPTION_FILE)


def description(path: str) -> Namespace | None:
    """Return the namespace that is described in the folder `path`.

    Returns None if the description is missing or does not match the folder's name.
    """
    root, digits = os.path.split(path)
    try:
        folder = ChunkFolder(Root.checked(root), bytes.fromhex(digits))
        namespace = Namespace(**_fields(folder))
        # Other users' terminals show it: escape sequences must not get there.
        plain = (namespace.model + namespace.dtype).isprintable()
        return namespace if plain and namespace.digest == folder.namespace else None
    except (OSError, ValueError, TypeError, UsageError, RecursionError):
        return None


def _fields(folder: ChunkFolder) -> dict[str, Any]:
    with folder.entered() as here, here.opened(DESCRIPTION_FILE, os.O_RDONLY) as fd:
        fields = json.loads(os.read(fd, _MAX_DESCRIPTION_BYTES))
    if not isinstance(fields, dict):
        raise TypeError(f"{DESCRIPTION_FILE} has no JSON object")
    return fields


# -- the bytes of all namespaces --------------------------------------------------------------------------


_NO_LOCKS = (
    "lmkv: files in %s cannot be locked (%s). Engines that share this folder may exceed its capacity for a while, and "
    "unfinished files of killed engines stay. Use a file system with flock, or give each engine a separate folder"
)
USAGE_FILE = ".lmkv-use"
PENDING_FILE = f"{USAGE_FILE}-"
_NUMBERS = struct.Struct("<QQ")
_NUMBER = struct.Struct("<Q")
_MAX_COUNT = (1 << 64) - 1
_NEVER_LOCKS = {errno.EOPNOTSUPP, errno.ENOSYS, errno.EINVAL}
_PATIENCE = 0.2
"""Seconds to wait for the lock."""
_PAUSE = 0.001
"""Seconds between two attempts."""


@define(eq=False)
class Usage:
    """A file in a root folder that counts the bytes that all processes use below this folder.

    Any number of threads and processes may use the count: each change locks the file for about 10 us. If a process is
    killed before it writes its reserved bytes, the count is too high until the next listing of the root. If the file
    cannot be read or changed, the count is 0, without an error.

    A listing of the root misses a chunk that is written to an already listed folder. Therefore `set` adds the bytes
    that may have been written during the listing. To know their number, the counting file also has the total of all
    bytes that were ever reserved. Each process keeps its number of reserved but unwritten bytes in a small locked file.
    """

    root: Root
    _has_locks: bool = field(default=True, init=False)
    _pid: int = field(factory=os.getpid, init=False)
    _pending: int = field(default=0, init=False)
    _own: OwnFile | None = field(default=None, init=False)
    _lock: threading.Lock = field(factory=threading.Lock, init=False, repr=False)

    def reserve_bytes(self, nbytes: int) -> int:
        """Count `nbytes` bytes that the caller is about to write. Returns the bytes in use, including `nbytes`."""
        # Before they are counted: a listing that begins in between counts them twice, not never.
        self._pend(nbytes)
        return self._change(os.O_CREAT, nbytes, nbytes)

    def release_bytes(self, nbytes: int) -> None:
        """Subtract `nbytes` bytes from the count: bytes that were reserved but not written."""
        self.subtract(nbytes)
        self._pend(-nbytes)

    def wrote(self, nbytes: int) -> None:
        """Note that `nbytes` reserved bytes have been written."""
        self._pend(-nbytes)

    def subtract(self, nbytes: int) -> None:
        """Subtract `nbytes` deleted bytes from the count."""
        self._change(0, -nbytes)

    def listed_from(self) -> tuple[int, int]:
        """Return the argument `since` of `set`, for a listing that begins now.

        The two numbers are the total of all bytes ever reserved, and how many of these are not yet written.
        """
        # In this order: bytes that stop pending in between are in a file, which the listing finds.
        reserved = 0
        with contextlib.suppress(OSError), self._open(0) as fd:
            reserved = _read(fd)[1]
        return reserved, self._pending_of_all()

    def set(self, found: int, since: tuple[int, int]) -> None:
        """Set the count to `found`, the bytes that a listing has found, plus bytes that the listing may have missed.

        `since`: `listed_from()` when the listing began.
        """
        reserved, pending = since
        with contextlib.suppress(OSError), self._open(os.O_CREAT) as fd:
            reservations = _read(fd)[1]
            # The listing may have missed bytes that were written since then. Counting them twice is the safe error.
            _write(fd, found + pending + max(0, reservations - reserved), reservations)

    def close(self) -> None:
        """Remove the small file in which this process keeps the number of its unwritten bytes."""
        with self._lock, contextlib.suppress(OSError):
            own, self._own = self._own, None
            if own is not None and self._pid == os.getpid():
                with self.root.entered() as folder:
                    own.remove(folder)

    def _pend(self, nbytes: int) -> None:
        with self._lock, contextlib.suppress(OSError), self._locking():
            if self._pid != os.getpid():
                self._pid, self._pending, self._own = os.getpid(), 0, None
            self._pending = max(0, self._pending + nbytes)
            if self._own is None or not self._own.is_there:
                if not (self._pending and self._has_locks):
                    return
                with self.root.entered() as folder:
                    self._own = OwnFile.made(folder, f"{PENDING_FILE}{self._pid}-{secrets.token_hex(8)}")
            self._own.write(_NUMBER.pack(min(self._pending, _MAX_COUNT)))

    def _pending_of_all(self) -> int:
        """Return how many bytes all processes have reserved but not written. Removes the files of ended processes."""
        found = 0
        with contextlib.suppress(OSError), self.root.entered() as folder:
            for name in [entry.name for entry in folder.entries() if entry.name.startswith(PENDING_FILE)]:
                with contextlib.suppress(OSError):
                    self.root.check_owner(name, folder.stat(name), folder)
                    if is_abandoned(folder, name):
                        folder.unlink(name)
                        continue
                    with folder.opened(name, os.O_RDONLY) as fd:
                        data = os.pread(fd, _NUMBER.size, 0)
                        found += int.from_bytes(data, "little") if len(data) == _NUMBER.size else 0
        return found

    def _change(self, flags: int, use: int, reservations: int = 0) -> int:
        with contextlib.suppress(OSError), self._open(flags) as fd:
            used, reserved = _read(fd)
            used = max(0, used + use)
            _write(fd, used, reserved + reservations)
            return used
        return 0

    @contextlib.contextmanager
    def _locking(self) -> Iterator[None]:
        try:
            yield
        except OSError as error:
            if error.errno in {*_NEVER_LOCKS, errno.ENOLCK}:
                self._has_locks = error.errno not in _NEVER_LOCKS
                warn_once(_NO_LOCKS, self.root.path, error.strerror)
            raise

    @contextlib.contextmanager
    def _open(self, flags: int) -> Iterator[int]:
        with self.root.entered() as folder, folder.opened(USAGE_FILE, os.O_RDWR | flags) as fd:
            self.root.check_owner(USAGE_FILE, os.fstat(fd), folder)
            with self._locking():
                _lock(fd)
            try:
                yield fd
            finally:
                # Closing is not enough: a child forked in between may have the file open.
                fcntl.flock(fd, fcntl.LOCK_UN)


def _lock(fd: int) -> None:
    """Lock the open file `fd`. Raises `BlockingIOError` after `_PATIENCE` seconds, because a stopped process may hold a
    lock.
    """
    until = time.monotonic() + _PATIENCE
    while True:
        try:
            return fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            if time.monotonic() > until:
                raise
            time.sleep(_PAUSE)


def _read(fd: int) -> tuple[int, int]:
    data = os.pread(fd, _NUMBERS.size, 0)
    used, reserved = _NUMBERS.unpack(data) if len(data) == _NUMBERS.size else (0, 0)
    return used, reserved


def _write(fd: int, used: int, reserved: int) -> None:
    os.pwrite(fd, _NUMBERS.pack(min(used, _MAX_COUNT), reserved & _MAX_COUNT), 0)
