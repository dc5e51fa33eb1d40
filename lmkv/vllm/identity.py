"""Everything besides tokens that decides KV: salt, LoRA adapter, tags, weights. Images are in `media`."""

from __future__ import annotations

import hashlib
import json
import logging
import os
from collections.abc import Iterable
from contextlib import suppress
from pathlib import Path
from typing import Any

from attrs import define, field
from cachetools import LRUCache

from lmkv.chunks.namespace import Namespace

logger = logging.getLogger("lmkv.vllm")


def request_root(
    namespace: Namespace, request: Any, tags: Iterable[tuple[str, str]], loaded: str = "", adapter: str = ""
) -> bytes:
    """The root of a request's keys: namespace, cache salt, LoRA adapter, tags and weights, each in its own field.

    `loaded`: the identity of what the workers have loaded. `adapter`: that of its adapter (see `Adapters`).
    """
    lora = getattr(request, "lora_request", None)
    extra = {"lora": adapter} if lora is not None else {}
    named = (str(lora.lora_name), str(lora.lora_path)) if lora is not None else None
    extra |= {f"tag.{name}": value for name, value in tags} | ({"loaded": loaded} if loaded else {})
    return namespace.root(cache_salt=getattr(request, "cache_salt", None), lora=named, extra=extra)


def tagged_root(namespace: Namespace, tags: Iterable[tuple[str, str]], loaded: str, cache_salt: str | None) -> bytes:
    """The same without a request, and so without an adapter: the root of a prompt's keys."""
    extra = {f"tag.{name}": value for name, value in tags} | ({"loaded": loaded} if loaded else {})
    return namespace.root(cache_salt=cache_salt, lora=None, extra=extra)


@define(eq=False)
class Adapters:
    """Identities of the LoRA adapters that one engine serves. Called on the scheduling thread only.

    vLLM reads an adapter's files when it first needs it, and again after it has dropped it, which nobody tells. So an
    adapter whose files have changed since they were first seen has no identity, until it gets another number.
    """

    _known: LRUCache[tuple[str, int], tuple[str, Stamps]] = field(factory=lambda: LRUCache(1024), init=False)

    def identity(self, lora: Any) -> str:
        """A digest of its weights and configuration. Returns "", and warns, if they are missing or changed."""
        path, number = str(lora.lora_path), int(getattr(lora, "lora_int_id", 0))
        folder = folder_of(path, _CONFIG)
        current = stamps(folder)
        if getattr(lora, "load_inplace", False):
            return _adapter_fingerprint(path, folder)
        if (path, number) not in self._known:
            self._known[path, number] = _adapter_fingerprint(path, folder), current
        found, before = self._known[path, number]
        if found and current != before:
            logger.warning(
                "lmkv: the files of the adapter %s have changed, and vLLM does not tell when it reads them: requests "
                "with it are not cached until it is loaded under another number",
                path,
            )
            self._known[path, number] = "", current
            return ""
        return found


_CONFIG = "adapter_config.json"
Stamps = tuple[tuple[str, int, int, int], ...]


def stamps(folder: Path) -> Stamps:
    """Names, inodes, sizes and times of the weights and the configuration: they change when a file is written."""
    with suppress(OSError):
        files = [(path.name, path.stat()) for path in [*_files(folder), *folder.glob("*config.json")]]
        return tuple((name, status.st_ino, status.st_size, status.st_mtime_ns) for name, status in files)
    return ()


def _adapter_fingerprint(path: str, folder: Path) -> str:
    """A digest of the adapter's weights, and of its configuration, which scales them."""
    try:
        weights = fingerprint(folder)
        config = hashlib.sha256((folder / _CONFIG).read_bytes()).hexdigest()
    except OSError as error:
        logger.warning("lmkv: the adapter %s cannot be identified, and its requests are not cached: %s", path, error)
        return ""
    if not weights:
        logger.warning("lmkv: the adapter %s has no weights in %s; its requests are not cached", path, folder)
        return ""
    return f"{weights} {config}"


def folder_of(path: str, file: str) -> Path:
    """Where vLLM finds `path`: a folder, with or without `~`, or what the Hub's cache has of that name with `file`."""
    folder = Path(path).expanduser()
    if folder.exists() or folder.is_absolute():
        return folder
    with suppress(ImportError, ValueError):
        from huggingface_hub import try_to_load_from_cache

        found = try_to_load_from_cache(path, file)
        if isinstance(found, str):
            return Path(found).parent
    return folder


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
    if not path.is_dir():
        return []
    # Not a broken link, a folder or a pipe of such a name.
    return sorted(file for file in path.iterdir() if file.suffix in SUFFIXES and file.is_file())


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
