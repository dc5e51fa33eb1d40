"""LMCache, which lmkv is compared with, in a separate process and environment: one request at a time over a pipe.

Run this program with the interpreter of an environment that has torch and lmcache, and with -P. Without -P, copy.py in
the same folder would be imported in place of the standard library's module. LMCache has no connector for CPU tensors.
The connector in this module calls LMCache's own kernel for such tensors. All other parts are LMCache's: keys, storage
manager, allocator, CPU tier.

The program reads lines of JSON: {"layers", "blocks", "tokens", "gb"} first, then {"do": "store" | "retrieve" | "clear"
| "check"}. It answers each line with the CPU seconds of the request.
"""

from __future__ import annotations

import json
import os
import sys
import time
from typing import Any

BLOCK, CHUNK, HEADS, HEAD_DIM = 16, 256, 8, 128


def engine_of(layers: int, gb: float) -> Any:
    import torch
    from lmcache.lmcache_native import EngineKVFormat, TransferDirection
    from lmcache.v1.cache_engine import LMCacheEngineBuilder
    from lmcache.v1.config import LMCacheEngineConfig
    from lmcache.v1.gpu_connector.mock_gpu_connector import MockGPUConnector
    from lmcache.v1.metadata import LMCacheMetadata
    from lmcache.v1.platform.torch_ops.mem_kernels import multi_layer_kv_transfer

    torch.set_num_threads(1)

    class CPUConnector(MockGPUConnector):
        """Copies paged CPU tensors of shape [2, slots, hidden], the layout with which LMCache's kernel is fastest."""

        def _transfer(self, how: Any, objects: Any, starts: Any, ends: Any, **kwargs: Any) -> None:
            tensors, slots = kwargs["kvcaches"], kwargs["slot_mapping"]
            for memory, start, end in zip(objects, starts, ends, strict=True):
                multi_layer_kv_transfer(
                    memory.tensor,
                    tensors,
                    slots[start:end],
                    tensors[0].device,
                    tensors[0].shape[1],
                    how,
                    EngineKVFormat.NL_X_TWO_NB_BS_NH_HS,
                    block_size=BLOCK,
                )

        def batched_from_gpu(self, memory_objs: Any, starts: Any, ends: Any, **kwargs: Any) -> None:
            self._transfer(TransferDirection.D2H, memory_objs, starts, ends, **kwargs)

        def batched_to_gpu(self, memory_objs: Any, starts: Any, ends: Any, **kwargs: Any) -> None:
            self._transfer(TransferDirection.H2D, memory_objs, starts, ends, **kwargs)

        def get_shape(self, num_tokens: int | None = None) -> Any:
            return torch.Size([2, layers, num_tokens or CHUNK, HEADS * HEAD_DIM])

    shape = (layers, 2, CHUNK, HEADS, HEAD_DIM)
    config = LMCacheEngineConfig.from_defaults(chunk_size=CHUNK, local_cpu=True, max_local_cpu_size=gb)
    metadata = LMCacheMetadata("peer", 1, 1, 0, 0, torch.bfloat16, shape)
    engine = LMCacheEngineBuilder.get_or_create(
        "peer", config, metadata, CPUConnector(shape), lambda tensor, rank: None, lambda value, rank: value
    )
    engine.post_init()
    return engine


class Peer:
    """The tokens of one request, its tensors and its scattered blocks."""

    def __init__(self, layers: int, blocks: list[int], tokens: list[int], gb: float) -> None:
        import torch

        self._engine = engine_of(layers, gb)
        slots = 2 * len(blocks) * BLOCK
        self._tensors = [torch.randn((2, slots, HEADS * HEAD_DIM)).to(torch.bfloat16) for _ in range(layers)]
        starts = torch.tensor(blocks).repeat_interleave(BLOCK) * BLOCK
        self._slots = starts + torch.arange(BLOCK).repeat(len(blocks))
        self._tokens = tokens
        self._moved = {"kvcaches": self._tensors, "slot_mapping": self._slots}

    def store(self) -> None:
        self._engine.store(self._tokens, **self._moved)

    def retrieve(self) -> None:
        found = self._engine.retrieve(self._tokens, **self._moved)
        assert int(found.sum()) == len(self._tokens), "LMCache lost something"

    def clear(self) -> None:
        self._engine.clear()

    def check(self) -> None:
        """Check that LMCache returns the stored KV, byte for byte."""
        wanted = [tensor[:, self._slots].clone() for tensor in self._tensors]
        self.clear()
        self.store()
        for tensor in self._tensors:
            tensor[:, self._slots] = 0
        self.retrieve()
        for tensor, expected in zip(self._tensors, wanted, strict=True):
            assert bool((tensor[:, self._slots] == expected).all()), "LMCache changed something"


def main() -> None:
    # LMCache writes to standard output: that becomes standard error, and answers keep the pipe.
    answers = os.fdopen(os.dup(1), "w", buffering=1)
    os.dup2(2, 1)
    peer = Peer(**json.loads(sys.stdin.readline()))
    print(0.0, file=answers)
    for line in sys.stdin:
        work = getattr(peer, json.loads(line)["do"])
        cpu = time.process_time()
        work()
        print(time.process_time() - cpu, file=answers)
    os._exit(0)


if __name__ == "__main__":
    main()
