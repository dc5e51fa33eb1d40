"""Where the files of one namespace lie, how they are found again, and how bad ones are set aside.

Nothing here opens a payload. Every function may run in several threads and processes at once: a file that
another one removed meanwhile is simply not there.
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
    """`<root>/<namespace>/<first byte of the key>/<key>.kv1`, all in lower-case hex.

    Names are made of digests alone, so they can neither collide nor leave the folder. The root belongs to the
    operator and is not recreated once it is gone; all below is lmkv's, with access for its user only.
    """

    root: str
    namespace: bytes = field(repr=bytes.hex)
    keep_corrupt: int = 0
    path: str = field(init=False)

    @path.default
    def _path_of_namespace(self) -> str:
        return os.path.join(self.root, self.namespace.hex())

    def path_of(self, key: ChunkKey) -> str:
        """A key of another namespace begins with that."""
        namespace, key = key[:-KEY_BYTES] or self.namespace, key[-KEY_BYTES:]
        return os.path.join(self.root, namespace.hex(), key[:1].hex(), key.hex() + SUFFIX)

    def make(self, *below: str) -> None:
        """Create the namespace folder and those `below` it where missing. Raises `OSError` without a root."""
        for folder in (self.path, *below):
            with contextlib.suppress(FileExistsError):
                os.mkdir(folder, 0o700)

    def quarantine(self, path: str) -> None:
        """Move a bad file out of the way as far as the medium lets it; the newest `keep_corrupt` stay.

        A rename moves anything that lies there, even a folder or a link that someone planted.
        """
        away = os.path.join(self.path, QUARANTINE)
        with contextlib.suppress(OSError):
            self.make(away)
            os.rename(path, os.path.join(away, f"{os.path.basename(path)}.{secrets.token_hex(4)}"))
            _keep_newest(away, self.keep_corrupt)

    def scan_others(self) -> Iterator[Listed]:
        """The same of the root's other namespaces that can be read; their keys begin with the namespace."""
        with _left_out_if_unreadable(self.root):
            for entry in _entries(self.root):
                namespace = _digest_of(entry.name)
                if namespace and namespace != self.namespace and entry.is_dir(follow_symlinks=False):
                    with _left_out_if_unreadable(entry.path):
                        for found in ChunkFolder(self.root, namespace, self.keep_corrupt).scan():
                            yield evolve(found, key=namespace + found.key)

    def scan(self) -> Iterator[Listed]:
        """Every chunk, in no order, by name and size alone; dead writers' leavings are removed on the way."""
        for folder in _entries(self.path):
            if len(folder.name) == 2 and folder.is_dir(follow_symlinks=False):
                yield from self._scan_folder(folder)
            else:
                _sweep(folder)

    def _scan_folder(self, folder: os.DirEntry[str]) -> Iterator[Listed]:
        for entry in _entries(folder.path):
            key = _key_of(entry.name, folder.name)
            if key is None:
                _sweep(entry)
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
def _left_out_if_unreadable(path: str) -> Iterator[None]:
    """A neighbour's folder that belongs to another user, say, must not end the listing of one's own."""
    try:
        yield
    except OSError as error:
        _warn_once(path, str(error))


@cache
def _warn_once(path: str, reason: str) -> None:
    logger.warning("lmkv: the chunks in %s are neither counted nor evicted: %s", path, reason)


def _status(entry: os.DirEntry[str]) -> os.stat_result | None:
    try:
        return entry.stat(follow_symlinks=False)
    except OSError:
        return None


def _key_of(name: str, folder: str) -> ChunkKey | None:
    """The key that a file name stands for; None when it is not one of ours in its place."""
    if len(name) != _NAME_LENGTH or not name.endswith(SUFFIX) or name[:2] != folder:
        return None
    return _digest_of(name[: -len(SUFFIX)])


def _digest_of(digits: str) -> bytes | None:
    try:
        digest = bytes.fromhex(digits)
    except ValueError:
        return None
    return digest if len(digest) == KEY_BYTES and digest.hex() == digits else None


def _sweep(entry: os.DirEntry[str]) -> None:
    """Remove a temporary file whose writer is dead."""
    if entry.name.startswith(".") and entry.name.endswith(TEMPORARY_SUFFIX) and is_abandoned(entry.path):
        with contextlib.suppress(OSError):
            os.unlink(entry.path)


def _keep_newest(folder: str, count: int) -> None:
    with os.scandir(folder) as entries:
        found = [(status.st_ctime, entry.path) for entry in entries if (status := _status(entry))]
    for _, path in sorted(found, reverse=True)[count:]:
        with contextlib.suppress(OSError):
            os.unlink(path)
