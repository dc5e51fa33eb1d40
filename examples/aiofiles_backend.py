"""A disk tier whose backend is written with asyncio and aiofiles: chunks outlive the engine that stored them.

    python examples/aiofiles_backend.py

`lmkv/backends/adapters.py` is the backend: read it before you write one of your own as coroutines.
"""

from __future__ import annotations

import sys
import tempfile

import torch

from lmkv import Engine, Namespace, PagedMemory, Tier, TieredStore
from lmkv.backends import AsyncAdapter, AsyncFileBackend, CPUPinnedBackend
from lmkv.policies import LRU

BLOCK_SIZE, CHUNK_SIZE = 16, 256
GIB = 2**30


def main(folder: str) -> bool:
    kv = [torch.randn((64, 2, BLOCK_SIZE, 64)) for _ in range(4)]  # [block, ...], one tensor per layer
    memory = PagedMemory.of(kv)
    layout = memory.layout(CHUNK_SIZE, [BLOCK_SIZE])
    namespace = Namespace(model="mine", dtype="float32", chunk_size=CHUNK_SIZE, block_size=BLOCK_SIZE)
    prompt, blocks = range(800), list(range(50))

    def engine() -> Engine:
        disk = Tier(AsyncAdapter(AsyncFileBackend(folder), deadline=30.0), LRU(), capacity_bytes=GIB)
        host = Tier(CPUPinnedBackend(GIB // 16, layout.slot_bytes), LRU())
        return Engine(TieredStore(host, [disk]), namespace, layout=layout, memory=memory)

    with engine() as first:
        print(f"stored {first.store(prompt, blocks)} tokens")
        first.drain()  # the copies in lower tiers are written in the background
    before = [layer.clone() for layer in kv]
    for layer in kv:
        layer.zero_()
    with engine() as second:
        second.wait_indexed(10)
        tokens = second.retrieve(prompt, blocks)
    whole = blocks[: tokens // BLOCK_SIZE]
    equal = all(torch.equal(layer[whole], old[whole]) for layer, old in zip(kv, before, strict=True))
    print(f"retrieved {tokens} tokens: {'equal' if equal else 'WRONG BYTES'}")
    return equal


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as folder:
        sys.exit(not main(folder))
