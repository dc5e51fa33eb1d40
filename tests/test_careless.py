"""Careless use of an engine: a documented error or right bytes, never wrong ones, and nothing left behind."""

from __future__ import annotations

import contextlib
import gc
import os
import select
import signal
import threading
import warnings
from collections import deque
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from lmkv import Config, Engine, Variant
from lmkv.backends.adapters import NullBackend
from lmkv.backends.remote.base import RemoteOptions
from lmkv.errors import BackendUnavailable, ClosedError, ConfigError, UsageError
from lmkv.memory import slab
from lmkv.protocols import Backend
from lmkv.store.iopool import Job, Priority
from lmkv.testing.backend_suite import in_threads
from tests.forked import Child
from tests.kit import LIMIT, chain, eventually, every, lower, memory, put_through, raised, small_store

BLOCK, CHUNK, BLOCKS = 4, 16, 32


def paged(layers: int = 2, dtype: torch.dtype = torch.float32) -> list[torch.Tensor]:
    """Different values everywhere; [block, token, head, size]."""
    shape = (BLOCKS, BLOCK, 2, 8)
    count = BLOCKS * BLOCK * 16
    return [torch.arange(count * n, count * (n + 1)).to(dtype).reshape(shape) for n in range(layers)]


def open_engine(tensors: list[torch.Tensor], folder: Path | None = None, **options: Any) -> Engine:
    axis = options.pop("block_axis", 0)
    disk = {"local_disk": str(folder), "max_local_disk_size": 0.1, "disk_min_free": 0} if folder else {}
    config = Config(**{"chunk_size": CHUNK, "max_local_cpu_size": 0.001, **disk, **options})
    return Engine.open(tensors, block_size=BLOCK, model="careless", config=config, block_axis=axis)


@pytest.fixture
def engine() -> Iterator[Engine]:
    with open_engine(paged()) as engine:
        yield engine


# -- what another layout has stored --------------------------------------------------------------------


def found_by(folder: Path, tensors: list[torch.Tensor], **options: Any) -> int:
    with open_engine(tensors, folder, **options) as engine:
        assert engine.wait_indexed(LIMIT)
        return engine.lookup(range(CHUNK))


def test_another_layout_never_finds_the_chunks(tmp_path: Path) -> None:
    tensors = paged()
    with open_engine(tensors, tmp_path) as engine:
        assert engine.store(range(CHUNK), [0, 1, 2, 3]) == CHUNK
        assert engine.drain(LIMIT)
    assert found_by(tmp_path, paged()) == CHUNK
    permuted = [tensor.transpose(1, 2).contiguous().transpose(1, 2) for tensor in tensors]
    assert permuted[0].shape == tensors[0].shape
    assert found_by(tmp_path, permuted) == 0, "the same shape, other strides"
    mixed = [tensors[0], tensors[1].view(torch.int32)]
    assert found_by(tmp_path, mixed) == 0, "another type of the second layer"
    assert found_by(tmp_path, paged()) == CHUNK, "nobody has destroyed it"


def test_the_block_axis_belongs_to_the_layout(tmp_path: Path) -> None:
    tensors = [torch.randn(2, BLOCKS, BLOCK, 8) for _ in range(2)]
    with open_engine(tensors, tmp_path, block_axis=1) as engine:
        assert engine.store(range(CHUNK), [0, 1, 2, 3]) == CHUNK
        assert engine.drain(LIMIT)
    # The same bytes per block in the same order, but keys and values are not where the other looks for them.
    together = [tensor.transpose(0, 1).contiguous() for tensor in tensors]
    assert found_by(tmp_path, together) == 0


def test_layers_of_the_same_shape_belong_to_their_names(tmp_path: Path) -> None:
    first, second = paged()
    config = {"chunk_size": CHUNK, "max_local_cpu_size": 0.001, "local_disk": str(tmp_path), "max_local_disk_size": 0.1}

    def engine_of(layers: dict[str, torch.Tensor]) -> Engine:
        return Engine.open(layers, block_size=BLOCK, model="careless", config=Config(**config, disk_min_free=0))

    with engine_of({"a": first, "b": second}) as engine:
        assert engine.store(range(CHUNK), range(4)) == CHUNK
        assert engine.drain(LIMIT)
    for layers, found in (({"b": second, "a": first}, 0), ({"a": first, "b": second}, CHUNK)):
        with engine_of(layers) as engine:
            assert engine.wait_indexed(LIMIT)
            assert engine.lookup(range(CHUNK)) == found


# -- arguments -----------------------------------------------------------------------------------------

BAD_BLOCKS = [None, "0123", 3, 1.5, {0: 1}, [[0, 1]], [0.0, 1.0, 2.0, 3.0], [0, 1, 2, float("nan")], [None] * 4]
BAD_BLOCKS += [list, torch.zeros(4, dtype=torch.int64, device="meta")]
BAD_BLOCKS += [[True] * 4, torch.ones(4), torch.ones(4, dtype=torch.bool), np.zeros((2, 2), int), [b"1"] * 4]
BAD_TOKENS = [None, "tokens", 17, 1.5, dict.fromkeys(range(CHUNK), 1), [[1, 2]] * CHUNK, [1.5] * CHUNK, {1, 2}]
BAD_TOKENS += [list, torch.ones(CHUNK, dtype=torch.int64, device="meta"), torch.ones(CHUNK).to_sparse()]
BAD_TOKENS += [
    deque(range(CHUNK)),
    [float("nan")] * CHUNK,
    [-1] * CHUNK,
    [2**32] * CHUNK,
    torch.ones(CHUNK),
    np.ones((CHUNK, 1), int),
]


BAD_SECONDS = [None, "3", float("nan"), True, [1]]
BAD_SKIPS = [-1, -CHUNK, 1.5, None, "16", True]


def test_any_sequence_of_integers_will_do(engine: Engine) -> None:
    for blocks in (range(4), (0, 1, 2, 3), np.arange(4), torch.arange(4), np.arange(4, dtype=np.uint8)):
        assert engine.store(range(CHUNK), blocks) == engine.retrieve(range(CHUNK), blocks) == CHUNK


HUGE = 10**5000
"""More digits than Python will write."""


def test_what_is_huge_is_refused_in_a_line(engine: Engine) -> None:
    calls: list[Callable[[], object]] = [
        lambda: engine.lookup([HUGE] * CHUNK),
        lambda: engine.lookup(["x" * 100_000] * CHUNK),  # type: ignore[list-item]
        lambda: engine.store(range(CHUNK), [0, 1, 2, HUGE]),
        lambda: engine.store(range(CHUNK), [0, 1, 2, -HUGE]),
        lambda: engine.store(range(CHUNK), ["x" * 100_000] * 4),  # type: ignore[list-item]
        lambda: engine.retrieve(range(CHUNK), range(4), skip_tokens=-HUGE),
        lambda: engine.lookup(range(CHUNK), variant=Variant(cache_salt=["x" * 100_000])),  # type: ignore[arg-type]
        lambda: Engine.open(paged(), block_size=-HUGE, model="m"),
        lambda: Engine.open(paged(), block_size=HUGE, model="m"),
        lambda: Engine.open(paged(), block_size=4, model=HUGE),  # type: ignore[arg-type]
        lambda: Engine.open(paged(), block_size=4, model="m", block_axis=HUGE),
    ]
    assert [number for number, call in enumerate(calls) if len(raised(UsageError, "", call)) >= 300] == []


BAD_VARIANTS = [None, "salt", Variant(cache_salt=5), Variant(cache_salt=True), Variant(cache_salt=HUGE)]  # type: ignore[arg-type]
BAD_VARIANTS += [Variant(lora=["a", "b"]), Variant(lora=("a",)), Variant(lora=("a", 1))]  # type: ignore[arg-type]
BAD_VARIANTS += [Variant(tags=None), Variant(tags=["a"]), Variant(tags={"a": object()}), Variant(tags={1: "a"})]  # type: ignore[arg-type,dict-item]
TOKENS, BLOCKS_OF_THEM = range(CHUNK), range(4)
REFUSED: list[tuple[str, list[Any], list[tuple[Any, ...]]]] = [
    ("block", BAD_BLOCKS, [("store", TOKENS, ...), ("retrieve", TOKENS, ...)]),
    ("token", BAD_TOKENS, [("store", ..., BLOCKS_OF_THEM), ("retrieve", ..., BLOCKS_OF_THEM)]),
    ("token", BAD_TOKENS, [("lookup", ...), ("prefetch", ...), ("pin", ...)]),
    ("skip_tokens", BAD_SKIPS, [("retrieve", TOKENS, BLOCKS_OF_THEM), ("retrieve_layers", TOKENS, BLOCKS_OF_THEM)]),
    ("variant", BAD_VARIANTS, [(verb, TOKENS) for verb in ("lookup", "prefetch", "pin", "keys")]),
    ("wait", BAD_SECONDS, [("store", TOKENS, BLOCKS_OF_THEM)]),
    ("timeout", BAD_SECONDS, [("retrieve", TOKENS, BLOCKS_OF_THEM), ("lookup", TOKENS), ("drain", ...)]),
    ("ttl", BAD_SECONDS[1:], [("pin", TOKENS)]),
]
"""What the error names; what is wrong; and calls with it in the place of `...`, or else under that name."""


def test_what_is_no_argument_is_refused_and_nothing_is_moved() -> None:
    tensors = paged()

    def called(verb: str, arguments: tuple[Any, ...], name: str, bad: Any) -> None:
        given = {} if ... in arguments else {name: bad}
        found = getattr(engine, verb)(*(bad if each is ... else each for each in arguments), **given)
        # What is done layer by layer begins with its `with`.
        getattr(found, "__enter__", lambda: None)()

    def check(name: str, verb: str, arguments: tuple[Any, ...], bad: Any) -> None:
        raised(UsageError, name, called, verb, arguments, name, bad)

    for stored in (False, True):
        with open_engine(tensors) as engine:
            if stored:
                engine.store(TOKENS, BLOCKS_OF_THEM)
            before = [tensor.clone() for tensor in tensors]
            every([(name, *verb, bad) for name, bads, of in REFUSED for bad in bads for verb in map(split, of)], check)
            for bad in ([0, 1, 2, 32], [0, 1, 2, -1], [0, 1, 2, 2**70], np.arange(4.0)):
                raised(UsageError, "block id", engine.retrieve if stored else engine.store, TOKENS, bad)
            assert all(torch.equal(now, then) for now, then in zip(tensors, before, strict=True))
            assert engine.lookup(TOKENS) == stored * CHUNK


def split(call: tuple[Any, ...]) -> tuple[str, tuple[Any, ...]]:
    return call[0], call[1:]


def test_any_number_of_seconds_will_do(tmp_path: Path) -> None:
    with open_engine(paged(), tmp_path) as engine:
        assert engine.store(range(CHUNK), range(4), wait=LIMIT) == CHUNK
        for seconds in (float("inf"), HUGE, -HUGE, 1e300, np.float32(60), -1):
            assert engine.store(range(CHUNK), range(4), wait=seconds) == CHUNK
            assert engine.lookup(range(2 * CHUNK), timeout=seconds) == CHUNK
            assert engine.retrieve(range(CHUNK), range(4), timeout=seconds) == CHUNK
            assert engine.pin(range(CHUNK), ttl=seconds) == CHUNK
            engine.drain(seconds)
            engine.wait_indexed(seconds)


NO_MEMORY: list[Any] = [
    *(None, 5, [], [np.zeros((BLOCKS, BLOCK, 2))], [torch.tensor(1.0)], [torch.zeros(0, BLOCK)]),
    *([torch.zeros(BLOCKS, 0)], [torch.zeros(BLOCKS, BLOCK), None], [torch.zeros(BLOCKS, BLOCK).to_sparse()]),
    [torch.zeros(1, BLOCK).expand(BLOCKS, BLOCK)],  # one block many times
    [torch.zeros(BLOCKS, BLOCK, device="meta")],
]


def test_what_is_no_paged_memory_and_no_setting_of_it_is_refused() -> None:
    def opened(given: Any = None, **options: Any) -> None:
        options = {"block_size": BLOCK, "config": Config(max_local_cpu_size=0.001), **options}
        Engine.open(paged() if given is None else given, model="m", **options)

    every(NO_MEMORY, lambda given: raised(UsageError, "", open_engine, given))
    for given in (torch.tensor(1.0), 5, "layers"):
        raised(UsageError, r"kv_caches|tensor", opened, given)
    for axis in (2, -1, None, "0"):
        raised(UsageError, "block_axis", opened, block_axis=axis)
    raised(UsageError, "axis 1", opened, [torch.zeros(BLOCKS)], block_axis=1)
    for size in (0, -4, 1.5, None, True):
        raised(UsageError, "block_size", opened, block_size=size)
    for config in ({"chunk_size": 256}, {}, "lmkv.yaml"):
        raised(UsageError, r"for example Config\.load", opened, config=config)


def test_a_layer_that_does_not_exist_is_refused(engine: Engine) -> None:
    for layer in (-1, 2, 99, None, "0", 1.0):
        with engine.store_layers(range(CHUNK), range(4)) as writer:
            raised(UsageError, "layer", writer.save, layer)
        with engine.retrieve_layers(range(CHUNK), range(4)) as reader:
            raised(UsageError, "layer", reader.wait, layer)
        assert reader.tokens == CHUNK


def test_a_file_in_the_way_of_the_disk_tier_is_named(tmp_path: Path) -> None:
    (tmp_path / "kv").write_text("a file")
    for folder in (tmp_path / "kv", tmp_path / "kv" / "below"):
        raised(BackendUnavailable, "name another folder", open_engine, paged(), folder)


# -- what is stored with patience ----------------------------------------------------------------------


def test_many_short_prompts_stored_with_patience_all_reach_the_disk(tmp_path: Path) -> None:
    with open_engine(paged(), tmp_path) as engine:
        for number in range(600):
            assert engine.store([number] * CHUNK, [0, 1, 2, 3], wait=LIMIT) == CHUNK
        assert engine.drain(LIMIT)
        stats = engine.stats().store
        assert stats.tiers[1].dropped == 0
        assert stats.tiers[1].chunks == 600


def all_threads_wait(engine: Engine, kind: Priority) -> threading.Event:
    """Until the event is set, no job of this kind begins on the disk."""
    pool, going_on = engine.tiers._pool, threading.Event()

    def stand_still(after: object) -> None:
        going_on.wait(LIMIT)

    pool.submit([Job(stand_still, kind, lambda after: None, "disk") for _ in range(pool._size)])
    return going_on


def test_who_stores_with_patience_waits_for_a_disk_that_stands_still(tmp_path: Path) -> None:
    with open_engine(paged(), tmp_path) as engine:
        going_on = all_threads_wait(engine, Priority.STORE)

        def store() -> None:
            for number in range(200):
                assert engine.store([number] * CHUNK, [0, 1, 2, 3], wait=LIMIT) == CHUNK

        thread = threading.Thread(target=store)
        thread.start()
        waiters = engine.tiers._writes._ended._waiters
        eventually(lambda: bool(waiters) or not thread.is_alive())
        going_on.set()
        thread.join(LIMIT)
        assert engine.drain(LIMIT)
        disk = engine.stats().store.tiers[1]
        assert (disk.dropped, disk.chunks) == (0, 200)


def test_threads_that_store_with_patience_lose_nothing_either(tmp_path: Path) -> None:
    with open_engine(paged(), tmp_path) as engine:

        def store(thread: int) -> None:
            for number in range(1000 * thread, 1000 * thread + 150):
                assert engine.store([number] * CHUNK, [0, 1, 2, 3], wait=LIMIT) == CHUNK

        in_threads(3, store)
        assert engine.drain(LIMIT)
        assert engine.stats().store.tiers[1].chunks == 450


# -- a fork --------------------------------------------------------------------------------------------


def in_forked_child(engine: Engine, *more: Callable[[], object]) -> list[str]:
    """Names of the exceptions that each verb, and each of `more`, raises in a forked child of this process."""
    reader, writer = os.pipe()
    with warnings.catch_warnings():
        # Python warns of forks beside threads, which is what is tried here.
        warnings.simplefilter("ignore", DeprecationWarning)
        child = os.fork()
    if not child:
        names = []
        for call in (
            lambda: engine.retrieve(range(CHUNK), [0, 1, 2, 3]),
            lambda: engine.store(range(CHUNK), [0, 1, 2, 3]),
            lambda: engine.lookup(range(CHUNK)),
            lambda: engine.prefetch(range(CHUNK)),
            engine.drain,
            engine.close,
            *more,
        ):
            try:
                call()
                names.append("nothing")
            except BaseException as error:  # noqa: BLE001
                names.append(type(error).__name__)
        os.write(writer, " ".join(names).encode())
        os._exit(0)
    os.close(writer)
    with os.fdopen(reader) as pipe:
        answered = select.select([pipe], [], [], LIMIT)[0]
        if not answered:
            os.kill(child, signal.SIGKILL)
        answer = pipe.read()
    os.waitpid(child, 0)
    assert answered, "the child hung"
    return answer.split()


def test_a_forked_child_is_told_at_once_and_the_parent_goes_on(tmp_path: Path) -> None:
    with open_engine(paged(), tmp_path) as engine:
        assert engine.store(range(CHUNK), [0, 1, 2, 3]) == CHUNK
        # As if another thread were in the middle of things.
        with engine.tiers._lock, engine.tiers._pool._lock:
            answers = in_forked_child(engine)
        assert answers == [*[ClosedError.__name__] * 5, "nothing"]
        assert engine.drain(LIMIT)
        assert engine.retrieve(range(CHUNK), [4, 5, 6, 7]) == CHUNK


def test_nobody_waits_in_a_child_for_a_prefetch_of_its_parent(tmp_path: Path) -> None:
    with open_engine(paged(), tmp_path) as engine:
        assert engine.store(range(CHUNK), [0, 1, 2, 3]) == CHUNK
        assert engine.drain(LIMIT)
        engine.tiers.drop(engine.keys(range(CHUNK)))
        going_on = all_threads_wait(engine, Priority.LOAD)
        prefetch = engine.prefetch(range(CHUNK))
        assert in_forked_child(engine, prefetch.wait, prefetch.cancel)[-2:] == [ClosedError.__name__, "nothing"]
        going_on.set()
        assert prefetch.wait(LIMIT)
        assert prefetch.tokens == CHUNK


def test_a_store_that_fails_after_a_fork_keeps_no_other_from_being_closed() -> None:
    with contextlib.ExitStack() as stack:
        engines = [stack.enter_context(open_engine(paged())) for _ in range(8)]
        for number, engine in enumerate(engines):
            if number % 2:
                engine.tiers._pool.after_fork = None  # type: ignore[method-assign,assignment]
        for engine in engines[::2]:
            with engine.tiers._lock:
                assert in_forked_child(engine) == [*[ClosedError.__name__] * 5, "nothing"]


# -- engines that nobody closes ------------------------------------------------------------------------


def threads_of_lmkv() -> set[str]:
    return {thread.name for thread in threading.enumerate() if thread.name.startswith("lmkv")}


def drop_engines(tell: Callable[[Any], None], folder: str) -> None:
    """In a process of its own, where no other test's threads are."""
    before = threads_of_lmkv()
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for number in range(3):
            engine = open_engine(paged(), Path(folder))
            engine.store([number] * CHUNK, [0, 1, 2, 3])
            del engine
        gc.collect()
    eventually(lambda: threads_of_lmkv() == before)
    messages = [str(found.message) for found in caught if found.category is ResourceWarning]
    tell((before, messages))


def test_a_dropped_engine_ends_its_threads_and_says_so(tmp_path: Path) -> None:
    with Child(drop_engines, str(tmp_path)) as child:
        before, messages = child.heard()
    assert before == set()
    assert len(messages) == 3
    assert all("was never closed" in message for message in messages)


def test_a_store_that_is_collected_on_its_own_io_thread_is_closed() -> None:
    """It cannot wait there for its own threads to end."""
    store = small_store(4, lower(memory(8, "low")))
    pool, primary = store._pool, store.backends[0]
    put_through(store, chain("a", 1))
    store.itself = store  # type: ignore[attr-defined]
    forgotten = threading.Event()
    gc.disable()
    try:
        pool.submit([Job(lambda after: (forgotten.wait(LIMIT), gc.collect()), Priority.LOAD, lambda after: None)])
        del store
        forgotten.set()
        eventually(lambda: not any(thread.is_alive() for thread in pool._threads), "its threads end")
        # By yet another thread, after these.
        eventually(lambda: is_closed(primary), "its memory is given back")
    finally:
        gc.enable()


def is_closed(backend: Backend) -> bool:
    try:
        backend.contains([])
    except (ClosedError, UsageError) as error:
        # Until then its slots belong to the store.
        return isinstance(error, ClosedError)
    return False


# -- opens that fail, and closes that hang -------------------------------------------------------------


class Refusing(NullBackend):
    """A backend of another package. It has a thread and a file of its own until it is closed."""

    def __init__(self, url: str, namespace: bytes, options: RemoteOptions) -> None:
        super().__init__()
        if "raise" in url:
            raise RuntimeError("no such host")
        self.name = options.name
        self._file = os.memfd_create("refusing")
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._over.wait, name="lmkv-refusing")
        self._thread.start()
        self._late = "late" in url

    @property
    def shared(self) -> bool:
        if self._late:
            raise RuntimeError("nobody knows")
        return False

    def close(self) -> None:
        if not self._over.is_set():
            self._over.set()
            self._thread.join()
            os.close(self._file)


HERE = f"{__name__}:Refusing"
UNABLE: dict[str, dict[str, Any]] = {
    "a misspelt option": {"remote_url": f"{HERE}://a,redis://127.0.0.1:9?no_such_option=1"},
    "a backend that raises": {"remote_url": f"{HERE}://a,{HERE}://raise"},
    "a backend that raises later": {"remote_url": f"{HERE}://a,{HERE}://late"},
    "a folder that is refused": {"remote_url": f"{HERE}://a", "local_disk": "/proc/nowhere", "max_local_disk_size": 1},
    "a policy that does not exist": {"remote_url": f"{HERE}://a", "cache_policy": f"{__name__}:NoPolicy"},
    "chunks that do not fit": {"remote_url": f"{HERE}://a", "max_local_cpu_size": 1e-6},
    "a device without copier": {"remote_url": f"{HERE}://a"},
}


def held() -> tuple[int, set[str], int]:
    """Descriptors, threads and promised bytes of this process."""
    here = [os.stat(path).st_size for path, *_ in slab.slab_files() if path.startswith(f"/proc/{os.getpid()}/")]
    return len(os.listdir("/proc/self/fd")), threads_of_lmkv(), sum(here)


def fail_to_open(tell: Callable[[Any], None], name: str) -> None:
    good = Config(chunk_size=CHUNK, max_local_cpu_size=0.001)
    bad = Config.load(extra={"chunk_size": CHUNK, "max_local_cpu_size": 0.001, **UNABLE[name]})
    tensors = [tensor.to("meta") for tensor in paged()] if "device" in name else paged()
    tell(held())
    for _ in range(60):
        with contextlib.suppress(ConfigError, UsageError, BackendUnavailable, RuntimeError):
            Engine.open(tensors, block_size=BLOCK, model="careless", config=bad).close()
            tell("it did not fail")
    tell(held())
    with Engine.open(paged(), block_size=BLOCK, model="careless", config=good) as engine:
        tell(engine.store(range(CHUNK), range(4)))


@pytest.mark.parametrize("name", UNABLE)
def test_opens_that_fail_give_everything_back(name: str) -> None:
    with Child(fail_to_open, name) as child:
        before, after = child.heard(), child.heard()
        assert after == before
        assert child.heard() == CHUNK
