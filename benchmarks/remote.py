"""A remote backend beside its engine's own client: values of 4 MiB, alone and eight at once, interleaved in one run.

    python benchmarks/remote.py URL [URL ...] [--rounds 40] [--quick] [--json]

    python benchmarks/remote.py redis://localhost:6379 s3://bucket?endpoint=http://localhost:9000

The client puts and gets bytes as its documentation shows it, and reads into nothing; Mooncake's puts
from memory and gets into memory that is registered with it. lmkv computes and checks checksums of every byte, asks
before it puts, and puts from and reads into slots of a slab. Eight at once are eight threads on either side, as a
tier has its I/O threads. This process keeps the memory that it frees, without which redis-py takes three times as long.
Wall time: a ratio below 1 is slower than the client. What is written is deleted again.
"""

from __future__ import annotations

import sys
from pathlib import Path

# Not this folder: its copy.py would stand in for the standard library's.
sys.path[0] = str(Path(__file__).resolve().parents[1])

import itertools
import os
import statistics
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from importlib import import_module
from typing import Any
from urllib.parse import parse_qs, urlsplit

import numpy as np
from attrs import frozen

from benchmarks._timing import Row, arguments_of, finish, interleaved, median_ratio
from lmkv.backends.remote.base import RemoteBackend
from lmkv.backends.remote.options import RemoteOptions
from lmkv.cli.measure.plain import keep_freed_memory
from lmkv.config.remote_url import SCHEMES, RemoteURL
from lmkv.memory.slab import Slab
from lmkv.outcomes import ReadStatus, WriteStatus
from lmkv.protocols import Chunk, RegistersMemory

MIB = 1 << 20
VALUE = 4 * MIB
TARGET = 0.8
AT_ONCE = 8
KEPT = 8
"""Values that are read again and again."""


@frozen
class Client:
    """The engine's own client, for any thread. `put(name, value)`, `get(name)`, `delete(names)`."""

    put: Callable[[str, memoryview], object]
    get: Callable[[str], object]
    delete: Callable[[list[str]], object]


def redis_client(url: str) -> Client:
    from redis import Redis

    client = Redis.from_url(url.replace("valkey", "redis", 1))
    return Client(lambda name, value: client.set(name, bytes(value)), client.get, lambda names: client.unlink(*names))


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
        lambda name: obstore.get(store, name).bytes(),
        lambda names: obstore.delete(store, names),
    )


def mooncake_client(url: str) -> Client:
    from mooncake.store import MooncakeDistributedStore

    store: Any = MooncakeDistributedStore()
    parts = urlsplit(url)
    code = store.setup(str(parts.hostname), "P2PHANDSHAKE", 0, 0, "tcp", "", f"{parts.hostname}:{parts.port}")
    assert code == 0, code
    known: set[int] = set()
    local = threading.local()

    def registered(memory: memoryview) -> int:
        address = np.frombuffer(memory, np.uint8).ctypes.data
        if address not in known:
            assert store.register_buffer(address, len(memory)) == 0
            known.add(address)
        return address

    def put(name: str, value: memoryview) -> None:
        assert store.batch_put_from([name], [registered(value)], [len(value)]) == [0]

    def get(name: str) -> memoryview:
        into: memoryview = local.__dict__.setdefault("into", memoryview(bytearray(VALUE)))
        assert store.batch_get_into([name], [registered(into)], [VALUE]) == [VALUE]
        return into

    def delete(names: list[str]) -> None:
        for name in names:
            store.remove(name, force=True)

    return Client(put, get, delete)


def infinistore_client(url: str) -> Client:
    import infinistore

    parts = urlsplit(url)
    local = threading.local()

    def connected() -> Any:
        """A connection does one call at a time."""
        if not hasattr(local, "store"):
            local.store = infinistore.InfinityConnection(
                infinistore.ClientConfig(
                    host_addr=parts.hostname,
                    service_port=parts.port,
                    connection_type=infinistore.TYPE_TCP,
                    log_level="error",
                )
            )
            local.store.connect()
        return local.store

    def put(name: str, value: memoryview) -> None:
        connected().tcp_write_cache(name, np.frombuffer(value, np.uint8).ctypes.data, len(value))

    return Client(put, lambda name: connected().tcp_read_cache(name), lambda names: connected().delete_keys(names))


CLIENTS: dict[str, Callable[[str], Client]] = {
    "redis": redis_client,
    "objects": object_client,
    "mooncake": mooncake_client,
    "infinistore": infinistore_client,
}


def main() -> int:
    parser = arguments_of(__doc__, quick="ten rounds")
    parser.add_argument("urls", nargs="+", metavar="URL")
    parser.add_argument("--rounds", type=int, default=40)
    options = parser.parse_args()
    keep_freed_memory()
    found = [row for url in options.urls for row in measure(url, 10 if options.quick else options.rounds)]
    return finish(found, options.json)


def measure(url: str, rounds: int) -> Iterator[Row]:
    engine = SCHEMES[RemoteURL(url).scheme]
    options = RemoteOptions(prefix="lmkv-bench:", timeout=30.0, chunk_tokens=256)
    backend: RemoteBackend = import_module(f"lmkv.backends.remote.{engine}").open_url(url, os.urandom(32), options)
    client = CLIENTS[engine](url)
    slab = Slab(VALUE, (AT_ONCE + 1) * VALUE, shared=True)
    if isinstance(backend, RegistersMemory):
        backend.register_memory(slab.descriptor, slab.address, slab.nbytes)
    *buffers, payload = map(slab.view, range(slab.num_slots))
    payload[:] = os.urandom(VALUE)
    numbers = itertools.count()
    keys, names = [os.urandom(32) for _ in range(KEPT)], [f"lmkv-bench:{number}" for number in range(KEPT)]
    written: tuple[list[bytes], list[str]] = ([], [])
    pool = ThreadPoolExecutor(AT_ONCE)

    def put(_: int) -> None:
        key = os.urandom(32)
        written[0].append(key)
        result = backend.write(Chunk(key, payload))
        assert result.status is WriteStatus.STORED, result

    def client_put(_: int) -> None:
        name = f"lmkv-bench:new-{next(numbers)}"
        written[1].append(name)
        client.put(name, payload)

    def get(thread: int) -> None:
        result = backend.read(keys[next(numbers) % KEPT], buffers[thread])
        assert result.status is ReadStatus.HIT, result

    def client_get(_: int) -> None:
        assert client.get(names[next(numbers) % KEPT]) is not None

    def at_once(work: Callable[[int], None]) -> Callable[[], object]:
        return lambda: list(pool.map(work, range(AT_ONCE)))

    def alone(work: Callable[[int], None]) -> Callable[[], object]:
        return lambda: work(0)

    def tidy(turn: str) -> None:
        """Delete the values of the side whose turn it is, so that it has just spoken with the store."""
        which = ("lmkv", "the client").index(turn)
        if written[which]:
            (backend.delete, client.delete)[which](written[which])
            written[which].clear()

    for key in keys:
        backend.write(Chunk(key, payload))
    for name in names:
        client.put(name, payload)
    try:
        for verb, ours, theirs in (("put", put, client_put), ("get", get, client_get)):
            for how, count, caller in (("", 1, alone), (f", {AT_ONCE} at once", AT_ONCE, at_once)):
                turns = {"lmkv": caller(ours), "the client": caller(theirs)}
                times = interleaved(turns, rounds, clock=time.perf_counter, before=tidy)
                ratio = median_ratio(times, "the client", "lmkv")
                speed = count * VALUE / statistics.median(times["lmkv"]) / 1e9
                yield Row(f"{engine}: {verb}{how}", speed, "GB/s", "the client", ratio, TARGET, ratio >= TARGET)
    finally:
        tidy("lmkv")
        tidy("the client")
        backend.delete(keys)
        client.delete(names)
        pool.shutdown()
        backend.close()


if __name__ == "__main__":
    sys.exit(main())
