"""Any bytes at any place, at any time: a chunk is served right or not at all, and can always be stored again."""

from __future__ import annotations

import errno
import os
import shutil
import socket
import stat
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, Literal

import pytest
from hypothesis import settings, strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, rule

from lmkv.backends.disk import LocalDiskBackend, chunkfile
from lmkv.errors import BackendError, BackendUnavailable, CorruptChunkError
from lmkv.protocols import Chunk, ReadStatus, WriteStatus
from lmkv.testing.backend_suite import listed
from tests.backends.disk.attacks.test_attacks import HOSTILE, KEY, NAMESPACE, PAYLOAD
from tests.kit import MEMORY

KEYS = [KEY, *(KEY[:1] + bytes([number]) * 31 for number in (1, 2))]
PAYLOADS = {key: PAYLOAD if key == KEY else key[1:2] * len(PAYLOAD) for key in KEYS}
PADDING = 4096 + len(PAYLOAD)
"""Where a file's last bytes begin, which are checked by nobody."""
CALLS = ["open", "preadv", "fstat", "pwritev", "link", "rename", "unlink", "mkdir"]
READS = CALLS[:3]
CODES = [errno.EIO, errno.ENOSPC, errno.EACCES, errno.EMFILE, errno.ENOMEM]

keys = st.sampled_from(KEYS)
places = st.integers(0, 13_000)
NOTHING = "nothing"
FOLDERS = ["the root", "the namespace", "its folder", "a file instead"]
OBSTACLES = [NOTHING, "file", "link", "everybody's folder"]


@contextmanager
def failing(call: str, code: int, after: int = 0) -> Iterator[None]:
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


def plant_socket(place: Path) -> None:
    """A socket's address has room for 107 bytes: too few for the place's real name."""
    folder = os.open(place.parent, os.O_RDONLY)
    try:
        with socket.socket(socket.AF_UNIX) as server:
            server.bind(f"/proc/self/fd/{folder}/s")
        (place.parent / "s").rename(place)
    finally:
        os.close(folder)


def plant_full_folder(place: Path) -> None:
    (place / "something").mkdir(parents=True)


NO_FILES: dict[str, Callable[[Path], object]] = {
    "link": lambda place: place.symlink_to(place.parents[2] / "secret"),
    "dangling link": lambda place: place.symlink_to("nowhere"),
    "link to a folder": lambda place: place.symlink_to(place.parents[2]),
    "pipe": os.mkfifo,
    "socket": plant_socket,
    "folder": Path.mkdir,
    "full folder": plant_full_folder,
}
if os.geteuid() == 0:
    NO_FILES["device"] = lambda place: os.mknod(place, 0o600 | stat.S_IFCHR, os.makedev(1, 5))


def remove(place: Path) -> None:
    """Whatever it is, if there is anything."""
    if place.is_dir() and not place.is_symlink():
        shutil.rmtree(place)
    else:
        place.unlink(missing_ok=True)


class AnyBytes(RuleBasedStateMachine):
    """`whole`: chunks whose files nobody has touched since they were stored. Any other may be served, or be lost.

    `good`: the file of each chunk that was stored once. `secret`: a sound file for all links to lead to.
    """

    @initialize(direct=st.sampled_from(["off", "auto"]), in_pieces=st.booleans())
    def begin(self, direct: Literal["off", "auto"], in_pieces: bool) -> None:
        self.patch = pytest.MonkeyPatch()
        if in_pieces:
            # As chunks of many megabytes are written and read.
            self.patch.setattr(chunkfile, "PIECE", 4096)
            self.patch.setattr(chunkfile, "SMALL", 0)
        self.root = Path(tempfile.mkdtemp(prefix="lmkv-bytes-", dir=MEMORY if direct == "off" else None))
        self.direct = direct
        self.whole: set[bytes] = set()
        self.good: dict[bytes, bytes] = {}
        self.open_again()
        self.write(KEY)
        self.secret = self.good[KEY]
        self.put_root()

    def put_root(self) -> None:
        self.root.mkdir(exist_ok=True)
        (self.root / "secret").write_bytes(self.secret)

    @rule()
    def open_again(self) -> None:
        self.root.mkdir(exist_ok=True)
        self.backend = LocalDiskBackend(self.root, NAMESPACE, direct=self.direct, segment_bytes=4096)

    @property
    def folder(self) -> Path:
        """Of all chunks here: their keys begin alike."""
        return self.root / NAMESPACE.hex() / KEY[:1].hex()

    @property
    def quarantine(self) -> Path:
        return self.folder.with_name("quarantine")

    def place(self, key: bytes) -> Path:
        """Where the chunk's file lies, spelled out from docs/format.md."""
        return self.folder / f"{key.hex()}.kv1"

    def is_sound(self, key: bytes) -> bool:
        """Whether the chunk's file lies there, each byte as it was written but those of the padding."""
        place = self.place(key)
        if key not in self.good or place.is_symlink() or not place.is_file():
            return False
        found, good = place.read_bytes(), self.good[key]
        return len(found) == len(good) and found[:PADDING] == good[:PADDING]

    @property
    def keeps_folders(self) -> bool:
        """Nothing can be set aside, and a folder cannot be removed: somebody has put something in the way."""
        with suppress(FileNotFoundError):
            mode = self.quarantine.lstat().st_mode
            return not stat.S_ISDIR(mode) or bool(mode & stat.S_IWOTH)
        return False

    def is_stuck(self, key: bytes) -> bool:
        """A folder in the place of a file that nobody but its owner moves, or a file in that of the folder."""
        place = self.place(key)
        return (
            not self.root.is_dir()
            or self.folder.is_file()
            or (self.keeps_folders and place.is_dir() and not place.is_symlink())
        )

    # -- what a store asks for ----------------------------------------------------------------------------

    @rule(key=keys)
    def write(self, key: bytes) -> None:
        stuck = self.is_stuck(key)
        written = self.backend.write(Chunk(key, memoryview(PAYLOADS[key])))
        if written.status is WriteStatus.STORED:
            self.stored(key)
        elif written.status is WriteStatus.PRESENT:
            assert stat.S_ISREG(self.place(key).lstat().st_mode), "a file, which the next read sets aside if it is none"
        else:
            assert stuck
            assert isinstance(written.error, BackendUnavailable)

    def stored(self, key: bytes) -> None:
        self.whole.add(key)
        self.good[key] = self.place(key).read_bytes()

    @rule(key=keys)
    def read(self, key: bytes) -> None:
        into, stuck = memoryview(bytearray(len(PAYLOADS[key]))), self.is_stuck(key)
        expected = ReadStatus.FAILED if os.path.lexists(self.place(key)) else ReadStatus.MISS
        if self.is_sound(key):
            expected = ReadStatus.HIT
        read = self.backend.read(key, into)
        assert read.status is expected
        assert read.status is not ReadStatus.HIT or into == PAYLOADS[key]
        assert read.status is ReadStatus.HIT or key not in self.whole
        assert read.status is not ReadStatus.FAILED or isinstance(read.error, BackendError)
        if isinstance(read.error, CorruptChunkError):
            assert os.path.lexists(self.place(key)) == stuck, "it is set aside"

    @rule(chosen=st.sets(keys))
    def delete(self, chosen: set[bytes]) -> None:
        self.whole -= chosen
        with suppress(BackendError):
            self.backend.delete(sorted(chosen))
            assert not any(self.place(key).is_file() for key in chosen)

    @rule()
    def look(self) -> None:
        found = set(listed(self.backend))
        assert self.whole <= found
        assert all(stat.S_ISREG(self.place(key).lstat().st_mode) for key in found)
        for key, there in zip(KEYS, self.backend.contains(KEYS), strict=True):
            assert there or key not in self.whole
            assert not there or os.path.lexists(self.place(key))

    @rule(key=keys, call=st.sampled_from(CALLS), code=st.sampled_from(CODES), after=st.integers(0, 4))
    def fail(self, key: bytes, call: str, code: int, after: int) -> None:
        """Write a chunk, and read another one, while a system call fails. Only what was written may be in doubt."""
        into = memoryview(bytearray(len(PAYLOADS[key])))
        with failing(call, code, after):
            other = self.backend.read(KEY, into)
            written = self.backend.write(Chunk(key, memoryview(PAYLOADS[key])))
        assert other.status is not ReadStatus.HIT or into == PAYLOADS[KEY]
        if KEY in self.whole:
            assert not isinstance(other.error, CorruptChunkError)
            assert other.status is ReadStatus.FAILED or call not in READS or after
        if written.status is WriteStatus.STORED:
            self.stored(key)

    # -- what anybody does to the files -------------------------------------------------------------------

    def change(self, key: bytes, changed: Callable[[bytes], bytes]) -> None:
        """Change the bytes of a chunk's file, if there is one."""
        place = self.place(key)
        if place.is_file() and not place.is_symlink():
            self.whole.discard(key)
            place.write_bytes(changed(place.read_bytes()))

    @rule(key=keys, at=places, bit=st.integers(0, 7))
    def flip(self, key: bytes, at: int, bit: int) -> None:
        self.change(key, lambda data: data[:at] + bytes(byte ^ 1 << bit for byte in data[at : at + 1]) + data[at + 1 :])

    @rule(key=keys, nbytes=places)
    def cut_or_lengthen(self, key: bytes, nbytes: int) -> None:
        self.change(key, lambda data: data[:nbytes].ljust(nbytes, b"x"))

    @rule(key=keys, at=st.sampled_from([0, 4096, 8192]))
    def lose_a_page(self, key: bytes, at: int) -> None:
        """As a power cut does."""
        self.change(key, lambda data: data[:at] + bytes(len(data[at : at + 4096])) + data[at + 4096 :])

    @rule(key=keys, other=keys, attack=st.sampled_from([None, *HOSTILE]))
    def put_another(self, key: bytes, other: bytes, attack: Path | None) -> None:
        """Another chunk's file, or one that an attacker has made, in the place of the chunk's."""
        source = attack or self.place(other)
        if source.is_file() and source != self.place(key) and self.folder.is_dir():
            self.whole.discard(key)
            content = source.read_bytes()
            remove(self.place(key))
            self.place(key).write_bytes(content)

    @rule(key=keys, kind=st.sampled_from([NOTHING, *NO_FILES]))
    def put_no_file(self, key: bytes, kind: str) -> None:
        self.whole.discard(key)
        if self.root.is_dir() and not self.folder.is_file():
            self.folder.mkdir(parents=True, exist_ok=True)
            remove(self.place(key))
            NO_FILES.get(kind, remove)(self.place(key))

    @rule(kind=st.sampled_from(OBSTACLES))
    def put_in_the_way_of_quarantine(self, kind: str) -> None:
        remove(self.quarantine)
        if self.folder.is_dir():
            {"file": Path.touch, "link": lambda place: place.symlink_to(self.root)}.get(kind, remove)(self.quarantine)
            if kind == "everybody's folder":
                self.quarantine.mkdir()
                self.quarantine.chmod(0o777)

    @rule(kind=st.sampled_from(FOLDERS))
    def remove_folders(self, kind: str) -> None:
        self.whole.clear()
        remove({"the root": self.root, "the namespace": self.folder.parent}.get(kind, self.folder))
        if kind == "a file instead" and self.root.is_dir():
            self.folder.parent.mkdir(exist_ok=True)
            self.folder.touch()

    def teardown(self) -> None:
        """Whatever has happened, each chunk can be stored, once reads have set aside what is in its place."""
        if not hasattr(self, "root"):
            return
        if self.folder.is_file():
            self.folder.unlink()
        secret = self.root / "secret"
        assert not secret.exists() or secret.read_bytes() == self.secret
        self.put_root()
        for key in KEYS:
            for _ in range(3):
                self.write(key)
                self.read(key)
            if self.is_stuck(key):
                remove(self.place(key))
                self.write(key)
            assert self.is_sound(key)
            self.read(key)
        self.backend.close()
        self.patch.undo()
        shutil.rmtree(self.root)


TestAnyBytes = pytest.mark.slow("random changes of a folder need many examples")(AnyBytes.TestCase)
TestAnyBytes.settings = settings(stateful_step_count=100)


@pytest.mark.parametrize("direct", ["off", "auto"])
def test_each_obstacle_by_itself(direct: Literal["off", "auto"]) -> None:
    for kind in NO_FILES:
        for obstacle in OBSTACLES:
            machine = AnyBytes()
            machine.begin(direct=direct, in_pieces=False)
            machine.put_in_the_way_of_quarantine(kind=obstacle)
            machine.put_no_file(key=KEY, kind=kind)
            machine.read(key=KEY)
            machine.teardown()


@pytest.mark.parametrize("in_pieces", [False, True])
def test_each_length_and_each_lost_page_by_itself(in_pieces: bool) -> None:
    machine = AnyBytes()
    machine.begin(direct="off", in_pieces=in_pieces)
    whole = len(machine.secret)
    for edge in (0, 4096, PADDING, whole, whole + 4096, 2 * whole, 1 << 20):
        for nbytes in {max(0, edge - 1), edge, edge + 1}:
            machine.cut_or_lengthen(key=KEY, nbytes=nbytes)
            machine.read(key=KEY)
            machine.write(key=KEY)
    for lost in range(1, 8):
        for page in range(3):
            if lost >> page & 1:
                machine.lose_a_page(key=KEY, at=4096 * page)
        machine.read(key=KEY)
        machine.write(key=KEY)
    machine.teardown()


@pytest.mark.parametrize("kind", FOLDERS)
def test_each_folder_that_is_gone_by_itself(kind: str) -> None:
    machine = AnyBytes()
    machine.begin(direct="off", in_pieces=False)
    machine.remove_folders(kind=kind)
    machine.read(key=KEY)
    machine.look()
    machine.delete(chosen={KEY})
    machine.write(key=KEY)
    assert machine.root.exists() == (kind != "the root")
    machine.teardown()
