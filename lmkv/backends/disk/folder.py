"""The folder of a namespace: paths of its chunks, listings, damaged files, stale temporary files.

Payloads are not opened here. Any number of threads and processes may work in a folder at once: a file that
another one has just removed counts as absent.
"""

from __future__ import annotations

import contextlib
import logging
import os
import secrets
import stat
from collections.abc import Iterator
from functools import cache

from attrs import evolve, field, frozen

from lmkv.backends.disk.fileio import TEMPORARY_SUFFIX, is_abandoned
from lmkv.chunks import codec
from lmkv.chunks.hashing import KEY_BYTES
from lmkv.protocols import ChunkKey, Listed

logger = logging.getLogger(__name__)

SUFFIX = f".kv{codec.VERSION}"
QUARANTINE = "quarantine"
_NAME_LENGTH = 2 * KEY_BYTES + len(SUFFIX)


@frozen
class ChunkFolder:
    """`<root>/<namespace>/<first byte of the key>/<key>.kv1`, all in lower-case hexadecimal.

    Names consist of digests, which can neither collide nor point outside the folder. The root belongs to the
    operator and is not created again when it was removed; what is below belongs to lmkv, for its user only.
    """

    root: str
    namespace: bytes = field(repr=bytes.hex)
    keep_corrupt: int = 0
    path: str = field(init=False)

    @path.default
    def _path_of_namespace(self) -> str:
        return os.path.join(self.root, self.namespace.hex())

    def path_of(self, key: ChunkKey) -> str:
        """Path of a chunk. The key of another namespace's chunk begins with that namespace."""
        namespace, key = key[:-KEY_BYTES] or self.namespace, key[-KEY_BYTES:]
        return os.path.join(self.root, namespace.hex(), key[:1].hex(), key.hex() + SUFFIX)

    def make(self, *below: str) -> None:
        """Create the namespace's folder and those `below` it. Raises `OSError` when there is no root."""
        for folder in (self.path, *below):
            with contextlib.suppress(FileExistsError):
                os.mkdir(folder, 0o700)

    def quarantine(self, path: str) -> None:
        """Move a damaged file to `quarantine/`, if the medium can; the newest `keep_corrupt` are kept there.

        A rename works for anything that is there, also for a folder or a link.
        """
        away = os.path.join(self.path, QUARANTINE)
        with contextlib.suppress(OSError):
            self.make(away)
            os.rename(path, os.path.join(away, f"{os.path.basename(path)}.{secrets.token_hex(4)}"))
            _keep_newest(away, self.keep_corrupt)

    def scan_others(self) -> Iterator[Listed]:
        """`scan` of the root's other namespaces whose chunks may be deleted; their keys begin with the namespace."""
        with _left_out_if_forbidden(self.root):
            for entry in _entries(self.root):
                namespace = _digest_of(entry.name)
                if namespace and namespace != self.namespace and entry.is_dir(follow_symlinks=False):
                    with _left_out_if_forbidden(entry.path):
                        for found in ChunkFolder(self.root, namespace, self.keep_corrupt).scan(to_evict=True):
                            yield evolve(found, key=namespace + found.key)

    def scan(self, *, to_evict: bool = False) -> Iterator[Listed]:
        """All chunks by name and size alone, in no order. Removes stale temporary files.

        `to_evict`: raise `PermissionError` at the first folder whose chunks this user may not delete.
        """
        for folder in _entries(self.path):
            if len(folder.name) == 2 and folder.is_dir(follow_symlinks=False):
                if to_evict:
                    _check_deletable(folder.path)
                yield from self._scan_folder(folder)
            else:
                _remove_if_stale(folder)

    def _scan_folder(self, folder: os.DirEntry[str]) -> Iterator[Listed]:
        for entry in _entries(folder.path):
            key = _key_of(entry.name, folder.name)
            if key is None:
                _remove_if_stale(entry)
                continue
            status = _status(entry)
            if status is None:
                continue
            if stat.S_ISREG(status.st_mode) and codec.plausible_file_bytes(status.st_size):
                yield Listed(key, status.st_size, status.st_mtime)
            else:
                self.quarantine(entry.path)


def _entries(path: str) -> Iterator[os.DirEntry[str]]:
    with contextlib.suppress(FileNotFoundError, NotADirectoryError), os.scandir(path) as entries:
        yield from entries


@contextlib.contextmanager
def _left_out_if_forbidden(path: str) -> Iterator[None]:
    """Other namespaces may belong to other users, and must not keep the own one from being listed."""
    try:
        yield
    except OSError as error:
        _warn_once(path, str(error))


def _check_deletable(folder: str) -> None:
    if not os.access(folder, os.W_OK | os.X_OK) and os.path.lexists(folder):
        raise PermissionError("they may not be deleted")


@cache
def _warn_once(path: str, reason: str) -> None:
    logger.warning("lmkv: the chunks in %s are neither counted nor evicted: %s", path, reason)


def _status(entry: os.DirEntry[str]) -> os.stat_result | None:
    try:
        return entry.stat(follow_symlinks=False)
    except OSError:
        return None


def _key_of(name: str, folder: str) -> ChunkKey | None:
    """The key of a chunk's file; None for any other name, and for one that belongs into another folder."""
    if len(name) != _NAME_LENGTH or not name.endswith(SUFFIX) or name[:2] != folder:
        return None
    return _digest_of(name[: -len(SUFFIX)])


def _digest_of(digits: str) -> bytes | None:
    try:
        digest = bytes.fromhex(digits)
    except ValueError:
        return None
    return digest if len(digest) == KEY_BYTES and digest.hex() == digits else None


def _remove_if_stale(entry: os.DirEntry[str]) -> None:
    """Remove a temporary file whose writer has ended."""
    if entry.name.startswith(".") and entry.name.endswith(TEMPORARY_SUFFIX) and is_abandoned(entry.path):
        with contextlib.suppress(OSError):
            os.unlink(entry.path)


def _keep_newest(folder: str, count: int) -> None:
    with os.scandir(folder) as entries:
        found = [(status.st_ctime, entry.path) for entry in entries if (status := _status(entry))]
    for _, path in sorted(found, reverse=True)[count:]:
        with contextlib.suppress(OSError):
            os.unlink(path)
