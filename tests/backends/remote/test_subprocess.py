"""Clients in processes of their own, over a folder; over real servers in test_mooncake and test_infinistore."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest

from lmkv.backends import CPUPinnedBackend, WrapperBackend
from lmkv.backends.remote.base import RemoteOptions
from lmkv.errors import ConfigError, UsageError
from lmkv.memory.slab import Slab
from lmkv.policies import LRU
from lmkv.protocols import Chunk, Presence, ReadStatus, Tier
from lmkv.store.tiered import TieredStore
from lmkv.testing.backend_suite import chunk_of, new_key, read_back, statuses
from tests.backends.remote.folder_store import UNREADABLE, FolderBackend, NoClientBackend
from tests.backends.remote.server_suite import NAMESPACE, STORED, assert_unavailable
from tests.backends.remote.subprocess_suite import InSlab, ProcessSuite, client_of, process_of
from tests.kit import LIMIT, eventually, raised


class TestProcesses(ProcessSuite):
    kind = FolderBackend

    @pytest.fixture(autouse=True)
    def _folder(self, tmp_path: Path) -> None:
        self.folder = tmp_path
        self.url = "folder://host:1/"

    def backend_of(self, query: str = "", **options: object) -> FolderBackend:
        return super().backend_of(f"{query or '?clients=1'}&folder={self.folder}", **options)  # type: ignore[no-any-return]

    def test_processes_leave_when_their_engine_is_killed(self) -> None:
        program = """if True:
            import os, signal, sys
            from lmkv.testing.backend_suite import chunk_of
            from lmkv.backends.remote.base import RemoteOptions
            from tests.backends.remote.folder_store import FolderBackend
            backend = FolderBackend(sys.argv[1], bytes(32), RemoteOptions(timeout=10.0))
            print(*(backend.write(chunk_of(100)).status.value for _ in range(20)))
            print(*(client._process.pid for client in backend._clients), flush=True)
            os.kill(os.getpid(), signal.SIGKILL)
        """
        command = [sys.executable, "-c", program, f"{self.url}?folder={self.folder}"]
        done = subprocess.run(command, check=False, capture_output=True, text=True)
        stored, pids = done.stdout.splitlines()
        assert set(stored.split()) == {"stored"}
        assert len(pids.split()) == 2
        for pid in pids.split():
            eventually((self.folder / f"left-{pid}").exists, "it leaves the store")
            eventually(lambda pid=pid: not Path(f"/proc/{pid}").exists(), "it ends")  # type: ignore[misc]

    def test_options_are_in_no_arguments(self, backend: FolderBackend) -> None:
        """Everybody on a machine sees those."""
        chunk = chunk_of(100)
        backend.write(chunk)
        arguments = Path(f"/proc/{process_of(backend, chunk).pid}/cmdline").read_bytes()
        assert b"folder_store" in arguments
        assert bytes(self.folder) not in arguments

    def test_an_interrupt_at_the_terminal_is_not_theirs_and_a_busy_processor_is_shared(
        self, backend: FolderBackend
    ) -> None:
        """Linux shares it among sessions: a process in one of its own waited for it for seconds."""
        chunk = chunk_of(100)
        backend.write(chunk)
        pid = process_of(backend, chunk).pid
        assert os.getpgid(pid) == pid
        assert os.getsid(pid) == os.getsid(0)

    def test_a_client_that_is_not_installed_is_named(self) -> None:
        with pytest.raises(ConfigError, match=r"needs the package lmkv_has_no_such_client: .*\bnone\b"):
            NoClientBackend(self.url, NAMESPACE)

    def test_a_process_that_cannot_start_is_unavailable(self) -> None:
        """Its module has no Engine."""
        backend = WithoutEngine(f"{self.url}?folder={self.folder}", NAMESPACE, RemoteOptions(timeout=10.0))
        assert_unavailable(backend, chunk_of(100))
        backend.close()


class FolderInSlab(InSlab, FolderBackend):
    __module__ = FolderBackend.__module__


class TestProcessesWithASlab(TestProcesses):
    kind = FolderInSlab


@pytest.fixture
def slab() -> Iterator[Slab]:
    slab = Slab(1 << 20, 4 << 20, shared=True)
    yield slab
    slab.close()


def folder_backend(folder: Path, slab: Slab, query: str = "") -> FolderBackend:
    """With one process, which has the slab."""
    url = f"folder://host:1/?clients=1&folder={folder}{query}"
    backend = FolderBackend(url, NAMESPACE, RemoteOptions(timeout=10.0, chunk_tokens=256))
    backend.register_memory(slab.descriptor, slab.address, slab.nbytes)
    return backend


@pytest.fixture
def backend(tmp_path: Path, slab: Slab) -> Iterator[FolderBackend]:
    with closing(folder_backend(tmp_path, slab)) as backend:
        yield backend


def passed_through(backend: FolderBackend) -> bytes:
    """The memory that it has in common with its only process."""
    (client,) = backend._clients
    return bytes(client._memory)


@pytest.mark.parametrize(("query", "copied"), [("", False), ("&zero_copy=0", True)])
def test_payloads_in_the_slab_are_not_copied(tmp_path: Path, slab: Slab, query: str, copied: bool) -> None:
    backend, payload = folder_backend(tmp_path, slab, query), os.urandom(slab.slot_bytes)
    slab.view(1)[:] = payload
    chunk = Chunk(new_key(), slab.view(1))
    assert backend.write(chunk).status is STORED
    read = backend.read(chunk.key, slab.view(3))
    assert read.status is ReadStatus.HIT
    assert slab.view(3) == payload
    assert (payload[:100] in passed_through(backend)) == copied
    assert slab.view(0) == slab.view(2) == bytes(slab.slot_bytes)
    backend.close()


def test_parts_of_slots_and_other_memory(backend: FolderBackend, slab: Slab) -> None:
    """A view inside the slab, one that ends beyond it, and one that can only be read."""
    payload = os.urandom(5000)
    slab.view(3)[-5000:] = payload
    for place in (slab.view(3)[-5000:], memoryview(payload), memoryview(bytearray(payload))):
        chunk = Chunk(new_key(), place)
        assert backend.write(chunk).status is STORED
        for into in (slab.view(0)[77:5077], memoryview(bytearray(5000))):
            read = backend.read(chunk.key, into)
            assert read.status is ReadStatus.HIT
            assert into == payload


def test_a_read_that_fails_ends_its_process_before_the_slot_is_used_again(
    backend: FolderBackend, tmp_path: Path, slab: Slab
) -> None:
    chunk, sound = chunk_of(100), chunk_of(100)
    assert statuses(backend, [chunk, sound]) == [STORED] * 2
    process = process_of(backend, chunk)
    (tmp_path / backend.name_of(chunk.key).replace("/", "-")).write_bytes(UNREADABLE)
    read = backend.read(chunk.key, slab.view(0)[:100])
    assert "it cannot be read" in str(read.error)
    assert process.poll() is not None
    assert read_back(backend, sound) == sound.payload


def test_a_call_that_is_interrupted_leaves_no_answer_to_the_next_one(backend: FolderBackend, slab: Slab) -> None:
    chunk, other = chunk_of(100), chunk_of(100)
    assert statuses(backend, [chunk, other]) == [STORED] * 2
    process = process_of(backend, chunk)
    process.send_signal(signal.SIGSTOP)

    def interrupt(number: int, frame: object) -> None:
        raise KeyboardInterrupt

    before = signal.signal(signal.SIGALRM, interrupt)
    signal.setitimer(signal.ITIMER_REAL, 0.2)
    try:
        raised(KeyboardInterrupt, "", lambda: backend.read(chunk.key, slab.view(0)[:100]))
    finally:
        signal.signal(signal.SIGALRM, before)
    assert process.poll() is not None
    assert read_back(backend, other) == other.payload


def test_an_answer_to_an_interrupted_call_is_not_the_next_ones(backend: FolderBackend) -> None:
    chunk = chunk_of(100)
    assert backend.write(chunk).status is STORED
    client: Any = client_of(backend, backend.name_of(chunk.key))
    client._connection = InterruptedSocket(fileno=client._connection.detach())
    raised(KeyboardInterrupt, "", backend.contains, [new_key()])
    assert backend.contains([chunk.key]) == [True]
    assert backend.contains([new_key()]) == [False]


class InterruptedSocket(socket.socket):
    """Raises as soon as a message is sent."""

    def send(self, *message: Any) -> int:
        super().send(*message)
        raise KeyboardInterrupt


def test_large_payloads_in_the_slab_need_no_other_room(tmp_path: Path) -> None:
    with closing(Slab(40 << 20, 80 << 20, shared=True)) as slab, closing(folder_backend(tmp_path, slab)) as backend:
        small, large = chunk_of(100), Chunk(new_key(), slab.view(0))
        slab.view(0)[:8] = b"the data"
        assert backend.write(small).status is STORED
        process = process_of(backend, small)
        assert backend.write(large).status is STORED
        read = backend.read(large.key, slab.view(1))
        assert read.status is ReadStatus.HIT
        assert slab.view(1) == slab.view(0)
        assert process_of(backend, small) is process


def test_memory_is_registered_once_and_first(backend: FolderBackend, slab: Slab) -> None:
    with pytest.raises(UsageError, match="only once, and before any other"):
        backend.register_memory(slab.descriptor, slab.address, slab.nbytes)


def test_a_living_fork_keeps_no_process_from_leaving(tmp_path: Path) -> None:
    backend = FolderBackend(f"folder://host:1/?clients=1&folder={tmp_path}", NAMESPACE, RemoteOptions(timeout=10.0))
    chunk = chunk_of(100)
    assert backend.write(chunk).status is STORED
    process = process_of(backend, chunk)
    read, write = os.pipe()
    fork = os.fork()
    if not fork:
        os.close(write)
        os.read(read, 1)
        os._exit(0)
    try:
        backend.close()
        assert process.returncode == 0
        assert (tmp_path / f"left-{process.pid}").exists()
    finally:
        os.close(write)
        os.close(read)
        os.waitpid(fork, 0)


def test_whoever_is_connected_to_a_client_is_dropped_and_all_who_come_later() -> None:
    program = """if True:
        import os, socket
        from lmkv.backends.remote.mooncake import drop_inbound
        listener = socket.create_server(("127.0.0.1", 0))
        ends = [socket.create_connection(listener.getsockname())]
        accepted = [listener.accept()[0]]
        ends.append(socket.create_connection(listener.getsockname()))
        before = len(os.listdir("/proc/self/fd"))
        try:
            drop_inbound()
        except ConnectionError as error:
            print(error)
        accepted.append(listener.accept()[0])
        drop_inbound()
        assert len(os.listdir("/proc/self/fd")) == before + 1
        for end in ends:
            end.send(b"hello")
        for each in accepted:
            each.settimeout(0.3)
            try:
                print(each.recv(5))
            except TimeoutError:
                print("dropped")
        try:
            socket.create_connection(listener.getsockname(), 0.3)
        except TimeoutError:
            print("not reached")
    """
    done = subprocess.run([sys.executable, "-c", program], check=False, capture_output=True, text=True)
    refused, *rest = done.stdout.splitlines()
    assert refused.startswith("lmkv stopped its Mooncake client"), done.stderr
    assert rest == ["dropped", "dropped", "not reached"], done.stderr


def test_a_store_has_its_slab_registered(tmp_path: Path) -> None:
    """Through a wrapper, too: the slots of the store are the process's."""
    payload = os.urandom(1 << 20)
    backend = FolderBackend(f"folder://host:1/?clients=1&folder={tmp_path}", NAMESPACE, RemoteOptions(timeout=10.0))
    host = CPUPinnedBackend(4 << 20, 1 << 20, shared=True, populate=False)
    with closing(TieredStore(Tier(host, LRU()), [Tier(WrapperBackend(backend), LRU())], retain=False)) as store:
        key = new_key()
        with store.reserve([key]) as reservation:
            store.slab.view(reservation.slots[key])[:] = payload
            reservation.commit()
        eventually(lambda: backend.contains([key]) == [True])
        eventually(lambda: store.catalog.lookup([key]) == [Presence.LOWER], "it is in no slot any more")
        store.slab.array[:] = 0
        promotion = store.promote([key])
        assert promotion.wait(LIMIT)
        with store.lease(promotion.keys) as lease:
            assert store.slab.view(lease.slots[0]) == payload
        promotion.release()
        assert payload[:100] not in passed_through(backend)


class WithoutEngine(FolderBackend):
    pass
