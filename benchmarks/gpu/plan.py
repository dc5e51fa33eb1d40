"""Decides which engines are compared, and the sizes of prompts and memory."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from typing import Any

from attrs import frozen

from benchmarks.gpu.engine import kv_bytes_per_token, weight_bytes
from benchmarks.peers import LMCacheServer

CONNECTORS: dict[str, dict[str, Any]] = {
    "alone": {},
    "idle": {"kv_connector": "IdleConnector", "kv_connector_module_path": "benchmarks.bound_connectors"},
    "lmkv": {
        "kv_connector": "LMKVConnector",
        "kv_connector_module_path": "lmkv.vllm.connector",
        "kv_load_failure_policy": "recompute",
    },
    "native": {"kv_connector": "OffloadingConnector"},
    "simple": {"kv_connector": "SimpleCPUOffloadConnector"},
    "lmcache": {"kv_connector": "LMCacheConnectorV1"},
    "lmcache-mp": {"kv_connector": "LMCacheMPConnector"},
}
GRAPHS: dict[str, dict[str, Any]] = {
    "none": {"enforce_eager": True},
    "decode": {
        "compilation_config": {
            "mode": 0,
            "cudagraph_mode": "FULL_DECODE_ONLY",
            "cudagraph_capture_sizes": [1, 2, 4, 8, 16],
        }
    },
    "compiled": {},
}
OVERHEAD = 2.6e9
"""Bytes of a process on the GPU in addition to weights and KV."""
WIDE = "128k"


@frozen
class Plan:
    """The sizes that follow from the options. `wide`: whether the sizes are those of the step 128k."""

    options: argparse.Namespace
    wide: bool = False

    @property
    def tiny(self) -> bool:
        return bool(self.options.tiny)

    @property
    def per_token(self) -> int:
        return kv_bytes_per_token(self.options.shape, 4 if self.tiny else 2)

    @property
    def script_tokens(self) -> int:
        return 500 if self.tiny else 10_000

    @property
    def long(self) -> dict[str, int]:
        if self.wide:
            return {WIDE: 2048 if self.tiny else 131_072}
        return {"long-8k": 512, "long-32k": 1024} if self.tiny else {"long-8k": 8192, "long-32k": 32_768}

    @property
    def max_len(self) -> int:
        return max(self.script_tokens, *self.long.values()) + 64

    @property
    def kv_bytes(self) -> int:
        script = 0 if self.wide else 4 * self.script_tokens + 512
        return max(32 << 20, self.per_token * max(script, *(tokens + 256 for tokens in self.long.values())))

    @property
    def host_bytes(self) -> int:
        return int(self.per_token * (1.3 * self.long[WIDE] if self.wide else 15 * self.script_tokens))

    @property
    def bytes_each(self) -> float:
        return weight_bytes(self.options.shape) + self.kv_bytes + OVERHEAD

    @property
    def talk(self) -> dict[str, int]:
        ask, answer, turns = (64, 8, 3) if self.tiny else (1000, 32, 5)
        users = 6 if self.tiny else max(3, int(1.33 * self.host_bytes / self.per_token / (turns * (ask + answer))))
        return {"users": users, "turns": turns, "ask": ask, "answer": answer, "at_once": 3 if self.tiny else 8}

    def connector(self, engine: str, server: LMCacheServer | None) -> dict[str, Any]:
        host = self.host_bytes
        settings: dict[str, Any] = {
            "lmkv": {"max_local_cpu_size": host / 2**30},
            "native": {"cpu_bytes_to_use": host},
            "simple": {"cpu_bytes_to_use": host},
        }.get(engine, {})
        if server is not None and engine == "lmcache-mp":
            settings = {"lmcache.mp.host": "tcp://127.0.0.1", "lmcache.mp.port": server.port}
        found = CONNECTORS.get(engine, {"kv_connector": engine})
        return found and {**found, "kv_connector_extra_config": settings | self.options.settings.get(engine, {})}

    def spec(self, engine: str, server: LMCacheServer | None, **more: Any) -> dict[str, Any]:
        options = {
            "dtype": "float32" if self.tiny else "bfloat16",
            "max_model_len": self.max_len,
            "enable_prefix_caching": True,
            "kv_cache_memory_bytes": self.kv_bytes,
            "gpu_memory_utilization": 0.05,
            **GRAPHS[self.options.graphs],
            **self.options.llm,
            **more,
        }
        positions = max(40_960, self.max_len)
        connector = self.connector(engine, server)
        return {"connector": connector, "shape": self.options.shape, "positions": positions, "options": options}

    def env(self, engine: str) -> dict[str, str]:
        if engine != "lmcache":
            return {}
        size = {"LMCACHE_MAX_LOCAL_CPU_SIZE": f"{self.host_bytes / 2**30:.3f}"}
        return {"LMCACHE_CHUNK_SIZE": "256", "LMCACHE_LOCAL_CPU": "True", **size}


def together(engines: Sequence[str], each: float, total: float) -> list[list[str]]:
    """Return groups of engines that fit the GPU together. lmkv is in each group, because the others are compared
    with lmkv.
    """
    fit = max(1, int((total - 1e9) / each)) if total else len(engines)
    if fit >= len(engines):
        return [list(engines)]
    if fit == 1:
        return [[engine] for engine in engines]
    ours = [engine for engine in engines if engine == "lmkv"]
    rest, size = [engine for engine in engines if engine != "lmkv"], fit - len(ours)
    return [[*ours, *rest[at : at + size]] for at in range(0, len(rest), size)]
