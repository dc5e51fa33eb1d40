"""What a namespace is of: a small file in its folder, for people and for tools. lmkv itself does not need it."""

from __future__ import annotations

import contextlib
import json
import os
from typing import Any

from attrs import asdict

from lmkv.backends.disk.fileio import opened, publish, temporary, write_fully
from lmkv.chunks.namespace import Namespace
from lmkv.errors import UsageError

NAME = "namespace.json"
_LARGEST = 1 << 16


def describe(root: str, namespace: Namespace) -> None:
    """Write the description of a namespace into its folder, unless there is one.

    A medium that cannot take it is no reason not to store chunks: nothing is raised.
    """
    folder = os.path.join(root, namespace.digest.hex())
    fields = {**asdict(namespace, recurse=False), "extra": dict(namespace.extra)}
    text = json.dumps(fields, indent=1, ensure_ascii=True) + "\n"
    with contextlib.suppress(OSError), temporary(folder, 0) as (fd, unfinished):
        write_fully(fd, [memoryview(text.encode())])
        publish(unfinished, os.path.join(folder, NAME))


def description(folder: str) -> Namespace | None:
    """The namespace that a folder has the digest of, None when its file does not say so."""
    try:
        namespace = Namespace(**_fields(os.path.join(folder, NAME)))
    except (OSError, ValueError, TypeError, UsageError):
        return None
    # Whoever may write to the folder would write to the terminals of those who look at it.
    plain = (namespace.model + namespace.dtype).isprintable()
    return namespace if plain and namespace.digest.hex() == os.path.basename(folder) else None


def _fields(path: str) -> dict[str, Any]:
    with opened(path, os.O_RDONLY) as fd:
        fields = json.loads(os.read(fd, _LARGEST))
    if not isinstance(fields, dict):
        raise TypeError(f"{path} has no JSON object")
    return fields
