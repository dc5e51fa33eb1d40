"""Requests that share what is stored, and requests that must not, stored by one process for another.

`store_all` puts a chunk for each of `REQUESTS` on disk. Run with FOLDER it prints,
as JSON, which request finds whose chunk.
"""

from __future__ import annotations

import hashlib
import json
import sys
from collections.abc import Iterator
from contextlib import closing, contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch

from lmkv.build import build_store
from lmkv.chunks.hashing import KeyChain
from lmkv.chunks.layout import KVLayout, LayerPages
from lmkv.chunks.namespace import Namespace
from lmkv.config import Config
from lmkv.protocols import ChunkKey
from lmkv.store.tiered import TieredStore
from lmkv.vllm.plan.identity import Media, request_root
from lmkv.vllm.plan.options import RequestOptions
from tests.kit import LIMIT

CHUNK = 16
NAMESPACE = Namespace(model="m", dtype="float32", chunk_size=CHUNK, block_size=4)
LAYOUT = KVLayout(CHUNK, (LayerPages(4096, 1),))
TOKENS = list(range(100, 100 + 2 * CHUNK))


def request(**fields: Any) -> SimpleNamespace:
    return SimpleNamespace(**{"cache_salt": None, "lora_request": None, "mm_features": [], **fields})


def image(picture: str, offset: int, length: int = 8, identifier: str | None = None) -> SimpleNamespace:
    """A picture that vLLM names by its content, or by an `identifier`."""
    return SimpleNamespace(
        identifier=picture if identifier is None else identifier,
        modality="image",
        data={"pixel_values": torch.tensor(list(picture.encode()), dtype=torch.uint8)},
        mm_position=SimpleNamespace(offset=offset, length=length),
    )


def adapter(name: str, path: str) -> SimpleNamespace:
    return SimpleNamespace(lora_name=name, lora_path=path, lora_int_id=1)


def tagged(**tags: str) -> dict[str, str]:
    return {f"lmkv.tag.{name}": value for name, value in tags.items()}


REQUESTS = {
    "plain": request(),
    "salt a": request(cache_salt="a"),
    "salt b": request(cache_salt="b"),
    "empty salt": request(cache_salt=""),
    "adapter": request(lora_request=adapter("x", "/x")),
    "adapter of another name": request(lora_request=adapter("y", "/x")),
    "adapter at another path": request(lora_request=adapter("x", "/y")),
    "adapter and salt": request(cache_salt="a", lora_request=adapter("x", "/x")),
    "tag": request(kv_transfer_params=tagged(team="a")),
    "tag of another value": request(kv_transfer_params=tagged(team="b")),
    "tag of another name": request(kv_transfer_params=tagged(group="a")),
    "tag and salt": request(cache_salt="a", kv_transfer_params=tagged(team="a")),
    "image": request(mm_features=[image("one", 4)]),
    "another image": request(mm_features=[image("two", 4)]),
    "image elsewhere": request(mm_features=[image("one", 5)]),
    "longer image": request(mm_features=[image("one", 4, 9)]),
    "image in two chunks": request(mm_features=[image("one", 12)]),
    "two images": request(mm_features=[image("one", 0, 4), image("two", 4, 4)]),
    "two images, changed over": request(mm_features=[image("two", 0, 4), image("one", 4, 4)]),
}


def last_key(one: SimpleNamespace) -> ChunkKey:
    """The key of the request's second chunk: what marks the first one marks it too."""
    root = request_root(NAMESPACE, one, RequestOptions.of(one).tags)
    chain = KeyChain(root, CHUNK, Media().extras(one, CHUNK))
    chain.extend(TOKENS)
    return chain.keys[-1]


def content(name: str) -> bytes:
    return hashlib.sha256(name.encode()).digest() * (LAYOUT.slot_bytes // 32)


@contextmanager
def open_store(folder: Path) -> Iterator[TieredStore]:
    size = 64 * LAYOUT.slot_bytes / 2**30
    config = Config(
        chunk_size=CHUNK,
        max_local_cpu_size=size,
        local_disk=str(folder),
        max_local_disk_size=2 * size,
        disk_min_free=0.0,
    )
    with closing(build_store(config, NAMESPACE, LAYOUT, shared=False)) as store:
        assert store.wait_indexed(LIMIT)
        yield store


def store_all(folder: Path) -> None:
    with open_store(folder) as store:
        for name, one in REQUESTS.items():
            with store.reserve([last_key(one)]) as reservation:
                for slot in reservation.slots.values():
                    store.slab.view(slot)[:] = content(name)
                reservation.commit()
            assert store.drain(LIMIT)


def whose(store: TieredStore, name: str) -> list[str]:
    """The requests whose chunk this one finds."""
    promotion = store.promote([last_key(REQUESTS[name])])
    assert store.drain(LIMIT)
    with store.lease([last_key(REQUESTS[name])]) as lease:
        found = [bytes(store.slab.view(slot)) for slot in lease.slots]
    promotion.release()
    return [other for other in REQUESTS for chunk in found if content(other) == chunk]


if __name__ == "__main__":
    with open_store(Path(sys.argv[1])) as filled:
        print(json.dumps({name: whose(filled, name) for name in REQUESTS}))
