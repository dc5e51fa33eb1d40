"""The folder of a namespace: places of its chunks, listings, damaged files, stale temporary files.

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

from lmkv.backends.disk.fileio import TEMPORARY_SUFFIX, Folder, is_abandoned
from lmkv.backends.disk.root import Root
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
    operator and is not created again when it was removed; everything below belongs to lmkv, for its user only, or
    for the group that the root is shared with (`Folder.for_group`).
    """

    root: Root
    namespace: bytes = field(repr=bytes.hex)

    @property
    def path(self) -> str:
        return os.path.join(self.root.path, self.namespace.hex())

    def path_of(self, key: ChunkKey) -> str:
        """Path of a chunk, for people. The key of another namespace's chunk begins with that namespace."""
        return os.path.join(self.root.path, *self._names_of(key))

    def _names_of(self, key: ChunkKey) -> tuple[str, str, str]:
        namespace, key = key[:-KEY_BYTES] or self.namespace, key[-KEY_BYTES:]
        return namespace.hex(), key[:1].hex(), key.hex() + SUFFIX

    def name_of(self, key: ChunkKey) -> str:
        """Path of a chunk, relative to the folder of this namespace."""
        return "/".join(self._names_of(key)[1:])

    @contextlib.contextmanager
    def place_of(self, key: ChunkKey) -> Iterator[tuple[Folder, str]]:
        """The folder of a chunk, and its name there. Raises `FileNotFoundError` without the folder, `OSError`."""
        *folders, name = self._names_of(key)
        with self.root.entered(*folders) as folder:
            yield folder, name

    @contextlib.contextmanager
    def entered(self, *below: str) -> Iterator[Folder]:
        """The namespace's folder, or one `below` it. Raises `OSError`."""
        with self.root.entered(self.namespace.hex(), *below) as folder:
            yield folder

    def make(self, *below: str) -> None:
        """Create the namespace's folder, and one `below` it. Raises `OSError` when there is no root."""
        self.root.make(self.namespace.hex(), *below)

    def make_place_of(self, key: ChunkKey) -> None:
        """Create the folder of a chunk of this namespace. Raises `OSError`."""
        self.make(self._names_of(key)[1])

    def discard(self, folder: Folder, name: str) -> None:
        """Remove a damaged file, or move whatever cannot be removed, such as a folder, to `quarantine/`.

        Raises `OSError` when neither works.
        """
        try:
            folder.unlink(name)
        except OSError:
            self.make(QUARANTINE)
            with self.entered(QUARANTINE) as quarantine:
                moved = f"{name}.{secrets.token_hex(4)}"
                os.rename(name, moved, src_dir_fd=folder.fd, dst_dir_fd=quarantine.fd)

    def scan_others(self) -> Iterator[Listed]:
        """`scan` of the root's other namespaces whose chunks may be deleted; their keys begin with the namespace."""
        for namespace in namespaces(self.root):
            if namespace != self.namespace:
                other = ChunkFolder(self.root, namespace)
                with _left_out_if_forbidden(other.path):
                    for found in other.scan(to_evict=True):
                        yield evolve(found, key=namespace + found.key)

    def scan(self, *, to_evict: bool = False) -> Iterator[Listed]:
        """All chunks by name and size alone, in no order. Removes stale temporary files. Raises `OSError`.

        `to_evict`: raise `PermissionError` at the first folder whose chunks this user may not delete.
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
                    raise PermissionError("they may not be deleted")
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
    """Digests of the namespaces below a root. Raises `OSError`."""
    with _absent_if_removed(), root.entered() as folder:
        names = [entry.name for entry in folder.entries() if entry.is_dir(follow_symlinks=False)]
        return [digest for name in names if (digest := _digest_of(name))]
    return []


@contextlib.contextmanager
def _absent_if_removed() -> Iterator[None]:
    """Treat a missing folder, or a file in its place, as an empty folder."""
    with contextlib.suppress(FileNotFoundError, NotADirectoryError):
        yield


@contextlib.contextmanager
def _left_out_if_forbidden(path: str) -> Iterator[None]:
    """Skip namespaces of other users, so that this one is listed all the same."""
    try:
        yield
    except PermissionError as error:
        _warn_once(path, str(error))


@cache
def _warn_once(path: str, reason: str) -> None:
    logger.warning("lmkv: the chunks in %s are neither counted nor evicted: %s", path, reason)


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


def _remove_if_stale(folder: Folder, name: str) -> None:
    """Remove a temporary file whose writer has ended."""
    if name.startswith(".") and name.endswith(TEMPORARY_SUFFIX) and is_abandoned(folder, name):
        with contextlib.suppress(OSError):
            folder.unlink(name)
