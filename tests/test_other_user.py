"""Another user of the machine, played by another user, against every promise of docs/security.md about him.

He may do what the kernel lets him: make folders, links and memory files first, under any name. He gets nothing, nothing
of his is used, and nobody waits for him.
"""

from __future__ import annotations

import fcntl
import json
import logging
import os
import shutil
import stat
import subprocess
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from subprocess import PIPE
from typing import Any

import pytest
import torch
from typer.testing import CliRunner

from lmkv import Config, Engine
from lmkv.backends.disk import LocalDiskBackend
from lmkv.backends.disk.root import NotTrustedError, Root
from lmkv.cli import findings
from lmkv.cli.app import app
from lmkv.errors import BackendUnavailable
from lmkv.memory import slab
from lmkv.memory.slab import Slab
from lmkv.protocols import Chunk, ReadStatus, WriteStatus
from lmkv.testing.backend_suite import chunk_of, listed, read_back
from tests.forked import Child, Tell
from tests.kit import LIMIT, raised

OTHER, GROUP = 65534, 54321
NAMESPACE = bytes(range(32))
SLOT = 4096

pytestmark = pytest.mark.skipif(os.geteuid() != 0, reason="only root can become another user")


def become(user: int, *groups: int) -> None:
    os.setgroups(groups)
    os.setgid(groups[0] if groups else user)
    os.setuid(user)
    os.umask(0)


def play(tell: Tell, user: int, groups: tuple[int, ...], work: Callable[..., Any], args: tuple[Any, ...]) -> None:
    become(user, *groups)
    tell(work(*args))
    threading.Event().wait()


class Another(Child):
    """The other user, who has done something, and lives until the end of a `with`. `answer`: what came of it."""

    def __init__(self, work: Callable[..., Any], *args: Any, user: int = OTHER, groups: tuple[int, ...] = ()) -> None:
        super().__init__(play, user, groups, work, args)
        self.answer = self.heard()


def done_by_another(work: Callable[..., Any], *args: Any, **who: Any) -> Any:
    with Another(work, *args, **who) as other:
        return other.answer


@pytest.fixture
def everybodys(memory_path: Path) -> Path:
    """As /dev/shm and /tmp are."""
    memory_path.chmod(0o1777)
    return memory_path


@pytest.fixture
def shared(everybodys: Path) -> Path:
    """A root folder that the operator made for everybody."""
    root = everybodys / "kv"
    root.mkdir()
    root.chmod(0o1777)
    return root


@pytest.fixture
def victim(everybodys: Path) -> Iterator[Path]:
    """Files of somebody else's on the same file system, which nobody is to touch."""
    folder = everybodys / "victim"
    folder.mkdir(0o700)
    for name in ("thesis", ".notes.tmp", "00.kv1"):
        (folder / name).write_bytes(bytes(8192))
    before = {path.name: path.read_bytes() for path in folder.iterdir()}
    yield folder
    assert {path.name: path.read_bytes() for path in folder.iterdir()} == before


def tensors(value: float = 0.0) -> list[torch.Tensor]:
    return [torch.full((16, 4, 2, 4), value)]


def open_engine(folder: Path, value: float = 0.0, **options: Any) -> Engine:
    options = {"local_disk": str(folder), "max_local_disk_size": 0.01, "disk_min_free": 0} | options
    config = Config(chunk_size=16, max_local_cpu_size=0.001, **options)
    return Engine.open(tensors(value), block_size=4, model="m", config=config)


def stored_in(root: Path) -> tuple[LocalDiskBackend, Chunk]:
    """A backend there, and a chunk that it has stored."""
    backend, chunk = LocalDiskBackend(root, NAMESPACE), chunk_of(5000)
    assert backend.write(chunk).status is WriteStatus.STORED
    return backend, chunk


# -- folders that he makes first ---------------------------------------------------------------------------


def make_folder(path: str, mode: int = 0o777) -> None:
    Path(path).mkdir()
    Path(path).chmod(mode)


@pytest.mark.parametrize("mode", [0o777, 0o755, 0o700, 0o1777, 0o2777])
@pytest.mark.parametrize("tier", ["local_disk", "shared_memory"])
def test_a_folder_that_he_has_made_is_refused_with_what_to_do(everybodys: Path, tier: str, mode: int) -> None:
    root = everybodys / "lmkv"
    done_by_another(make_folder, str(root), mode)
    options = {"shared_memory": str(root), "max_shared_memory_size": 0.01} if tier == "shared_memory" else {}
    options |= {"local_disk": None, "max_local_disk_size": 0} if options else {}
    with pytest.raises(BackendUnavailable, match=r"belongs to user 65534, and every user may write to .*: run chown"):
        open_engine(root, **options)
    assert list(root.iterdir()) == []


def test_a_folder_within_one_of_his_is_refused(everybodys: Path) -> None:
    done_by_another(make_folder, str(everybodys / "his"))
    raised(BackendUnavailable, "belongs to user 65534", LocalDiskBackend, everybodys / "his" / "deep" / "kv", NAMESPACE)


def link(target: str, place: str) -> None:
    os.symlink(target, place)


def test_a_link_of_his_is_refused_and_one_of_the_operators_is_not(everybodys: Path, tmp_path: Path) -> None:
    done_by_another(link, str(tmp_path), str(everybodys / "lmkv"))
    for folder in (everybodys / "lmkv", everybodys / "lmkv" / "deep" / "kv"):
        raised(BackendUnavailable, "belongs to user 65534", LocalDiskBackend, folder, NAMESPACE)
    assert list(tmp_path.iterdir()) == []
    (everybodys / "own").symlink_to(tmp_path)
    backend, chunk = stored_in(everybodys / "own")
    assert read_back(backend, chunk) == chunk.payload


def test_a_folder_of_his_where_not_everybody_may_make_one_was_given_to_him(tmp_path: Path) -> None:
    """As a service's own folder is, or one that a container mounts: root looks into it, and serves from it."""
    root = tmp_path / "kv"
    root.mkdir()
    os.chown(root, OTHER, OTHER)
    backend, chunk = stored_in(root)
    assert read_back(backend, chunk) == chunk.payload


def his_namespace(root: str, namespace: bytes, key: bytes, mode: int) -> None:
    assert LocalDiskBackend(root, namespace).write(chunk_of(5000, key)).status is WriteStatus.STORED
    folder = Path(root) / namespace.hex() / key[:1].hex()
    for path in (folder, folder.parent):
        path.chmod(mode)


@pytest.mark.parametrize("mode", [0o777, 0o700, 0o755])
def test_a_namespace_that_he_has_made_is_neither_served_nor_written(
    shared: Path, mode: int, caplog: pytest.LogCaptureFixture
) -> None:
    chunk = chunk_of(5000)
    done_by_another(his_namespace, str(shared), NAMESPACE, chunk.key, mode)
    backend = LocalDiskBackend(shared, NAMESPACE)
    assert "belongs to user 65534" in caplog.text
    before = sorted(shared.rglob("*"))
    read = backend.read(chunk.key, memoryview(bytearray(5000)))
    assert (read.status, type(read.error)) == (ReadStatus.FAILED, BackendUnavailable)
    written = backend.write(chunk_of(5000))
    assert (written.status, type(written.error)) == (WriteStatus.FAILED, BackendUnavailable)
    assert "run chown" in str(written.error)
    for call in (lambda: backend.contains([chunk.key]), lambda: listed(backend), lambda: backend.delete([chunk.key])):
        raised(BackendUnavailable, "", call)
    assert sorted(shared.rglob("*")) == before


def test_an_engine_starts_and_works_beside_his_namespaces(shared: Path) -> None:
    """They are neither counted nor evicted, and keep nobody from starting."""
    engine, own = open_engine(shared), next(path for path in shared.iterdir() if path.is_dir())
    engine.close()
    shutil.rmtree(own)
    done_by_another(his_namespace, str(shared), bytes.fromhex(own.name), bytes(32), 0o777)
    done_by_another(his_namespace, str(shared), bytes([9]) * 32, bytes(32), 0o777)
    with open_engine(shared) as engine:
        assert engine.store(range(64), range(16), wait=LIMIT) == 64
        assert engine.lookup(range(64)) == 64
        assert engine.drain(LIMIT)
    beside = LocalDiskBackend(shared, bytes([7]) * 32)
    assert list(beside.list_all()) == []
    assert len(list(shared.rglob("*.kv1"))) == 2


def rename_and_replace(root: str, key: bytes) -> None:
    own = Path(root) / NAMESPACE.hex()
    own.rename(own.with_name("away"))
    his_namespace(root, NAMESPACE, key, 0o777)


def test_what_he_puts_in_place_of_a_namespace_is_not_served(everybodys: Path, caplog: pytest.LogCaptureFixture) -> None:
    """Where there is no sticky bit, as in a volume of Kubernetes': he can delete, which a warning says."""
    root = everybodys / "kv"
    root.mkdir()
    root.chmod(0o777)
    backend, chunk = stored_in(root)
    assert f"{root}: run chmod +t" in caplog.text
    done_by_another(rename_and_replace, str(root), chunk.key)
    read = backend.read(chunk.key, memoryview(bytearray(5000)))
    assert read.status is ReadStatus.FAILED
    assert backend.write(chunk_of(5000)).status is WriteStatus.FAILED
    shutil.rmtree(root / NAMESPACE.hex())
    (root / "away").rename(root / NAMESPACE.hex())
    assert read_back(backend, chunk) == chunk.payload


def rename_and_link(root: str, target: str) -> None:
    os.rename(root, f"{root}.away")
    os.symlink(target, root)


def test_a_link_that_he_puts_in_place_of_the_root_is_not_used(everybodys: Path, victim: Path) -> None:
    """To a folder of its own user's, in which it would read, write and list."""
    everybodys.chmod(0o777)
    root = everybodys / "kv"
    backend, chunk = stored_in(root)
    done_by_another(rename_and_link, str(root), str(victim))
    assert backend.write(chunk).status is WriteStatus.FAILED
    read = backend.read(chunk.key, memoryview(bytearray(5000)))
    assert (read.status, type(read.error)) == (ReadStatus.FAILED, BackendUnavailable)
    assert backend.reserve_bytes(5000) == 0
    root.unlink()
    Path(f"{root}.away").rename(root)
    assert read_back(backend, chunk) == chunk.payload


def test_a_folder_of_ones_own_that_anybody_may_write_to_is_not_used(shared: Path) -> None:
    backend, chunk = stored_in(shared)
    folder = shared / NAMESPACE.hex() / chunk.key[:1].hex()
    for place in (folder, folder.parent):
        place.chmod(0o777)
        read = backend.read(chunk.key, memoryview(bytearray(5000)))
        assert "chmod o-w" in str(read.error)
        place.chmod(0o700)
    assert read_back(backend, chunk) == chunk.payload


# -- links that he puts where lmkv renames, deletes and lists ------------------------------------------------


def links_beside(root: str, target: str, name: str) -> None:
    os.symlink(target, f"{root}/{name}")


@pytest.mark.parametrize("how", ["link", "second name"])
def test_somebodys_file_in_place_of_the_count_is_not_followed(shared: Path, victim: Path, how: str) -> None:
    """By a link, or by a name as he can make one where the kernel protects none, and here root does for him."""
    if how == "link":
        done_by_another(links_beside, str(shared), str(victim / "thesis"), ".lmkv-use")
    else:
        os.link(victim / "thesis", shared / ".lmkv-use")
    backend = LocalDiskBackend(shared, NAMESPACE)
    assert backend.reserve_bytes(5000) == 0
    assert backend.write(chunk_of(5000)).status is WriteStatus.STORED


def plant_count(root: str) -> None:
    path = Path(root, ".lmkv-use")
    path.write_bytes(b"\xff" * 16)
    path.chmod(0o666)


def test_a_count_of_his_evicts_nothing(shared: Path) -> None:
    done_by_another(plant_count, str(shared))
    with open_engine(shared) as engine:
        for first in range(0, 640, 64):
            assert engine.store(range(first, first + 64), range(16), wait=LIMIT) == 64
        assert engine.drain(LIMIT)
        disk = engine.stats().store.tiers[1]
    assert (disk.evictions, disk.write_rejects) == (0, 0)


def test_inspect_says_what_it_leaves_out_and_shows_the_rest(shared: Path, caplog: pytest.LogCaptureFixture) -> None:
    done_by_another(his_namespace, str(shared), bytes([9]) * 32, bytes(32), 0o777)
    LocalDiskBackend(shared, NAMESPACE).write(chunk_of(5000))
    done = CliRunner().invoke(app, ["inspect", str(shared), "--json"])
    assert done.exit_code == 0, done.output
    assert [found["namespace"] for found in json.loads(done.stdout)["namespaces"]] == [NAMESPACE.hex()]
    assert "belongs to user 65534" in caplog.text


# -- what he may not see -----------------------------------------------------------------------------------


def seen_by_him(root: str, pid: int) -> dict[str, bool]:
    """Whether he gets at a chunk, or a slab."""

    def can(call: Callable[[], Any]) -> bool:
        try:
            call()
        except PermissionError:
            return False
        return True

    return {
        "files": can(lambda: [os.listdir(path.path) for path in os.scandir(root) if path.is_dir()]),
        "count": can(lambda: Path(root, ".lmkv-use").read_bytes()),
        "memory": can(lambda: os.listdir(f"/proc/{pid}/fd")),
    }


def test_he_reads_neither_files_nor_memory(shared: Path) -> None:
    with open_engine(shared) as engine:
        assert engine.store(range(64), range(16), wait=LIMIT) == 64
        assert engine.drain(LIMIT)
        seen = done_by_another(seen_by_him, str(shared), os.getpid())
        modes = {stat.S_IMODE(path.stat().st_mode) for path in shared.rglob("*")}
    assert seen == {"files": False, "count": False, "memory": False}
    assert modes == {0o700, 0o600}


# -- slabs, and the lock under which they are made ----------------------------------------------------------


def hold_locks(lock: str) -> str:
    """Whatever he may have locked, for as long as he lives."""
    made = ""
    for path in ("/dev/shm", "/tmp", "/", lock):
        try:
            fd = os.open(path, os.O_RDONLY)
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
            made += f"{path} "
        except OSError:
            continue
    return made


def test_he_keeps_no_engine_from_starting_by_locks(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    lock = slab._lock_file()
    with Another(hold_locks, lock) as other:
        assert "/dev/shm" in other.answer
        with open_engine(tmp_path):
            pass
    assert "slabs that are made" not in caplog.text


def squat(lock: str) -> None:
    fd = os.open(lock, os.O_CREAT | os.O_EXCL | os.O_RDWR, 0o666)
    fcntl.lockf(fd, fcntl.LOCK_EX)


def test_nor_by_the_lock_file_itself(
    everybodys: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    lock = str(everybodys / "lock")
    monkeypatch.setattr(slab, "_lock_file", lambda: lock)
    with Another(squat, lock), open_engine(tmp_path):
        assert lock in caplog.text
        assert "may take too much memory" in caplog.text


def huge_slab(name: str) -> None:
    for number in range(3):
        os.ftruncate(os.memfd_create(f"{name}.{number}", 0), 1 << 50)


def test_no_slab_of_his_counts_or_is_mapped(tmp_path: Path) -> None:
    engine = f"other-{os.getpid()}"
    with Another(huge_slab, f"lmkv-slab-{engine}"):
        assert slab.find_file(engine) is None
        with open_engine(tmp_path) as opened:
            assert opened.stats().store.tiers[0].capacity_bytes > 0
        own = Slab(SLOT, SLOT, shared=True, engine=engine)
        found = slab.find_file(engine)
        assert found is not None
        assert found[1] == own.ref.name
        own.close()


# -- folders that are shared on purpose ----------------------------------------------------------------------


def member(root: str, key: bytes) -> tuple[bool, int]:
    """Serve what another member has stored, delete it, and store the same key."""
    backend, chunk = LocalDiskBackend(root, NAMESPACE), chunk_of(5000, key)
    into = memoryview(bytearray(5000))
    read = backend.read(key, into)
    backend.reserve_bytes(backend.stored_bytes(5000))
    backend.delete([key])
    stored = backend.write(chunk).status is WriteStatus.STORED
    return read.status is ReadStatus.HIT and stored, backend.reserve_bytes(0)


@pytest.mark.parametrize("mask", [0o022, 0o077])
def test_a_group_shares_a_folder_that_was_given_to_it(everybodys: Path, mask: int) -> None:
    """Setgid, writable for the group and for nobody else: its members use what any of them has stored."""
    root = everybodys / "kv"
    root.mkdir()
    os.chown(root, 0, GROUP)
    root.chmod(0o2770)
    before = os.umask(mask)
    try:
        backend, chunk = LocalDiskBackend(root, NAMESPACE), chunk_of(5000)
        backend.reserve_bytes(backend.stored_bytes(5000))
        assert backend.write(chunk).status is WriteStatus.STORED
        for user in (1001, 1002):
            served, counted = done_by_another(member, str(root), chunk.key, user=user, groups=(GROUP,))
            assert served
            assert counted > 0
        read = backend.read(chunk.key, memoryview(bytearray(5000)))
        assert read.status is ReadStatus.HIT
        assert listed(backend) == {chunk.key: backend.stored_bytes(5000)}
    finally:
        os.umask(before)
    modes = {stat.S_IMODE(path.stat().st_mode) for path in root.rglob("*")}
    assert modes == {0o2770, 0o660}
    assert not done_by_another(os.access, str(root), os.R_OK)


def test_nobody_else_may_write_to_what_is_made_on_the_way_to_the_root(everybodys: Path) -> None:
    before = os.umask(0)
    try:
        root = everybodys / "a" / "b" / "kv"
        LocalDiskBackend(root, NAMESPACE).close()
    finally:
        os.umask(before)
    made = [everybodys / "a", everybodys / "a" / "b", root, root / NAMESPACE.hex()]
    assert [stat.S_IMODE(each.stat().st_mode) for each in made] == [0o755, 0o755, 0o700, 0o700]
    (everybodys / "file").touch()
    raised(BackendUnavailable, "a file is in the way", LocalDiskBackend, everybodys / "file" / "kv", NAMESPACE)


def test_users_have_namespaces_of_their_own_below_one_root(shared: Path) -> None:
    for user in (1001, 1002):
        done_by_another(his_namespace, str(shared), bytes([user % 256]) * 32, bytes(32), 0o700, user=user)
    assert len(list(shared.rglob("*.kv1"))) == 2


def test_the_way_to_a_folder_may_lead_through_what_others_were_given(tmp_path: Path) -> None:
    """As a home is its user's, or a volume: who may write there was let by those above."""
    home = tmp_path / "home"
    home.mkdir()
    os.chown(home, 1001, 1001)
    root = home / "kv"
    root.mkdir()
    os.chown(root, 1001, 1001)
    assert 1001 in Root.checked(root).trusted
    everybodys = root / "everybody's"
    his = everybodys / "his"
    his.mkdir(parents=True)
    everybodys.chmod(0o1777)
    os.chown(his, OTHER, OTHER)
    raised(NotTrustedError, "belongs to user 65534", Root.checked, his)


def test_no_warning_where_nothing_is_wrong(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING), open_engine(tmp_path / "kv"):
        pass
    assert not caplog.records


# -- processes of his -----------------------------------------------------------------------------------------


def test_doctor_reads_nothing_that_a_process_of_his_names(everybodys: Path) -> None:
    file = everybodys / "server.yaml"
    file.write_text("kv-transfer-config: {kv_connector: LMKVConnector}\nkv-offloading-size: 4")
    file.chmod(0o644)
    named = ["vllm", "serve", "m", "--config", str(file)]
    with subprocess.Popen(["/bin/sh", "-c", "echo; read line", *named], user=OTHER, stdin=PIPE, stdout=PIPE) as his:
        assert his.stdout is not None
        his.stdout.readline()
        found = list(findings.examine_servers())
        assert [each.problem for each in found if f"process {his.pid}" in each.value] == []
        assert [each.name for each in found if "of other users" in each.note] == ["not examined"]
        his.kill()
