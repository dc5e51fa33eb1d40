"""What makes one request's KV differ from another's, beyond its tokens."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from typing import Any

from lmkv.keys import Namespace, canonical
from lmkv.vllm.options import RequestOptions


def request_root(namespace: Namespace, request: Any, options: RequestOptions) -> bytes:
    """The root of a request's keys: namespace, cache salt, LoRA adapter and tags, each in its own field."""
    lora = getattr(request, "lora_request", None)
    adapter = (str(lora.lora_name), str(lora.lora_path)) if lora is not None else None
    return namespace.root(
        cache_salt=getattr(request, "cache_salt", None),
        lora=adapter,
        extra={f"tag.{name}": value for name, value in options.tags},
    )


def content_extras(request: Any, chunk_size: int) -> Mapping[int, bytes]:
    """Digests, by chunk, of the multimodal items that overlap it: placeholder tokens alone say nothing.

    An item counts with its identifier and its place relative to the chunk.
    """
    parts: dict[int, list[tuple[int, int, str]]] = {}
    for feature in getattr(request, "mm_features", None) or ():
        offset, length = feature.mm_position.offset, feature.mm_position.length
        for chunk in range(offset // chunk_size, -(-(offset + length) // chunk_size)):
            place = offset - chunk * chunk_size
            parts.setdefault(chunk, []).append((place, length, str(feature.identifier)))
    return {chunk: hashlib.sha256(canonical(tuple(sorted(found)))).digest() for chunk, found in parts.items()}
