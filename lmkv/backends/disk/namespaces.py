"""Lists, describes and clears the namespaces of a folder."""

from __future__ import annotations

import contextlib
import json
import os
from pathlib import Path
from typing import Any

from attrs import asdict

from lmkv.backends.disk.backend import LocalDiskBackend
from lmkv.backends.disk.fileio import publish, temporary, write_fully
from lmkv.backends.disk.folder import ChunkFolder, namespaces
from lmkv.backends.disk.root import Root
from lmkv.chunks.namespace import Namespace
from lmkv.errors import UsageError


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


DESCRIPTION_FILE = "namespace.json"
_MAX_BYTES = 1 << 16


def describe(root: str, namespace: Namespace) -> None:
    """Write the description of a namespace into its folder, unless there is one.

    Raises nothing, because a medium that cannot take it may still take chunks.
    """
    fields = {**asdict(namespace, recurse=False), "extra": dict(namespace.extra)}
    text = json.dumps(fields, indent=1, ensure_ascii=True) + "\n"
    with contextlib.suppress(OSError):
        place = ChunkFolder(Root.checked(root), namespace.digest)
        with place.entered() as folder, temporary(folder, 0) as (fd, unfinished):
            write_fully(fd, [memoryview(text.encode())])
            publish(folder, unfinished, DESCRIPTION_FILE)


def description(path: str) -> Namespace | None:
    """The namespace of a folder; None when its file is missing or does not match."""
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
        fields = json.loads(os.read(fd, _MAX_BYTES))
    if not isinstance(fields, dict):
        raise TypeError(f"{DESCRIPTION_FILE} has no JSON object")
    return fields
