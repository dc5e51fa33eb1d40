"""Tests whether a folder works as a disk tier, or a store as a remote one, and leaves it as it was."""

from __future__ import annotations

import mmap
import os
import shutil
import tempfile
from pathlib import Path
from typing import Literal

from attrs import frozen

from lmkv import plugins
from lmkv.backends.disk.backend import LocalDiskBackend
from lmkv.backends.remote.options import RemoteOptions
from lmkv.chunks.layout import ALIGNMENT
from lmkv.config import Config
from lmkv.errors import BackendError, BackendUnavailable
from lmkv.outcomes import ReadStatus, WriteStatus
from lmkv.protocols import Backend, Chunk

_KEY = bytes(32)
_PAYLOAD_PAGES = 16
_PATIENCE = 5.0


@frozen
class FolderFacts:
    """`tried`: the folder, or its nearest parent that exists. `direct_io`: whether O_DIRECT works."""

    tried: str
    free_bytes: int
    direct_io: bool


def try_folder(path: str | os.PathLike[str], direct: Literal["auto", "on", "off"] = "auto") -> FolderFacts:
    """Store one chunk in a temporary folder below `path`, read it and remove it.

    Raises `ConfigError`, OSError, or a `BackendError` when the medium fails (`BackendUnavailable` with the remedy
    if a file is in the way).
    """
    tried = _existing(Path(path).absolute())
    with tempfile.TemporaryDirectory(prefix=".lmkv-try-", dir=tried) as folder:
        backend = LocalDiskBackend(folder, _KEY, direct=direct)
        try:
            _round_trip(backend)
        finally:
            backend.close()
        return FolderFacts(str(tried), shutil.disk_usage(tried).free, backend.direct_io)


def try_remote(url: str) -> None:
    """Store one chunk in the remote store at `url`, read it and delete it; name and password are lmkv's settings.

    Raises `ConfigError`, or a `BackendError` within seconds when the store does not answer, or refuses.
    """
    config = Config.load(extra={"remote_url": url})
    [where] = config.remote_url
    options = RemoteOptions(
        username=config.remote_username, password=config.password, prefix=config.remote_prefix, timeout=_PATIENCE
    )
    backend = plugins.make(where.place, f"remote_url {where}", Backend, where.text, os.urandom(32), options)
    try:
        # Ask this first: a store that does not answer it is not asked for more.
        backend.contains([_KEY])
        _round_trip(backend)
        backend.delete([_KEY])
    finally:
        backend.close()


def _existing(path: Path) -> Path:
    found = next(place for place in (path, *path.parents) if place.exists())
    if not found.is_dir():
        raise BackendUnavailable("disk", "open", reason=f"{found} is not a folder: remove it or name another")
    return found


def _round_trip(backend: Backend) -> None:
    size = _PAYLOAD_PAGES * ALIGNMENT
    # Memory that is aligned to pages, because O_DIRECT is used for no other.
    with mmap.mmap(-1, size) as given, mmap.mmap(-1, size) as returned:
        given.write(os.urandom(size))
        with memoryview(given) as payload, memoryview(returned) as into:
            written = backend.write(Chunk(_KEY, payload))
            if written.status is not WriteStatus.STORED:
                raise written.error or BackendError(backend.name, "write", reason=written.reason)
            read = backend.read(_KEY, into)
            if read.status is not ReadStatus.HIT or into != payload:
                raise read.error or BackendError(backend.name, "read", reason="other bytes than were written")
