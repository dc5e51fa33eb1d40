"""A small file that describes a namespace in its folder, for people and tools. lmkv itself does not need it."""

from __future__ import annotations

import contextlib
import json
import os
from typing import Any

from attrs import asdict

from lmkv.backends.disk.fileio import publish, temporary, write_fully
from lmkv.backends.disk.folder import ChunkFolder
from lmkv.backends.disk.root import Root
from lmkv.chunks.namespace import Namespace
from lmkv.errors import UsageError

NAME = "namespace.json"
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
            publish(folder, unfinished, NAME)


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
    with folder.entered() as here, here.opened(NAME, os.O_RDONLY) as fd:
        fields = json.loads(os.read(fd, _MAX_BYTES))
    if not isinstance(fields, dict):
        raise TypeError(f"{NAME} has no JSON object")
    return fields
