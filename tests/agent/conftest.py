"""One engine's agent API at a port, over a store of its own."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from lmkv.agent.client import Client
from lmkv.agent.server import AgentServer
from lmkv.agent.service import CacheService
from lmkv.store.tiered import TieredStore
from tests.agent.serving import TOKEN, at_port, service_of, store_over


@pytest.fixture
def store(tmp_path: Path) -> Iterator[TieredStore]:
    with store_over(tmp_path / "kv") as store:
        yield store


@pytest.fixture
def service(store: TieredStore) -> CacheService:
    return service_of(store)


@pytest.fixture
def server(service: CacheService) -> Iterator[AgentServer]:
    with at_port(service) as server:
        yield server


@pytest.fixture
def client(server: AgentServer) -> Iterator[Client]:
    with Client(server.url, TOKEN) as client:
        yield client
