"""Chunks in shared memory are read straight into blocks; those that cannot be read are computed."""

from __future__ import annotations

import pickle
import random
import tempfile
from collections.abc import Iterator
from contextlib import closing, contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from attrs import evolve
from hypothesis import event, given, strategies as st

from lmkv.backends.disk.shared_memory import SharedMemoryBackend
from lmkv.chunks.hashing import TailKey
from lmkv.chunks.layout import KVLayout, LayerPages
from lmkv.memory.copier import ChunkCopy, Run
from lmkv.memory.cpu_copier import CPUCopier
from lmkv.memory.paged import PagedMemory
from lmkv.memory.slab import Slab
from lmkv.protocols import Chunk
from lmkv.store.in_place import InPlace
from lmkv.store.leases import IN_PLACE
from lmkv.store.tiers.tails import Payloads
from lmkv.vllm.block_map import Group
from lmkv.vllm.block_reader import BlockReader
from lmkv.vllm.metadata import CopyOrder
from tests.kit import LIMIT
from tests.vllm.scheduler.simulated_vllm import SimulatedRequest, SimulatedVLLM

TOKENS = 44
"""Length of a prompt: five chunks of 8 tokens, and a tail."""


@pytest.fixture(scope="module", params=[0, 16 << 10], ids=["into blocks", "by a slot"], autouse=True)
def _small(request: pytest.FixtureRequest) -> Iterator[None]:
    """Pages as small as those of these tests are copied from a slot of the worker's, which is tested as well."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("lmkv.vllm.block_reader._SMALL", request.param)
        yield


@contextmanager
def in_memory() -> Iterator[Path]:
    parent = Path("/dev/shm")
    with tempfile.TemporaryDirectory(dir=parent if parent.is_dir() else None) as folder:
        yield Path(folder)


@contextmanager
def engine_over(folder: Path, seed: int = 0, **options: Any) -> Iterator[SimulatedVLLM]:
    settings = {"num_blocks": 90, "chunk_size": 8, "ram_chunks": 16, "lower_chunks": 100, **options}
    with closing(SimulatedVLLM(random.Random(seed), groups=[Group(4)], shared_memory=folder, **settings)) as simulated:
        simulated.local_hits = 0.0
        yield simulated


def ask(engine: SimulatedVLLM, name: str, tokens: int = TOKENS) -> SimulatedRequest:
    request = SimulatedRequest(name, list(range(tokens)), tokens, 1, "a")
    engine.add(request)
    engine.finish()
    assert request.status == "ended"
    return request


def store(folder: Path, tokens: int = TOKENS) -> list[Path]:
    """Store a prompt by an engine that ends; returns the files, in the order of their names."""
    with engine_over(folder) as first:
        ask(first, "stores", tokens)
    return sorted(folder.rglob("*.kv1"))


def reads(engine: SimulatedVLLM) -> tuple[int, int, int]:
    """Counters of shared memory: reads, hits, and chunks that were gone or damaged."""
    tier = engine.store.stats().tiers[1]
    return tier.reads, tier.hits, tier.lost


@pytest.mark.parametrize("tokens", [8, 9, 41, TOKENS, 48])
def test_a_hit_takes_no_slot(tokens: int) -> None:
    with in_memory() as folder:
        store(folder, tokens)
        with engine_over(folder) as engine:
            request = ask(engine, "asks", tokens)
            assert request.loaded == tokens - 1
            files = -(-request.loaded // 8)
            assert reads(engine) == (files, files, 0)
            assert engine.counts["recomputed"] == 0
            assert engine.store.stats().tiers[0].hits == 0
            assert engine.store.stats().tiers[0].chunks <= 1, "at most the tail that the answer has made longer"


def test_chunks_of_host_memory_are_copied_and_the_rest_is_read() -> None:
    with in_memory() as folder:
        store(folder, 16)
        with engine_over(folder, save_unfull_chunk=False) as engine:
            ask(engine, "stores more", 33)
            assert reads(engine)[:2] == (2, 2)
            ask(engine, "asks", 33)
            assert reads(engine)[:2] == (4, 4), "the first two chunks are still in no slot"
            assert engine.store.stats().tiers[0].hits == 2


@pytest.mark.parametrize("seed", range(8))
def test_a_hit_may_begin_within_a_chunk(seed: int) -> None:
    with in_memory() as folder:
        files = store(folder)
        with engine_over(folder, seed) as engine:
            engine.local_hits = 1.0
            for number in range(4):
                ask(engine, f"{number}")
                engine.scheduler.store.clear(lower=False)
            assert engine.counts["hits"] == 4
            assert engine.counts["recomputed"] == 0
        assert {*files} <= {*folder.rglob("*.kv1")}


def test_a_file_that_is_gone_before_the_lookup_is_no_hit() -> None:
    with in_memory() as folder:
        store(folder)
        with engine_over(folder) as engine:
            for file in folder.rglob("*.kv1"):
                file.unlink()
            assert ask(engine, "asks").loaded == 0
            assert engine.counts["recomputed"] == 0
            assert engine.store.stats().tiers[1].reads == 0


def broken(files: list[Path], number: int, how: str) -> None:
    file = files[number]
    data = bytearray(file.read_bytes())
    if how == "gone":
        file.unlink()
    elif how == "cut off":
        file.write_bytes(data[: len(data) // 2 + 1])
    elif how == "changed":
        # Within the payload, which has one page of memory here.
        data[min(4096 + 3, len(data) - 1)] ^= 1
        file.write_bytes(data)
    else:
        file.write_bytes(files[number - 1].read_bytes())


@pytest.mark.parametrize("how", ["gone", "cut off", "changed", "another chunk"])
@pytest.mark.parametrize("number", range(6))
def test_a_file_that_is_broken_after_the_promise_is_computed(
    number: int, how: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    with in_memory() as folder:
        files = store(folder)
        assert len(files) == 6
        with engine_over(folder) as engine:
            read = BlockReader.read

            def breaks(self: BlockReader, order: Any) -> Any:
                monkeypatch.setattr(BlockReader, "read", read)
                broken(files, number, how)
                return read(self, order)

            monkeypatch.setattr(BlockReader, "read", breaks)
            ask(engine, "asks")
            assert engine.counts["recomputed"] == 1
            assert reads(engine)[2] == 1, "it is forgotten"
            again = ask(engine, "asks again")
            assert again.loaded == TOKENS - 1, "it was stored anew"
            assert engine.counts["recomputed"] == 1


def test_a_worker_that_may_not_enter_the_folder_is_told_of_once(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    with in_memory() as folder:
        store(folder)
        with engine_over(folder, load_or_recompute=False) as engine:
            monkeypatch.setattr("lmkv.vllm.block_reader.SharedMemoryBackend.at", lambda place: _refused(place))
            ask(engine, "asks")
            assert engine.counts["recomputed"] == 1
            assert caplog.text.count("shared memory is copied into host memory from now on") == 1
            engine.scheduler.store.clear(lower=False)
            assert ask(engine, "asks again").loaded == TOKENS - 1
            assert engine.counts["recomputed"] == 1


def _refused(place: Any) -> Any:
    # A file where the folder should be: what another mount namespace may show.
    file = Path(place.path).parent / "file"
    file.touch()
    return SharedMemoryBackend(file / "below", place.namespace)


@pytest.mark.parametrize("shown", ["absent", "another one"])
def test_a_worker_that_sees_another_folder_fails_one_hit_and_makes_none(
    shown: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    at = SharedMemoryBackend.at
    with in_memory() as folder, in_memory() as other:
        store(folder)
        if shown == "another one":
            SharedMemoryBackend(other / "kv", bytes(32))
        with engine_over(folder) as engine:
            monkeypatch.setattr(SharedMemoryBackend, "at", lambda place: at(evolve(place, path=str(other / "kv"))))
            for number in range(3):
                ask(engine, f"{number}")
                engine.scheduler.store.clear(lower=False)
            assert engine.counts["recomputed"] == 1
            assert not engine.scheduler.loading.wait.in_place
            assert (other / "kv").exists() == (shown == "another one")


def test_a_damaged_file_that_cannot_be_removed_fails_one_hit(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: Any) -> None:
        raise PermissionError(13, "not yours")

    with in_memory() as folder:
        files = store(folder)
        with engine_over(folder) as engine:
            monkeypatch.setattr("lmkv.backends.disk.folder.ChunkFolder.discard", refuse)
            monkeypatch.setattr("lmkv.backends.disk.fileio.Folder.unlink", refuse)
            broken(files, 2, "changed")
            for number in range(4):
                ask(engine, f"{number}")
                engine.scheduler.store.clear(lower=False)
            assert engine.counts["recomputed"] == 1
            assert engine.store.stats().tiers[1].read_failures == 1


def test_a_request_that_pins_its_chunks_gets_them_in_host_memory() -> None:
    with in_memory() as folder:
        store(folder)
        with engine_over(folder) as engine:
            request = SimulatedRequest("asks", list(range(TOKENS)), TOKENS, 1, "a", {"lmkv.pin": 600})
            engine.add(request)
            while request.status != "ended":
                assert engine.store.drain(LIMIT)
                engine.step()
            assert request.loaded == TOKENS - 1
            assert engine.store.stats().tiers[0].hits == 6
            assert engine.store.unpin(list(engine.store._primary.entries)) == 6
            engine.finish()


def test_only_what_was_read_counts_as_read() -> None:
    with in_memory() as folder:
        store(folder, 16)
        with engine_over(folder, save_unfull_chunk=False) as engine:
            ask(engine, "stores more", 41)
            first = engine.store.stats().tiers[1].read_bytes
            assert ask(engine, "asks", 41).loaded == 40
            assert engine.store.stats().tiers[1].read_bytes == 2 * first


def test_a_chunk_that_goes_between_lookup_and_lease_is_looked_up_again(monkeypatch: pytest.MonkeyPatch) -> None:
    with in_memory() as folder:
        store(folder, 40)
        with engine_over(folder, save_unfull_chunk=False) as engine:
            lease = InPlace.lease

            def evicts(self: InPlace, keys: Any) -> Any:
                monkeypatch.setattr(InPlace, "lease", lease)
                with self._lock:
                    self._tiers[0].index.discard(keys[3])
                return lease(self, keys)

            monkeypatch.setattr(InPlace, "lease", evicts)
            assert ask(engine, "asks", 41).loaded == 24
            assert engine.counts["recomputed"] == 0


def test_a_request_that_waits_looks_for_its_files_once_in_a_while(monkeypatch: pytest.MonkeyPatch) -> None:
    looked: list[int] = []
    is_there = SharedMemoryBackend._is_there
    monkeypatch.setattr(SharedMemoryBackend, "_is_there", lambda *args: (looked.append(1), is_there(*args))[1])
    with in_memory() as folder:
        store(folder, 40)
        looked.clear()
        with engine_over(folder, save_unfull_chunk=False) as engine:
            request = SimulatedRequest("asks", list(range(41)), 41, 1, "a")
            engine.scheduler.on_new_request(request)
            assert engine.store.drain(LIMIT)
            looked.clear()
            for _ in range(10):
                assert engine.scheduler.get_num_new_matched_tokens(request, 0)[0] == 40
                engine.scheduler.plan_step({}, lambda _: None)
            assert len(looked) == 5
            engine.scheduler.request_finished(request)


def test_a_folder_on_a_disk_is_copied_into_host_memory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    store(tmp_path)
    monkeypatch.setattr(SharedMemoryBackend, "place", None)
    with engine_over(tmp_path) as engine:
        assert ask(engine, "asks").loaded == TOKENS - 1
        assert engine.store.stats().tiers[0].hits == 6


def test_with_an_authentication_key_nothing_is_read_in_place(tmp_path: Path) -> None:
    assert SharedMemoryBackend(tmp_path, bytes(32)).place is not None
    assert SharedMemoryBackend(tmp_path, bytes(32), authentication_key=bytes(32)).place is None


@given(data=st.data(), dense=st.booleans())
def test_blocks_get_the_bytes_that_a_copy_from_a_slot_gives_them(data: st.DataObject, dense: bool) -> None:
    sizes = data.draw(st.lists(st.integers(1, 3000), min_size=1, max_size=3))
    per_chunk, num_blocks = data.draw(st.integers(1, 4)), 12
    chunk_size = 4 * per_chunk
    layout = KVLayout(chunk_size, tuple(LayerPages(size, per_chunk) for size in sizes))
    rng = np.random.default_rng(0)

    def memory() -> PagedMemory:
        # Between the pages of a layer that is not dense there is something else.
        rows = [torch.zeros((num_blocks, size + (0 if dense else 5)), dtype=torch.uint8)[:, :size] for size in sizes]
        return PagedMemory(rows, fuse=False)

    tokens = data.draw(st.lists(st.integers(1, chunk_size), min_size=1, max_size=3))
    free = data.draw(st.permutations(range(num_blocks)))
    with in_memory() as folder, closing(Slab(layout.slot_bytes, len(tokens) * layout.slot_bytes)) as slots:
        backend = SharedMemoryBackend(folder, bytes(32))
        slots.array[:] = rng.integers(0, 256, slots.array.shape, np.uint8)
        payloads = Payloads(layout.slot_bytes, layout.spans, layout.sizes)
        copies, keys = [], []
        for slot, count in enumerate(tokens):
            pages = -(-count // 4)
            first = data.draw(st.integers(0, pages - 1))
            end = data.draw(st.integers(first + 1, pages))
            blocks = [free.pop() for _ in range(end - first)] if len(free) >= end - first else []
            copies.append(ChunkCopy(slot, (Run(first, blocks),)))
            digest = bytes([slot]) * 32
            key = digest if count == chunk_size else TailKey.of(digest, count)
            backend.write(Chunk(key, payloads.gather(key, slots.array[slot].data)))
            keys.append(key)
        copied, read = memory(), memory()
        CPUCopier(copied, layout, slots).load(copies)
        order = CopyOrder(1, [copy._replace(slot=IN_PLACE) for copy in copies], files=keys, place=backend.place)
        found = BlockReader(read, layout).read(pickle.loads(pickle.dumps(order)))
        assert (found.count, found.failed, found.blind) == (len(tokens), b"", "")
        assert found.nbytes == sum(payloads.nbytes(key) for key in keys)
        assert all(torch.equal(*rows) for rows in zip(copied.rows, read.rows, strict=True))


schedules = st.fixed_dictionaries(
    {
        "num_blocks": st.integers(40, 90),
        "chunk_size": st.sampled_from([8, 16]),
        "ram_chunks": st.integers(2, 24),
        "drafts": st.booleans(),
        "load_faults": st.sampled_from([0.0, 0.0, 0.2]),
        "store_faults": st.sampled_from([0.0, 0.0, 0.2]),
        "lookahead": st.sampled_from([0, 0, 1, 3]),
        "save_unfull_chunk": st.sampled_from([True, True, False]),
        "prefix_caching": st.booleans(),
        "aborts": st.sampled_from([0.0, 0.0, 0.1]),
        "load_or_recompute": st.booleans(),
    }
)


def _drive(rng: random.Random, options: dict[str, Any]) -> tuple[int, int]:
    """Requests over shared memory whose files another process damages and deletes; `(read in place, recomputed)`."""
    with in_memory() as folder, engine_over(folder, rng.randrange(2**32), **options) as engine:
        number = 0
        for _ in range(rng.randint(20, 80)):
            if rng.random() < 0.3:
                story = random.Random(rng.randrange(3))
                tokens = [story.randrange(50) for _ in range(rng.randint(1, 70))]
                tokens += [rng.randrange(50) for _ in range(rng.choice([0, 0, rng.randint(1, 20)]))]
                number += 1
                engine.add(SimulatedRequest(f"r{number}", tokens, len(tokens), rng.randint(1, 20), "a"))
            if rng.random() < 0.1:
                # Host memory forgets: shared memory alone has them.
                engine.scheduler.store.clear(lower=False)
            files = sorted(folder.rglob("*.kv1"))
            if files and rng.random() < 0.1:
                broken(files, rng.randrange(len(files)), rng.choice(["gone", "cut off", "changed", "another chunk"]))
            engine.step()
        engine.finish()
        return engine.store.stats().tiers[1].hits, engine.counts["recomputed"]


@given(seed=st.integers(0, 2**32), options=schedules)
def test_any_schedule(seed: int, options: dict[str, Any]) -> None:
    hits, recomputed = _drive(random.Random(seed), options)
    if hits:
        event("read")
    if recomputed:
        event("recomputed")


def test_the_schedules_test_something() -> None:
    found = [_drive(random.Random(seed), {}) for seed in range(20)]
    assert sum(hits for hits, _ in found) > 100
    assert sum(recomputed for _, recomputed in found) > 3


def test_bytes_that_are_not_checked_would_show(monkeypatch: pytest.MonkeyPatch) -> None:
    """The negative control of the schedules."""
    monkeypatch.setattr("lmkv.chunks.codec.verify_checksum", lambda *_: None)
    wrong = 0
    for seed in range(20):
        try:
            _drive(random.Random(seed), {})
        except AssertionError:
            wrong += 1
    assert wrong
