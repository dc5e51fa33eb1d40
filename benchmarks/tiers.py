"""A tier's backend, compared with its limit: a folder with plain files and vLLM's file tier, a store with its client.

    python -m benchmarks.tiers PLACE [PLACE ...] [--rounds 40] [--quick] [--json] [--write FILE]

    python -m benchmarks.tiers /mnt/nvme redis://localhost:6379 s3://bucket?endpoint=http://localhost:9000

Every case moves the same eight values once in a round, in shuffled order. The speed of a disk changes from minute to
minute, so only cases of the same round are compared. Plain files are written and read with O_DIRECT, without header,
checksum or rename. Their reads are cold, because the page cache drops the files before. A store's client puts and gets
bytes as its documentation shows, and drops the bytes that it reads. Mooncake's client uses memory that is registered
with it. lmkv computes and checks checksums of every byte, and asks for a key before it puts. It puts from slots of a
slab, and reads into slots. This process keeps the memory that it frees, because otherwise redis-py takes three times as
long. Times are wall time: a ratio below 1 is slower than the limit. The benchmark deletes the chunks that it writes.
"""

from __future__ import annotations

import itertools
import os
import secrets
import shutil
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing, contextmanager
from functools import partial
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from typing import Any
from urllib.parse import parse_qs, urlsplit

import numpy as np
from attrs import frozen

from benchmarks.peers import keep_freed_memory
from benchmarks.rounds import Row, arguments, compared, finish, interleaved, speeds
from lmkv.backends.disk import LocalDiskBackend
from lmkv.backends.remote.base import RemoteOptions
from lmkv.build import io_threads
from lmkv.cli.bench import MIB, READ_TARGET, WRITE_TARGET, check, drop_caches
from lmkv.config import Config
from lmkv.config.urls import SCHEMES, RemoteURL
from lmkv.memory.slab import Slab
from lmkv.protocols import Backend, Chunk, ReadStatus, RegistersMemory, WriteStatus

COUNT = 8
"""Number of values that each case moves in a round."""
REMOTE_TARGET, VLLM_TARGET = 0.8, 1.0
LMKV, PLAIN, VLLM, CLIENT = "lmkv", "plain files", "vLLM's file tier", "its own client"
Moves = Mapping[str, list[float]]


@frozen
class Client:
    """The client of a store, as the limit for lmkv's backend. Any thread may call `put(name, value)` and `get(name,
    into)`.
    """

    put: Callable[[str, memoryview], object]
    get: Callable[[str, memoryview], object]
    delete: Callable[[list[str]], object]


# -- clients ----------------------------------------------------------------------------------------------


def plain_files(folder: Path) -> Client:
    def put(name: str, value: memoryview) -> None:
        fd = os.open(folder / name, os.O_CREAT | os.O_WRONLY | os.O_DIRECT, 0o600)
        check(os.pwrite(fd, value, 0) == len(value))
        os.close(fd)

    def get(name: str, into: memoryview) -> None:
        fd = os.open(folder / name, os.O_RDONLY | os.O_DIRECT)
        check(os.preadv(fd, [into], 0) == len(into))
        os.close(fd)

    def delete(names: list[str]) -> None:
        for name in names:
            (folder / name).unlink(missing_ok=True)

    folder.mkdir()
    return Client(put, get, delete)


def vllm_files(folder: Path) -> Client:
    """Return a client with vLLM's own file names, functions and C extension, in threads of the benchmark. This
    client neither syncs nor checks data.
    """
    from vllm.v1.kv_offload.base import make_offload_key
    from vllm.v1.kv_offload.file_mapper import FileMapper
    from vllm.v1.kv_offload.tiering.fs.io import batch_load_block, batch_store_block

    folder.mkdir()
    mapper = FileMapper(str(folder), "model", 16, 16, 1, 1, 1, 1, 0, "bfloat16")

    def path(name: str) -> str:
        return str(mapper.get_file_name(make_offload_key(name.encode().ljust(32), 0)))

    def delete(names: list[str]) -> None:
        for name in names:
            Path(path(name)).unlink(missing_ok=True)

    return Client(
        lambda name, value: batch_store_block([path(name)], value, [0], len(value)),
        lambda name, into: batch_load_block([path(name)], into, [0], len(into)),
        delete,
    )


def redis_client(url: str) -> Client:
    from redis import Redis

    client = Redis.from_url(url.replace("valkey", "redis", 1))
    return Client(
        lambda name, value: client.set(name, bytes(value)),
        lambda name, into: client.get(name),
        lambda names: client.unlink(*names),
    )


def object_client(url: str) -> Client:
    import obstore
    from obstore.store import S3Store

    parts = urlsplit(url)
    options = {name: found[0] for name, found in parse_qs(parts.query).items()}
    plain = options.get("endpoint", "").startswith("http://")
    store = S3Store(
        parts.netloc,
        virtual_hosted_style_request=False,
        unsigned_payload=True,
        client_options={"allow_http": plain},
        **options,
    )
    return Client(
        lambda name, value: obstore.put(store, name, bytes(value), use_multipart=False),
        lambda name, into: obstore.get(store, name).bytes(),
        lambda names: obstore.delete(store, names),
    )


def mooncake_client(url: str) -> Client:
    from mooncake.store import MooncakeDistributedStore

    store: Any = MooncakeDistributedStore()
    parts = urlsplit(url)
    code = store.setup(str(parts.hostname), "P2PHANDSHAKE", 0, 0, "tcp", "", f"{parts.hostname}:{parts.port}")
    check(code == 0)
    known: set[int] = set()

    def registered(memory: memoryview) -> int:
        address = np.frombuffer(memory, np.uint8).ctypes.data
        if address not in known:
            check(store.register_buffer(address, len(memory)) == 0)
            known.add(address)
        return address

    return Client(
        lambda name, value: check(store.batch_put_from([name], [registered(value)], [len(value)]) == [0]),
        lambda name, into: check(store.batch_get_into([name], [registered(into)], [len(into)]) == [len(into)]),
        lambda names: [store.remove(name, force=True) for name in names],
    )


def infinistore_client(url: str) -> Client:
    import infinistore

    parts = urlsplit(url)
    local = threading.local()

    def connected() -> Any:
        """Return a connection of this thread, because a connection makes one call at a time."""
        if not hasattr(local, "store"):
            kind = {"connection_type": infinistore.TYPE_TCP, "log_level": "error"}
            where = infinistore.ClientConfig(host_addr=parts.hostname, service_port=parts.port, **kind)
            local.store = infinistore.InfinityConnection(where)
            local.store.connect()
        return local.store

    return Client(
        lambda name, value: connected().tcp_write_cache(name, np.frombuffer(value, np.uint8).ctypes.data, len(value)),
        lambda name, into: connected().tcp_read_cache(name),
        lambda names: connected().delete_keys(names),
    )


CLIENTS: dict[str, Callable[[str], Client]] = {
    "redis": redis_client,
    "objects": object_client,
    "mooncake": mooncake_client,
    "infinistore": infinistore_client,
}


def client_of(backend: Backend) -> Client:
    """Return a client that calls lmkv's backend, with names in place of keys."""

    def key(name: str) -> bytes:
        return name.encode().ljust(32)

    return Client(
        lambda name, value: check(backend.write(Chunk(key(name), value)).status is WriteStatus.STORED),
        lambda name, into: check(backend.read(key(name), into).status is ReadStatus.HIT),
        lambda names: backend.delete([key(name) for name in names]),
    )


# -- measuring --------------------------------------------------------------------------------------------


def moves(
    clients: Mapping[str, Client],
    slots: Sequence[memoryview],
    threads: Mapping[str, Sequence[int]],
    rounds: int,
    cool: Callable[[], object] = lambda: None,
) -> dict[str, Moves]:
    """Return the seconds of puts and gets, by verb and by client and number of threads. `cool()`: a function that is
    called before each get.
    """
    pool = ThreadPoolExecutor(max(max(each) for each in threads.values()))
    numbers, kept = itertools.count(), [f"lmkv-bench-{number}" for number in range(COUNT)]
    written: dict[str, list[str]] = {name: [] for name in clients}

    def all_of(name: str, count: int, work: Callable[[int], object]) -> None:
        if count == 1:
            for index in range(COUNT):
                work(index)
            return
        # No more threads at a time than the case has.
        found = [pool.submit(lambda at=at: [work(index) for index in range(at, COUNT, count)]) for at in range(count)]
        for each in found:
            each.result()

    def put(name: str, count: int) -> None:
        names = [f"lmkv-new-{next(numbers)}" for _ in range(COUNT)]
        written[name] += names
        all_of(name, count, lambda index: clients[name].put(names[index], slots[index]))

    def get(name: str, count: int) -> None:
        all_of(name, count, lambda index: clients[name].get(kept[index], slots[COUNT + index]))

    def tidy(case: str) -> None:
        """Delete the values of the client that is measured next, so that this client has just spoken with the store."""
        for name in clients:
            if case.startswith(name) and written[name]:
                clients[name].delete(written[name])
                written[name].clear()

    cases = {f"{name}, {each} thread{'s'[: each > 1]}": (name, each) for name in clients for each in threads[name]}
    clock = time.perf_counter
    try:
        for client in clients.values():
            for name, slot in zip(kept, slots, strict=False):
                client.put(name, slot)
        puts = {case: partial(put, *which) for case, which in cases.items()}
        gets = {case: partial(get, *which) for case, which in cases.items()}
        return {
            "put": interleaved(puts, rounds, clock=clock, before=tidy),
            "get": interleaved(gets, rounds, clock=clock, before=lambda _: cool()),
        }
    finally:
        for name, client in clients.items():
            tidy(name)
            client.delete(kept)
        pool.shutdown()


@contextmanager
def slots_of(nbytes: int) -> Iterator[tuple[Slab, list[memoryview]]]:
    """Provide slots with different bytes: one half to put from, and the other half to get into."""
    slab = Slab(nbytes, 2 * COUNT * nbytes, shared=True)
    slots = [slab.view(index) for index in range(2 * COUNT)]
    for slot in slots:
        slot[:] = secrets.token_bytes(nbytes)
    try:
        yield slab, slots
    finally:
        slots.clear()


def of_folder(parent: Path, rounds: int, sizes: Sequence[int] = (4, 32)) -> Iterator[Row]:
    many = min(COUNT, io_threads(Config(), ["disk"]))
    for mib in sizes:
        folder = Path(tempfile.mkdtemp(prefix="lmkv-tiers-", dir=parent))
        try:
            with slots_of(mib * MIB) as (_, slots), closing(LocalDiskBackend(folder / "lmkv", bytes(32))) as backend:
                clients = {LMKV: client_of(backend), PLAIN: plain_files(folder / "plain")}
                if find_spec("vllm"):
                    clients[VLLM] = vllm_files(folder / "vllm")
                threads = {name: (1, many) if name == PLAIN else (many,) for name in clients}
                found = moves(clients, slots, threads, rounds, lambda folder=folder: drop_caches(folder))
        finally:
            shutil.rmtree(folder)
        ours, plain, theirs = f"{LMKV}, {many} threads", f"{PLAIN}, 1 thread", f"{VLLM}, {many} threads"
        for verb, target in (("put", WRITE_TARGET), ("get", READ_TARGET)):
            title, shown = f"disk, {verb} {mib} MiB", speeds(found[verb], COUNT * mib * MIB)
            yield from compared(title, "GB/s", shown, plain, {ours: target})
            if theirs in shown:
                both = {theirs: shown[theirs], ours: shown[ours]}
                yield from compared(title, "GB/s", both, theirs, {ours: VLLM_TARGET})


def of_store(url: str, rounds: int) -> Iterator[Row]:
    engine = SCHEMES[RemoteURL(url).scheme]
    options = RemoteOptions(prefix="lmkv-bench:", timeout=30.0, chunk_tokens=256)
    opened = import_module(f"lmkv.backends.remote.{engine}").open_url(url, os.urandom(32), options)
    with slots_of(4 * MIB) as (slab, slots), closing(opened) as backend:
        if isinstance(backend, RegistersMemory):
            backend.register_memory(slab.descriptor, slab.address, slab.nbytes)
        clients = {LMKV: client_of(backend), CLIENT: CLIENTS[engine](url)}
        found = moves(clients, slots, dict.fromkeys(clients, (1, COUNT)), rounds)
    for verb, seconds in found.items():
        shown = speeds(seconds, COUNT * 4 * MIB)
        for how in ("1 thread", f"{COUNT} threads"):
            both = {each: shown[each] for each in (f"{CLIENT}, {how}", f"{LMKV}, {how}")}
            title, target = f"{engine}, {verb} 4 MiB", {f"{LMKV}, {how}": REMOTE_TARGET}
            yield from compared(title, "GB/s", both, f"{CLIENT}, {how}", target)


def main() -> int:
    parser = arguments(__doc__, quick="five rounds, small values")
    parser.add_argument("places", nargs="+", metavar="PLACE", help="a folder, or the URL of a remote store")
    parser.add_argument("--rounds", type=int, default=40)
    options = parser.parse_args()
    rounds = 5 if options.quick else options.rounds
    keep_freed_memory()

    def rows() -> Iterator[Row]:
        for place in options.places:
            if "://" in place:
                yield from of_store(place, rounds)
            else:
                yield from of_folder(Path(place), rounds, (4,) if options.quick else (4, 32))

    return finish(rows(), options)


if __name__ == "__main__":
    sys.exit(main())
