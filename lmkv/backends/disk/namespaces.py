"""The namespaces of a folder: which there are, and the end of one."""

from __future__ import annotations

import os
import re
from pathlib import Path

from lmkv.backends.disk.backend import LocalDiskBackend
from lmkv.backends.disk.folder import ChunkFolder


def digests(root: str | Path, beginning: str = "") -> list[bytes]:
    """Those that begin with these hexadecimal digits, in order. Raises OSError."""
    names = (name for name in sorted(os.listdir(root)) if re.fullmatch("[0-9a-f]{64}", name))
    return [bytes.fromhex(name) for name in names if name.startswith(beginning.lower())]


def clear_namespace(root: str, digest: bytes) -> int:
    """Delete its chunks; returns how many. Engines that use them meanwhile miss them. Raises BackendError."""
    chunks = [chunk.key for chunk in ChunkFolder(root, digest).scan()]
    backend = LocalDiskBackend(root, digest, direct="off")
    try:
        backend.reclaim(chunks)
    finally:
        backend.close()
    return len(chunks)
