"""A folder as a store behind `SubprocessBackend`: tests of its processes need no server."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path
from typing import ClassVar

from lmkv.backends.remote.base import HostPortBackend
from lmkv.backends.remote.child import Memory, Part
from lmkv.backends.remote.subprocess_backend import SubprocessBackend

UNREADABLE = b"unreadable"


class FolderBackend(SubprocessBackend, HostPortBackend):
    module = "json"
    known: ClassVar = {"clients": int, "zero_copy": int, "folder": str}


class NoClientBackend(FolderBackend):
    module = "lmkv_has_no_such_client"
    extra = "none"


class StoreClient:
    def __init__(self, memories: Sequence[Memory], *, host: str, port: int, folder: str) -> None:
        self._memories, self._folder = memories, Path(folder)

    def _path(self, name: str) -> Path:
        return self._folder / name.replace("/", "-")

    def exist(self, names: Sequence[str]) -> list[bool]:
        return [self._path(name).exists() for name in names]

    def get(self, name: str, parts: Sequence[Part]) -> int | None:
        if not self._path(name).exists():
            return None
        value = self._path(name).read_bytes()
        if value == UNREADABLE:
            raise RuntimeError("it cannot be read")
        if len(value) == sum(nbytes for _, _, nbytes in parts):
            left = value
            for memory, offset, nbytes in parts:
                self._memories[memory].view[offset : offset + nbytes] = left[:nbytes]
                left = left[nbytes:]
        return len(value)

    def put(self, name: str, parts: Sequence[Part]) -> str:
        if self._path(name).exists():
            return "present"
        parted = (self._memories[memory].view[offset : offset + nbytes] for memory, offset, nbytes in parts)
        self._path(name).write_bytes(b"".join(parted))
        return "stored"

    def remove(self, names: Sequence[str]) -> int:
        self._path(names[0]).unlink(missing_ok=True)
        return 1

    def close(self) -> None:
        (self._folder / f"left-{os.getpid()}").touch()
