"""What makes one request's KV differ from another's, beyond its tokens."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from functools import lru_cache
from pathlib import Path
from typing import Any

from lmkv.keys import Namespace, canonical
from lmkv.vllm.options import RequestOptions
from lmkv.vllm.weights import fingerprint


def request_root(namespace: Namespace, request: Any, options: RequestOptions) -> bytes:
    """The root of a request's keys: namespace, cache salt, LoRA adapter and tags, each in its own field."""
    lora = getattr(request, "lora_request", None)
    extra = {f"tag.{name}": value for name, value in options.tags}
    if lora is not None:
        extra["lora"] = _adapter_weights(lora)
    return namespace.root(
        cache_salt=getattr(request, "cache_salt", None),
        lora=(str(lora.lora_name), str(lora.lora_path)) if lora is not None else None,
        extra=extra,
    )


def _adapter_weights(lora: Any) -> str:
    """A retrained adapter at the same path is another one.

    vLLM reads an adapter when it is new, and under a new number, or else each time it is used.
    """
    path = str(lora.lora_path)
    if getattr(lora, "load_inplace", False):
        return _fingerprint(path)
    return _known_fingerprint(path, int(getattr(lora, "lora_int_id", 0)))


@lru_cache(maxsize=1024)
def _known_fingerprint(path: str, number: int) -> str:
    return _fingerprint(path)


def _fingerprint(path: str) -> str:
    try:
        return fingerprint(Path(path))
    except OSError:
        return ""


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
