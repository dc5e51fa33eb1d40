"""Any tree of files, folders, links, pipes, owners and modes where a root is expected: nothing beside it is touched.

What is read from it has the right bytes, whatever is asked ends with a documented error or none, and no file outside,
to which its links lead, is changed, moved, listed as a chunk or served.
"""

from __future__ import annotations

import json
import os
import shutil
import stat
import tempfile
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
from attrs import frozen
from hypothesis import event, example, given, settings, strategies as st
from typer.testing import CliRunner

from lmkv.backends.disk import LocalDiskBackend
from lmkv.backends.disk.folder import DESCRIPTION_FILE, description, digests
from lmkv.chunks.namespace import Namespace
from lmkv.cli.app import app
from lmkv.errors import LmkvError
from lmkv.protocols import Chunk, ReadStatus
from tests.backends.disk.attacks.test_attacks import FILES, KEY, NAMESPACE, PAYLOAD
from tests.kit import MEMORY

OTHER, SECRET = bytes([0xEE]) * 32, b"secret" * 2000
OWNERS = [0, 65534, 1001] if os.geteuid() == 0 else [os.geteuid()]
SOUND = next(path for path in FILES if path.stem == "sound").read_bytes()


@frozen
class Entry:
    """A path below the root has a `kind`, an owner, a mode, and content or a link's target."""

    path: str
    kind: str
    content: bytes
    target: str
    owner: int
    mode: int

    def make(self, root: Path, outside: Path) -> None:
        place = root / self.path
        if os.path.lexists(place):
            return
        with suppress(OSError):
            place.parent.mkdir(parents=True, exist_ok=True)
        with suppress(OSError):
            if self.kind == "folder":
                place.mkdir()
            elif self.kind == "pipe":
                os.mkfifo(place)
            elif self.kind == "link":
                place.symlink_to(self.target.replace("OUTSIDE", str(outside)))
            elif self.kind == "hard":
                os.link(outside / "thesis", place)
            else:
                place.write_bytes(self.content)
            if self.kind != "hard":
                os.chown(place, self.owner, -1, follow_symlinks=False)
            if self.kind not in ("link", "hard"):
                place.chmod(self.mode)


digits, key = NAMESPACE.hex(), KEY.hex()
paths = st.sampled_from(
    [
        *(f"{name}/{below}" for name in (digits, OTHER.hex()) for below in (
            *(f"{key[:2]}/{key}.kv1", f"{key[:2]}/.1-ab.tmp", f"{key[:2]}/{bytes(32).hex()}.kv1", key[:2], "00"),
            *(f"00/{bytes(32).hex()}.kv1", "quarantine", "quarantine/old", DESCRIPTION_FILE, ".2-cd.tmp", "zz"),
        )),
        *(digits, OTHER.hex(), ".lmkv-use", "other"),
    ]
)  # fmt: skip
contents = st.one_of(
    st.sampled_from([path.read_bytes() for path in FILES]),
    st.sampled_from([b"", b"\xff" * 16, b"[" * 60_000, b'{"a":' * 9000, b"9" * 60_000, b"{}", SECRET]),
    st.binary(max_size=100),
)
entries = st.builds(
    Entry, path=paths, kind=st.sampled_from(["file", "file", "folder", "pipe", "link", "link", "hard"]),
    content=contents,
    target=st.sampled_from(["OUTSIDE", "OUTSIDE/thesis", "OUTSIDE/tree", ".", "..", "../..", "nowhere", key[:2]]),
    owner=st.sampled_from(OWNERS), mode=st.sampled_from([0o777, 0o700, 0o755, 0o000, 0o1777, 0o2770, 0o666]),
)  # fmt: skip


def state_beside(folder: Path, root: Path) -> dict[str, tuple[int, int, bytes]]:
    """Every path in a folder except those in the root there."""
    found = {}
    for path in sorted(folder.rglob("*")):
        if root in path.parents:
            continue
        status = path.lstat()
        content = path.read_bytes() if stat.S_ISREG(status.st_mode) else b""
        found[str(path.relative_to(folder))] = status.st_mode, status.st_uid, content
    return found


def attempts(root: Path) -> list[Callable[[], object]]:
    backend = LocalDiskBackend(root, NAMESPACE)

    def read() -> None:
        into = memoryview(bytearray(len(PAYLOAD)))
        found = backend.read(KEY, into)
        assert found.status is not ReadStatus.HIT or into == PAYLOAD
        event(found.status.name)

    def write() -> None:
        written = backend.write(Chunk(KEY, memoryview(PAYLOAD)))
        event(written.status.name)

    def used_again() -> None:
        """A chunk that was reported as stored is served, or is found damaged once."""
        for _ in range(3):
            write()
            read()

    return [
        read,
        lambda: [list(batch) for batch in backend.list_all()],
        lambda: backend.contains([KEY, bytes(32)]),
        lambda: backend.reserve_bytes(1),
        write,
        lambda: backend.reclaim([KEY, OTHER + KEY, OTHER + bytes(32)]),
        used_again,
        lambda: [description(str(root / name)) for name in (digits, OTHER.hex())],
        lambda: digests(root),
        lambda: [list(batch) for batch in backend.list_keys()],
    ]


def with_link(place: str) -> list[Entry]:
    """Another user's namespace, a part of which is a link out of the folder."""
    his = OTHER.hex()
    parts = {"": his, "00": f"{his}/00", "quarantine": f"{his}/quarantine", "chunk": f"{his}/00/{bytes(32).hex()}.kv1"}
    kinds = dict.fromkeys(parts, "folder") | {"chunk": "file", place: "link"}
    return [Entry(path, kinds[part], SECRET, "OUTSIDE", OWNERS[-1], 0o777) for part, path in parts.items()]


@pytest.mark.slow("random trees of files need many examples")
@example(with_link(""), 0o1777, True)
@example(with_link("00"), 0o1777, True)
@example(with_link("quarantine"), 0o1777, True)
@given(st.lists(entries, max_size=8), st.sampled_from([0o700, 0o777, 0o1777, 0o2770, 0o3777]), st.booleans())
@settings(max_examples=300)
def test_any_folder(tree: list[Entry], mode: int, commands: bool) -> None:
    with tempfile.TemporaryDirectory(prefix="lmkv-any-", dir=MEMORY) as parent:
        root, outside = Path(parent, "a", "b", "root"), Path(parent, "outside")
        (outside / "tree" / key[:2]).mkdir(parents=True)
        for path in (outside / "thesis", outside / ".1-aa.tmp", outside / "tree" / key[:2] / ".3-cc.tmp"):
            path.write_bytes(SECRET)
        (outside / "tree" / key[:2] / f"{key}.kv1").write_bytes(SOUND)
        root.mkdir(parents=True)
        root.chmod(mode)
        for entry in tree:
            entry.make(root, outside)
        before = state_beside(Path(parent), root)
        with suppress(LmkvError):
            for attempt in attempts(root):
                with suppress(LmkvError):
                    attempt()
        if commands:
            for words in ("inspect --json", "inspect --verify", "prune --max-size 0", "clear -y"):
                verb, *options = words.split()
                done = CliRunner().invoke(app, [verb, str(root), *options])
                assert done.exception is None or isinstance(done.exception, SystemExit), done.exception
        assert state_beside(Path(parent), root) == before
        for path in root.rglob("*"):
            if path.is_dir() and not path.is_symlink():
                path.chmod(0o700)
        shutil.rmtree(root)


@given(contents)
@settings(max_examples=200)
def test_any_description(content: bytes) -> None:
    with tempfile.TemporaryDirectory(dir=MEMORY) as root:
        folder = Path(root, digits)
        folder.mkdir(mode=0o700)
        (folder / DESCRIPTION_FILE).write_bytes(content)
        assert description(str(folder)) is None


def test_a_description_with_any_field_of_another_type(tmp_path: Path) -> None:
    namespace = Namespace(model="m", dtype="float32", chunk_size=16, block_size=16)
    folder = tmp_path / namespace.digest.hex()
    folder.mkdir()
    fields = {"model": "m", "dtype": "float32", "chunk_size": 16, "block_size": 16}
    values: list[Any] = [None, [], {}, 1.5, 10**400, "a", [[[]]], {"a": {"b": 1}}, True]
    for value in values:
        for name in (*fields, "extra", "layout"):
            (folder / DESCRIPTION_FILE).write_text(json.dumps({**fields, name: value}))
            found = description(str(folder))
            assert found is None or found == namespace, (name, value)
