"""A connector whose workers, each in a process of its own, fail their copies while a file says so."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest
from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorRole

from lmkv.memory.copiers import make_copier
from lmkv.testing.faults import FaultyCopier
from lmkv.vllm.connector import LMKVConnector
from tests.vllm.harness import BREAKS_COPIES


class BreakableConnector(LMKVConnector):
    """An `LMKVConnector` for vLLM's `kv_connector_module_path`: spawned workers know no patch of a test."""

    def __init__(self, vllm_config: Any, role: KVConnectorRole, kv_cache_config: Any) -> None:
        super().__init__(vllm_config, role, kv_cache_config)
        if role is KVConnectorRole.WORKER:
            pytest.MonkeyPatch().setattr("lmkv.vllm.worker.make_copier", _make_copier)


def _make_copier(memory: Any, layout: Any, slab: Any, rank: int, *more: Any) -> Any:
    return _BreakableCopier(make_copier(memory, layout, slab, rank, *more), rank)


class _BreakableCopier:
    def __init__(self, copier: Any, rank: int) -> None:
        self._copier, self._rank = copier, rank
        self._broken = FaultyCopier(copier, error_rate=1.0)

    def __getattr__(self, name: str) -> Any:
        switch = Path(os.environ[BREAKS_COPIES])
        broken = switch.exists() and switch.read_text() == f"{self._rank} {name}"
        return getattr(self._broken if broken else self._copier, name)
