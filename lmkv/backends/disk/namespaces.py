"""Lists the namespaces of a folder, and clears one."""

from __future__ import annotations

from pathlib import Path

from lmkv.backends.disk.backend import LocalDiskBackend
from lmkv.backends.disk.folder import namespaces
from lmkv.backends.disk.root import Root


def digests(root: str | Path, beginning: str = "") -> list[bytes]:
    """Digests that begin with these hexadecimal digits, sorted. Raises OSError."""
    return sorted(digest for digest in namespaces(Root.checked(root)) if digest.hex().startswith(beginning.lower()))


def clear_namespace(root: str, digest: bytes) -> int:
    """Delete a namespace's chunks; returns how many. Engines that use them meanwhile miss them. Raises BackendError."""
    backend = LocalDiskBackend(root, digest, direct="off")
    try:
        chunks = [chunk.key for batch in backend.list_keys() for chunk in batch]
        backend.reclaim(chunks)
    finally:
        backend.close()
    return len(chunks)
