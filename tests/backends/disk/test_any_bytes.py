"""Any bytes at any place, at any time: a chunk is served right or not at all, and can always be stored again."""

from __future__ import annotations

import errno
import os
import shutil
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import pytest
from hypothesis import event, strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, rule

from lmkv.backends.disk.backend import LocalDiskBackend
from lmkv.errors import BackendError, CorruptChunkError
from lmkv.protocols import Chunk, ReadStatus, WriteStatus
from lmkv.testing.backend_suite import listed
from tests.backends.disk.attacks.test_attacks import HOSTILE, NAMESPACE

KEYS = [bytes([0, number]) * 16 for number in range(3)]
PAYLOADS = {key: bytes([7 + key[1]]) * 5000 for key in KEYS}
CALLS = ["open", "pwritev", "preadv", "link", "rename", "unlink", "fstat", "mkdir"]
CODES = [errno.EIO, errno.ENOSPC, errno.EACCES, errno.EMFILE]

keys = st.sampled_from(KEYS)
places = st.integers(0, 9500)


@contextmanager
def failing(call: str, code: int, after: int) -> Iterator[None]:
    """`os.<call>` fails with `code` once `after` calls have succeeded."""
    real: Callable[..., Any] = getattr(os, call)
    calls = iter(range(1 << 30))

    def fail(*args: Any, **kwargs: Any) -> Any:
        if next(calls) < after:
            return real(*args, **kwargs)
        raise OSError(code, os.strerror(code))

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(os, call, fail)
        yield


class AnyBytes(RuleBasedStateMachine):
    """`whole`: chunks whose files nobody has touched since they were stored. Any other may be served, or be lost."""

    @initialize()
    def begin(self) -> None:
        memory = "/dev/shm" if Path("/dev/shm").is_dir() else None
        self.root = Path(tempfile.mkdtemp(prefix="lmkv-bytes-", dir=memory))
        self.whole: set[bytes] = set()
        self.touched: set[bytes] = set()
        self.open_again()

    @rule()
    def open_again(self) -> None:
        self.backend = LocalDiskBackend(self.root, NAMESPACE, direct="off", segment_bytes=4096)

    def place(self, key: bytes) -> Path:
        """Where the chunk's file lies, spelled out from docs/format.md."""
        return self.root / NAMESPACE.hex() / key[:1].hex() / f"{key.hex()}.kv1"

    def touch(self, key: bytes) -> Path:
        """The file of a chunk, which is about to be changed."""
        self.whole.discard(key)
        self.touched.add(key)
        place = self.place(key)
        place.parent.mkdir(parents=True, exist_ok=True)
        return place

    # -- what a store asks for ----------------------------------------------------------------------------

    @rule(key=keys)
    def write(self, key: bytes) -> None:
        written = self.backend.write(Chunk(key, memoryview(PAYLOADS[key])))
        if written.status is WriteStatus.STORED:
            self.whole.add(key)
            self.touched.discard(key)
        elif written.status is not WriteStatus.PRESENT:
            assert key in self.touched
        event(f"write: {written.status.name}")

    @rule(key=keys)
    def read(self, key: bytes) -> None:
        into = memoryview(bytearray(len(PAYLOADS[key])))
        read = self.backend.read(key, into)
        assert read.status is not ReadStatus.HIT or into == PAYLOADS[key]
        assert read.status is ReadStatus.HIT or key not in self.whole
        assert read.status is ReadStatus.MISS or key in self.whole | self.touched
        if isinstance(read.error, CorruptChunkError):
            assert not os.path.lexists(self.place(key)), "it is set aside"
        event(f"read: {read.status.name}")

    @rule(chosen=st.sets(keys))
    def delete(self, chosen: set[bytes]) -> None:
        self.whole -= chosen
        with suppress(BackendError):
            self.backend.delete(sorted(chosen))
            assert not any(self.place(key).is_file() for key in chosen)

    @rule()
    def look(self) -> None:
        with suppress(BackendError):
            assert self.whole <= set(listed(self.backend)) <= self.whole | self.touched
            assert [key in self.whole for key in KEYS if key not in self.touched] == [
                found for key, found in zip(KEYS, self.backend.contains(KEYS), strict=True) if key not in self.touched
            ]

    @rule(key=keys, call=st.sampled_from(CALLS), code=st.sampled_from(CODES), after=st.integers(0, 4))
    def fail(self, key: bytes, call: str, code: int, after: int) -> None:
        """Write a chunk, and read another one, while a system call fails. Only what was written may be in doubt."""
        into = memoryview(bytearray(len(PAYLOADS[key])))
        with failing(call, code, after):
            other = self.backend.read(KEYS[0], into)
            written = self.backend.write(Chunk(key, memoryview(PAYLOADS[key])))
        assert other.status is not ReadStatus.HIT or into == PAYLOADS[KEYS[0]]
        assert not isinstance(other.error, CorruptChunkError) or KEYS[0] in self.touched
        if written.status is WriteStatus.STORED:
            self.whole.add(key)
            self.touched.discard(key)
        event(f"{call} fails: {written.status.name}")

    # -- what anybody does to the files -------------------------------------------------------------------

    @rule(key=keys, at=places, bit=st.integers(0, 7))
    def flip(self, key: bytes, at: int, bit: int) -> None:
        if self.place(key).is_file():
            data = bytearray(self.touch(key).read_bytes())
            data[at % len(data)] ^= 1 << bit
            self.place(key).write_bytes(data)

    @rule(key=keys, at=places)
    def cut(self, key: bytes, at: int) -> None:
        if self.place(key).is_file():
            os.truncate(self.touch(key), at)

    @rule(key=keys, page=st.integers(0, 2))
    def lose_a_page(self, key: bytes, page: int) -> None:
        """As a power cut does."""
        if self.place(key).is_file():
            with self.touch(key).open("r+b") as file:
                file.seek(4096 * page)
                file.write(bytes(4096))

    @rule(key=keys, other=keys, attack=st.sampled_from([None, *HOSTILE]))
    def put_another(self, key: bytes, other: bytes, attack: Path | None) -> None:
        """Another chunk's file, or one that an attacker has made, in the place of the chunk's."""
        source = attack or self.place(other)
        if key != other and source.is_file() and not self.place(key).is_dir():
            self.touch(key).unlink(missing_ok=True)
            shutil.copy(source, self.place(key))

    @rule(key=keys, kind=st.sampled_from(["nothing", "link", "pipe", "folder", "full folder"]))
    def put_no_file(self, key: bytes, kind: str) -> None:
        place = self.touch(key)
        if place.is_dir() and not place.is_symlink():
            shutil.rmtree(place)
        place.unlink(missing_ok=True)
        if kind == "link":
            place.symlink_to(self.root)
        elif kind == "pipe":
            os.mkfifo(place)
        elif kind != "nothing":
            (place / "something" if kind == "full folder" else place).mkdir(parents=True)

    @rule(depth=st.integers(0, 1))
    def remove_folders(self, depth: int) -> None:
        self.whole.clear()
        self.touched.clear()
        shutil.rmtree(self.root / NAMESPACE.hex() / (KEYS[0][:1].hex() if depth else ""), ignore_errors=True)

    def teardown(self) -> None:
        """Whatever has happened, each chunk can be stored, once reads have set aside what is in its place."""
        for key in KEYS if hasattr(self, "root") else ():
            for _ in range(3):
                self.write(key)
                self.read(key)
            if self.place(key).is_dir():
                continue  # nobody but its owner empties a folder
            into = memoryview(bytearray(len(PAYLOADS[key])))
            assert self.backend.read(key, into).status is ReadStatus.HIT
            assert into == PAYLOADS[key]
        if hasattr(self, "root"):
            self.backend.close()
            shutil.rmtree(self.root)


TestAnyBytes = AnyBytes.TestCase
