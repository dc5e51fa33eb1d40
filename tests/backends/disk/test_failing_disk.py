"""An error of the moment is a miss: a disk that was in trouble for two seconds has all its chunks afterwards."""

from __future__ import annotations

import ctypes
import errno
import json
import logging
import os
import platform
import resource
import shutil
import struct
import subprocess
import sys
from collections import defaultdict
from pathlib import Path
from typing import Any

import pytest

from lmkv.backends.disk import LocalDiskBackend
from lmkv.errors import BackendUnavailable
from lmkv.protocols import ReadStatus
from lmkv.testing import ManualClock
from lmkv.testing.backend_suite import chunk_of, new_key
from tests.backends.disk.failing_disk import CALLS, CHUNKS, ERRORS
from tests.forked import Child, Tell
from tests.kit import LIMIT, raised
from tests.servers import missing
from tests.store.shared_store import CHUNK, KEYS, get, open_store, put

HERE = Path(__file__).parent
Outcome = dict[str, Any]


FAILS_EACH_CALL = pytest.mark.slow("its fixture has each system call fail, in a process for each error")


@pytest.fixture(scope="module")
def outcomes(tmp_path_factory: pytest.TempPathFactory) -> dict[str, list[Outcome]]:
    """By error: of a process whose C library fails, so that Python and lmkv are as they always are."""
    if shutil.which("gcc") is None:
        missing("gcc", "the calls of a disk that fails are a small C library")
    folder = tmp_path_factory.mktemp("failing")
    library, control, below = folder / "failing.so", folder / "control", folder / "kv"
    subprocess.run(["gcc", "-shared", "-fPIC", "-o", library, HERE / "failing.c", "-ldl"], check=True, timeout=LIMIT)
    control.write_bytes(bytes(16))
    below.mkdir()
    environment = {"LD_PRELOAD": str(library), "LMKV_FAIL_FILE": str(control), "LMKV_FAIL_BELOW": str(below)}
    words = [sys.executable, "-m", "tests.backends.disk.failing_disk", str(below)]
    done = subprocess.run(words, env=os.environ | environment, capture_output=True, text=True, check=False, timeout=900)
    assert done.returncode == 0, done.stderr
    found: dict[str, list[Outcome]] = defaultdict(list)
    for line in done.stdout.splitlines():
        outcome = json.loads(line)
        found[outcome["error"]].append(outcome)
    return found


@FAILS_EACH_CALL
@pytest.mark.parametrize("error", ERRORS)
def test_a_disk_that_was_in_trouble_has_all_its_chunks(outcomes: dict[str, list[Outcome]], error: str) -> None:
    assert len(outcomes[error]) == 2 * len(CALLS)
    for outcome in outcomes[error]:
        assert outcome["failed"], outcome
        assert (outcome["files"], outcome["served"], outcome["lost"]) == (CHUNKS, CHUNKS, 0), outcome


@FAILS_EACH_CALL
@pytest.mark.parametrize("error", ERRORS)
def test_the_breaker_reacts_to_every_error_of_the_moment(outcomes: dict[str, list[Outcome]], error: str) -> None:
    """Where every call fails. A listing, and folders that are there already, are none of its business."""
    quiet = {
        outcome["calls"] for outcome in outcomes[error] if outcome["every"] == 1 and "open" not in outcome["states"]
    }
    assert quiet <= {"list", "make"}


def forbid(call: int, code: int) -> None:
    """Have the kernel answer a system call of this process, and of all its threads, with an error."""
    returns = [(0x20, 0, 0, 0), (0x15, 0, 1, call), (6, 0, 0, 0x50000 | code), (6, 0, 0, 0x7FFF0000)]
    program = ctypes.create_string_buffer(b"".join(struct.pack("HBBI", *each) for each in returns))
    libc = ctypes.CDLL(None, use_errno=True)
    assert libc.prctl(38, 1, 0, 0, 0) == 0, "no new privileges"
    filters = struct.pack("HP", len(returns), ctypes.addressof(program))
    assert libc.prctl(22, 2, ctypes.create_string_buffer(filters)) == 0, "filter system calls"


FLOCK = {"x86_64": 73, "aarch64": 32}


def store_without_locks(tell: Tell, folder: str, code: int) -> None:
    forbid(FLOCK[platform.machine()], code)
    records: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: records.append(record.getMessage())  # type: ignore[method-assign]
    logging.getLogger("lmkv").addHandler(handler)
    for _ in range(2):
        store = open_store(folder, 1, 4 * (CHUNK + 4096))
        for key in KEYS[:10]:
            put(store, [key])
            assert store.drain(LIMIT)
            store.drop([key])
        served = sum(get(store, [key]) for key in KEYS[:10])
        store.close()
    tell((served, records, sorted(os.listdir(folder))))


@pytest.mark.skipif(platform.machine() not in FLOCK, reason="the number of the system call is another one")
@pytest.mark.parametrize("code", [errno.EOPNOTSUPP, errno.ENOLCK, errno.ENOSYS], ids=errno.errorcode.get)
def test_a_file_system_without_locks_is_used_and_said_once(tmp_path: Path, code: int) -> None:
    with Child(store_without_locks, str(tmp_path), code) as child:
        served, records, names = child.heard()
    assert served == 4
    (said,) = (each for each in records if "cannot be locked" in each)
    assert str(tmp_path) in said
    assert "give each engine a separate folder" in said
    assert names == [".lmkv-medium", ".lmkv-use", (b"\1" * 32).hex()]


def without_descriptors(tell: Tell, folder: str, chunks: int) -> None:
    """Store chunks, load them while the process has no descriptor to spare, and again when it has."""
    clock = ManualClock()
    store = open_store(folder, 1, 1000 * CHUNK, clock)
    for key in KEYS[:chunks]:
        put(store, [key])
        assert store.drain(LIMIT)
        store.drop([key])
    limits, taken = resource.getrlimit(resource.RLIMIT_NOFILE), []
    resource.setrlimit(resource.RLIMIT_NOFILE, (256, limits[1]))
    try:
        while True:
            taken.append(os.open("/dev/null", os.O_RDONLY))
    except OSError:
        pass
    served = 0
    for _ in range(3):
        for key in KEYS[:chunks]:
            served += get(store, [key])
            clock.advance(0.1)
    tell((served, store.stats().tiers[1].read_failures))
    for fd in taken:
        os.close(fd)
    resource.setrlimit(resource.RLIMIT_NOFILE, limits)
    clock.advance(100)
    found = store.look_up_shared(KEYS[:chunks])
    assert found is None or found.wait(LIMIT)
    for key in KEYS[:chunks]:
        served += get(store, [key])
        store.drop([key])
    tell((served, store.stats().tiers[1].lost))
    store.close()


def test_a_process_without_descriptors_deletes_nothing(tmp_path: Path) -> None:
    chunks = 40
    with Child(without_descriptors, str(tmp_path), chunks) as child:
        served, failures = child.heard()
        assert served == 0
        assert failures >= 5
        assert child.heard() == (chunks, 0)
        assert child.ended() == 0
    assert len(list(tmp_path.rglob("*.kv1"))) == chunks


def test_a_folder_that_cannot_be_asked_is_not_one_without_chunks(tmp_path: Path) -> None:
    """The breaker has to hear of it, and the listing must not forget what it could not see."""
    backend, chunk = LocalDiskBackend(tmp_path, bytes(32)), chunk_of(5000)
    backend.write(chunk)
    limits = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (0, limits[1]))
    try:
        raised(BackendUnavailable, "", backend.contains, [chunk.key])
        raised(BackendUnavailable, "", lambda: list(backend.list_all()))
        read = backend.read(chunk.key, memoryview(bytearray(5000)))
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, limits)
    assert (read.status, type(read.error)) == (ReadStatus.FAILED, BackendUnavailable)
    assert backend.contains([chunk.key, new_key()]) == [True, False]
