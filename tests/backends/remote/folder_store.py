"""A folder as a store behind `IsolatedBackend`: what holds of its processes needs no server."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path
from typing import ClassVar

from lmkv.backends.remote.child import Memory
from lmkv.backends.remote.isolated import IsolatedBackend


class FolderBackend(IsolatedBackend):
    module = "json"
    known: ClassVar = {"clients": int, "folder": str}


class NoClientBackend(FolderBackend):
    module = "lmkv_has_no_such_client"
    install = "pip install 'lmkv[none]'"


class Engine:
    def __init__(self, memory: Memory, *, host: str, port: int, folder: str) -> None:
        self._memory, self._folder = memory, Path(folder)

    def _path(self, name: str) -> Path:
        return self._folder / name.replace("/", "-")

    def exist(self, names: Sequence[str]) -> list[bool]:
        return [self._path(name).exists() for name in names]

    def get(self, name: str, room: int) -> int | None:
        if not self._path(name).exists():
            return None
        value = self._path(name).read_bytes()
        if len(value) <= room:
            self._memory.view[: len(value)] = value
        return len(value)

    def put(self, name: str, nbytes: int) -> str:
        if self._path(name).exists():
            return "present"
        self._path(name).write_bytes(self._memory.view[:nbytes])
        return "stored"

    def remove(self, names: Sequence[str]) -> None:
        for name in names:
            self._path(name).unlink(missing_ok=True)

    def close(self) -> None:
        (self._folder / f"left-{os.getpid()}").touch()
