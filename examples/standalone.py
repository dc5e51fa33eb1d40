"""lmkv without a server: paged KV tensors that are stored, lost, found by their tokens and restored.

    python examples/standalone.py

Stands in for a model runner: `KV` is its paged memory, one tensor a layer, addressed through block tables.
"""

from __future__ import annotations

import sys
import tempfile

import torch

from lmkv import Config, Engine, Namespace, PagedMemory, Tier, TieredStore, destroy, get, get_or_create
from lmkv.backends import CPUPinnedBackend, LocalDiskBackend
from lmkv.policies import LRU

BLOCK_SIZE, CHUNK_SIZE, LAYERS, BLOCKS = 16, 256, 4, 256
GIB = 2**30


def paged_memory() -> list[torch.Tensor]:
    """[block, kv head, token in block, key and value] in bfloat16, one a layer."""
    return [torch.randn((BLOCKS, 2, BLOCK_SIZE, 128)).to(torch.bfloat16) for _ in range(LAYERS)]


def from_configuration(folder: str) -> bool:
    """The short way: the tiers that a configuration names."""
    kv = paged_memory()
    prompt = torch.randint(0, 32_000, (1500,)).tolist()
    blocks = torch.randperm(BLOCKS)[: len(prompt) // BLOCK_SIZE + 1].tolist()
    config = Config.load(max_local_cpu_size=0.25, local_disk=folder, max_local_disk_size=1.0, env={})

    with Engine.open(kv, block_size=BLOCK_SIZE, model="standalone", config=config) as engine:
        stored = engine.store(prompt, blocks)
        print(f"stored      {stored} of {len(prompt)} tokens: whole chunks of {engine.chunk_size}")
        engine.drain()
    whole = blocks[: stored // BLOCK_SIZE]
    saved = [layer[whole].clone() for layer in kv]
    for layer in kv:
        layer.zero_()
    print("lost        the paged memory was overwritten and the engine closed")

    with Engine.open(kv, block_size=BLOCK_SIZE, model="standalone", config=config) as engine:
        engine.wait_indexed(10)
        known, unknown = engine.lookup(prompt), engine.lookup(prompt[::-1])
        print(f"looked up   {known} tokens on disk; of another prompt {unknown}")
        handle = engine.prefetch(prompt)
        handle.wait(10)
        print(f"prefetched  {handle.tokens} tokens into host memory, from {dict(handle.sources)}")
        restored = engine.retrieve(prompt, blocks)
    equal = all(torch.equal(layer[whole], before) for layer, before in zip(kv, saved, strict=True))
    print(f"retrieved   {restored} tokens, {'every byte equal' if equal else 'WRONG BYTES'}")
    return equal and restored == stored


def from_objects(folder: str) -> bool:
    """The long way: a stack of one's own, put together from plain objects."""
    kv = paged_memory()
    memory = PagedMemory.of(kv)
    layout = memory.layout(CHUNK_SIZE, [BLOCK_SIZE])
    namespace = Namespace(model="mine", dtype="bfloat16", chunk_size=CHUNK_SIZE, block_size=BLOCK_SIZE)
    store = TieredStore(
        primary=Tier(CPUPinnedBackend(GIB // 8, layout.slot_bytes), LRU()),
        lower=[Tier(LocalDiskBackend(folder, namespace.digest), LRU(), capacity_bytes=GIB)],
    )
    with Engine(store, namespace, layout=layout, memory=memory) as engine:
        stored = engine.store(range(1000), list(range(63)))
        engine.drain()
        tiers = ", ".join(f"{tier.name} {tier.chunks} chunks" for tier in engine.stats().store.tiers)
        print(f"own stack   {stored} tokens in {tiers}")
        return stored == 768


def by_name() -> bool:
    """One engine for several places of a program. `destroy` closes it, as the end of a `with` does."""
    config = Config.load(max_local_cpu_size=0.25, env={})

    def make() -> Engine:
        return Engine.open(paged_memory(), block_size=BLOCK_SIZE, model="standalone", config=config)

    engine = get_or_create("mine", make)
    same = get_or_create("mine", make) is get("mine") is engine
    destroy("mine")
    print(f"by name     {'the same engine' if same else 'ANOTHER ENGINE'}, {'closed' if engine.closed else 'OPEN'}")
    return same and engine.closed


def main() -> int:
    with tempfile.TemporaryDirectory(prefix="lmkv-standalone-") as folder:
        ok = from_configuration(f"{folder}/configured") and from_objects(f"{folder}/own") and by_name()
    return 0 if ok else 1


if __name__ == "__main__":
    sys.exit(main())
