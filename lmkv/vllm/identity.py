"""Everything besides tokens that decides KV: salt, LoRA adapter, tags, images, weights."""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Iterable, Mapping
from functools import lru_cache
from pathlib import Path
from typing import Any

from lmkv.chunks.namespace import Namespace, canonical


def request_root(namespace: Namespace, request: Any, tags: Iterable[tuple[str, str]], epoch: str = "") -> bytes:
    """The root of a request's keys: namespace, cache salt, LoRA adapter, tags and epoch, each in its own field."""
    lora = getattr(request, "lora_request", None)
    return tagged_root(namespace, tags, epoch, getattr(request, "cache_salt", None), lora)


def tagged_root(
    namespace: Namespace, tags: Iterable[tuple[str, str]], epoch: str, cache_salt: str | None, lora: Any = None
) -> bytes:
    """The same without a request: the root of a prompt's keys. `lora`: vLLM's `LoRARequest`, or None."""
    extra = {f"tag.{name}": value for name, value in tags} | ({"epoch": epoch} if epoch else {})
    if lora is not None:
        extra["lora"] = _adapter_weights(lora)
    adapter = (str(lora.lora_name), str(lora.lora_path)) if lora is not None else None
    return namespace.root(cache_salt=cache_salt, lora=adapter, extra=extra)


def _adapter_weights(lora: Any) -> str:
    """Fingerprint of the adapter's weights: a retrained adapter at the same path is another one.

    Taken when vLLM reads the adapter: once per adapter number, or with each request if loaded in place.
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
    """Digests of the multimodal items that overlap each chunk: their placeholder tokens are all alike.

    An item counts with its identifier and its position relative to the chunk.
    """
    parts: dict[int, list[tuple[int, int, str]]] = {}
    for feature in getattr(request, "mm_features", None) or ():
        offset, length = feature.mm_position.offset, feature.mm_position.length
        for chunk in range(offset // chunk_size, -(-(offset + length) // chunk_size)):
            place = offset - chunk * chunk_size
            parts.setdefault(chunk, []).append((place, length, str(feature.identifier)))
    return {chunk: hashlib.sha256(canonical(tuple(sorted(found)))).digest() for chunk, found in parts.items()}


SUFFIXES = (".safetensors", ".bin", ".pt", ".pth", ".gguf")

_PLACES = 64
_PLACE_BYTES = 4096
_TENSOR_BYTES = 256
_MAX_HEADER = 1 << 27


def fingerprint(path: Path) -> str:
    """Digest of the weight files at `path`, a folder or a file, by name, size and samples. "" without files.

    Samples are taken of each tensor of a safetensors file, and of 64 places in any file: hashing a whole
    checkpoint would take minutes. A training run changes the digest; a change of a few weights may not.
    """
    digest, found = hashlib.sha256(), False
    for file in _files(path):
        digest.update(file.name.encode() + _sampled(file))
        found = True
    return digest.hexdigest() if found else ""


def _files(path: Path) -> Iterable[Path]:
    if path.is_file():
        return [path]
    return sorted(file for file in path.iterdir() if file.suffix in SUFFIXES) if path.is_dir() else []


def _sampled(path: Path) -> bytes:
    with path.open("rb", buffering=0) as file:
        descriptor = file.fileno()
        size = os.fstat(descriptor).st_size
        digest = hashlib.sha256(b"%d" % size)
        for place in range(_PLACES):
            offset = place * max(0, size - _PLACE_BYTES) // (_PLACES - 1)
            digest.update(os.pread(descriptor, _PLACE_BYTES, offset))
        for start, end in _tensors(descriptor, path.suffix):
            middle = max(start, (start + end - _TENSOR_BYTES) // 2)
            digest.update(os.pread(descriptor, min(_TENSOR_BYTES, end - middle), middle))
    return digest.digest()


def _tensors(descriptor: int, suffix: str) -> list[tuple[int, int]]:
    """`(start, end)` of the tensors in a safetensors file, in bytes; none for other files."""
    length = int.from_bytes(os.pread(descriptor, 8, 0), "little")
    if suffix != ".safetensors" or length > _MAX_HEADER:
        return []
    try:
        header = json.loads(os.pread(descriptor, length, 8))
        spans = [entry["data_offsets"] for name, entry in header.items() if name != "__metadata__"]
        return [(8 + length + int(start), 8 + length + int(end)) for start, end in spans]
    except (ValueError, KeyError, TypeError, AttributeError):
        return []
