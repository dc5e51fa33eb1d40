"""Fingerprints of weights: what tells two models, or two adapters, of the same name apart."""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Iterable
from pathlib import Path

SUFFIXES = (".safetensors", ".bin", ".pt", ".pth", ".gguf")

_PLACES = 64
_PLACE_BYTES = 4096
_TENSOR_BYTES = 256
_MAX_HEADER = 1 << 27


def fingerprint(path: Path) -> str:
    """Of the weight files at `path`, a folder or a file: names, sizes and samples. "" when there are none.

    Samples are taken of every tensor where the format says where they are, and of 64 places in any file:
    hashing whole checkpoints would take minutes. So a change of a few numbers in between goes unseen, a
    training run does not.
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
    """Where the tensors of a safetensors file lie, in the order of its header; none for other files."""
    length = int.from_bytes(os.pread(descriptor, 8, 0), "little")
    if suffix != ".safetensors" or length > _MAX_HEADER:
        return []
    try:
        header = json.loads(os.pread(descriptor, length, 8))
        spans = [entry["data_offsets"] for name, entry in header.items() if name != "__metadata__"]
        return [(8 + length + int(start), 8 + length + int(end)) for start, end in spans]
    except (ValueError, KeyError, TypeError, AttributeError):
        return []
