"""Faults of a connector's storage: files and Redis values that vanish, are cut off, or have a bit flipped."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

from attrs import frozen

FAULTS = ("delete", "truncate", "flip", "empty")


@frozen
class Storage:
    """`folder`: all files of the connector. `redis`: URL of a database that holds nothing else, or ""."""

    folder: Path
    redis: str = ""

    def strike(self, kind: str, pick: float) -> bool:
        """Break what is at the place `pick`, from 0 to 1, of all that is stored. Whether there was anything."""
        return self._strike_files(kind, pick) or (bool(self.redis) and self._strike_redis(kind, pick))

    def empty_folder(self) -> None:
        shutil.rmtree(self.folder, ignore_errors=True)
        self.folder.mkdir(parents=True)

    def empty_redis(self) -> None:
        if self.redis:
            self._client().flushdb()

    def _strike_files(self, kind: str, pick: float) -> bool:
        files = sorted(path for path in self.folder.rglob("*") if path.is_file())
        if not files:
            return False
        path = files[int(pick * len(files))]
        try:
            if kind == "empty":
                for child in self.folder.iterdir():
                    shutil.rmtree(child) if child.is_dir() else child.unlink()
            elif kind == "delete":
                path.unlink()
            else:
                path.write_bytes(_broken(path.read_bytes(), kind, pick))
        except OSError:  # The connector has deleted it meanwhile.
            return False
        return True

    def _strike_redis(self, kind: str, pick: float) -> bool:
        client = self._client()
        names = sorted(name for name in client.scan_iter() if client.type(name) == b"string")
        if not names:
            return False
        name = names[int(pick * len(names))]
        if kind == "empty":
            client.flushdb()
        elif kind == "delete":
            client.delete(name)
        else:
            client.set(name, _broken(client.get(name) or b"", kind, pick), keepttl=True)
        return True

    def _client(self) -> Any:
        from redis import Redis

        connect: Callable[[str], Any] = Redis.from_url
        return connect(self.redis)


def _broken(content: bytes, kind: str, pick: float) -> bytes:
    # Somewhere in the file, and not where the file is among all of them.
    place = int(pick * 7919) % max(1, len(content))
    if kind == "truncate":
        return content[:place]
    flipped = bytearray(content)
    if flipped:
        flipped[place] ^= 1 << int(pick * 1000) % 8
    return bytes(flipped)
