"""Real stores with the agent API before them, through real sockets: one engine, or several of a server."""

from __future__ import annotations

import itertools
import os
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, closing, contextmanager
from functools import partial
from pathlib import Path
from typing import Any

from lmkv.agent.client import Client
from lmkv.agent.http import application
from lmkv.agent.peers import Peers
from lmkv.agent.server import Address, AgentServer
from lmkv.agent.service import CacheService
from lmkv.backends.cpu import CPUPinnedBackend
from lmkv.backends.disk import LocalDiskBackend
from lmkv.chunks.hashing import KeyChain
from lmkv.chunks.namespace import Namespace
from lmkv.policies import LRU
from lmkv.protocols import ChunkKey, Policy, Tier
from lmkv.store.tiered import TieredStore
from lmkv.vllm.scheduler import Scheduler
from tests.kit import LIMIT, eventually

SIZE = 4
NAMESPACE = Namespace(model="small", dtype="float32", chunk_size=SIZE, block_size=SIZE)
TOKEN = "letmein"
_numbers = itertools.count()


def keys_of(tokens: Any, cache_salt: str | None, tags: Any) -> list[ChunkKey]:
    chain = KeyChain(NAMESPACE.root(cache_salt=cache_salt, extra=tags), SIZE)
    chain.extend(tokens)
    tail = chain.tail(tokens)
    return chain.keys if tail is None else [*chain.keys, tail]


def tokenize(prompt: Any, template: Any = None) -> list[int]:
    text = prompt if isinstance(prompt, str) else "".join(f"<{each['role']}>{each['content']}" for each in prompt)
    return list((f"{template}" * bool(template) + text).encode())


def connections(server: AgentServer) -> list[Any]:
    return list(server._servers[0].server_state.connections)


@contextmanager
def store_over(folder: Path, policy: Callable[[], Policy] = LRU) -> Iterator[TieredStore]:
    """64 chunks of host memory over a disk that others may use."""
    disk = Tier(LocalDiskBackend(folder, NAMESPACE.digest, shared=True), policy())
    store = TieredStore(Tier(CPUPinnedBackend(64 << 12, 4096), policy()), [disk])
    assert store.wait_indexed(LIMIT)
    yield store
    store.close()


def service_of(store: TieredStore, **options: Any) -> CacheService:
    return CacheService(store, keys_of, tokenize, chunk_size=SIZE, pin_ttl=60.0, **options)


def service_of_scheduler(scheduler: Scheduler, chunk_size: int) -> CacheService:
    requests = scheduler.observer.recent.snapshot
    return CacheService(
        scheduler.store,
        scheduler.keys_of,
        tokenize,
        chunk_size=chunk_size,
        pin_ttl=60.0,
        requests=requests,
        trace=scheduler.observer.recorder.since,
        deleted=scheduler.observer.explainer.evictions.forget,
        value=lambda: scheduler.observer.value.report(scheduler.timing.cost.prefill_speed),
    )


def put(store: TieredStore, text: str, salt: str | None = None, **tags: str) -> list[ChunkKey]:
    """Store a prompt as an engine does: to host memory and the disk."""
    keys = keys_of(tokenize(text), salt, tags)
    with store.reserve(keys) as reservation:
        reservation.commit()
    assert store.drain(LIMIT)
    return keys


def short_socket() -> Address:
    """Sockets' paths are short; those of tests are not."""
    return Address(f"unix:/tmp/lmkv-{os.getpid()}-{next(_numbers)}.sock")


@contextmanager
def serving(
    *services: CacheService, token: str | None = TOKEN, first: Address | None = None
) -> Iterator[list[AgentServer]]:
    """The engines of one server, the first at a unix socket; the others have announced themselves to it."""
    first = first or short_socket()
    with ExitStack() as stack:
        servers = [
            stack.enter_context(one_of(service, first, number, token)) for number, service in enumerate(services)
        ]
        with Client(servers[0].url, token) as client:
            eventually(lambda: len(engines_of(client.stats()) or [0]) == len(services), "the announcements")
        yield servers


@contextmanager
def one_of(service: CacheService, first: Address, number: int = 0, token: str | None = TOKEN) -> Iterator[AgentServer]:
    """One of a server's engines."""
    inside = partial(first.private, number)
    with closing(AgentServer(_application(service, token, number, first), first.of_engine(number), inside)) as server:
        yield server


@contextmanager
def at_port(service: CacheService, token: str | None = TOKEN) -> Iterator[AgentServer]:
    """An engine at a port of its own, beside no other."""
    with closing(AgentServer(lambda: application(service, token), Address("127.0.0.1:0"))) as server:
        yield server


def _application(service: CacheService, token: str | None, number: int, first: Address) -> Callable[[], Any]:
    return lambda: application(service, token, Peers(number, lambda other: first.private(other).url, token))


def engines_of(answer: Mapping[str, Any]) -> dict[int, Mapping[str, Any]]:
    return {each["engine"]: each for each in answer.get("engines", ())}
