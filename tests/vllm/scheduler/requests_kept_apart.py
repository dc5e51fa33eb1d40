"""Requests that share what is stored, and requests that must not. It prints, as JSON, the key of a chunk of each."""

from __future__ import annotations

import json
from types import SimpleNamespace
from typing import Any

import torch

from lmkv.chunks.hashing import KeyChain
from lmkv.chunks.namespace import Namespace
from lmkv.protocols import ChunkKey
from lmkv.vllm.plan.identity import Media, request_root
from lmkv.vllm.plan.options import RequestOptions

CHUNK = 16
NAMESPACE = Namespace(model="m", dtype="float32", chunk_size=CHUNK, block_size=4)
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


def last_keys() -> dict[str, str]:
    """Of each request, by its name."""
    return {name: last_key(one).hex() for name, one in REQUESTS.items()}


if __name__ == "__main__":
    print(json.dumps(last_keys()))
