"""Everything besides tokens that decides KV: salt, LoRA adapter, tags, weights. Images are in `media`."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable
from contextlib import suppress
from pathlib import Path
from typing import Any

from attrs import define, field
from cachetools import LRUCache

from lmkv.chunks.namespace import Namespace
from lmkv.errors import printable

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


SUFFIXES = (".safetensors", ".bin", ".pt", ".pth", ".gguf")
_CONFIG = "adapter_config.json"
Stamps = tuple[tuple[str, int, int, int], ...]


def stamps(folder: Path) -> Stamps:
    """Names, inodes, sizes and times of weights and configuration, which change when a file is written; () if none."""
    with suppress(OSError):
        # Not a broken link, a folder or a pipe of such a name.
        files = sorted(file for file in folder.iterdir() if file.suffix in (*SUFFIXES, ".json") and file.is_file())
        found = [(file.name, file.stat()) for file in files]
        return tuple((name, status.st_ino, status.st_size, status.st_mtime_ns) for name, status in found)
    return ()


def folder_of(path: str, file: str = _CONFIG) -> Path:
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


Adapter = tuple[str, Stamps]
"""An adapter as a worker has loaded it: a digest of its weights and scales, and the state of its files before."""


@define(eq=False)
class Adapters:
    """Identities of the LoRA adapters that one engine serves. Called on the scheduling thread only.

    `load(adapter)`: what the workers have loaded of it, now or before; None if they cannot tell. vLLM reads the files
    of an adapter again after it has dropped it, which nobody tells. So one whose files have changed since they were
    loaded has no identity, until it gets another number.
    """

    _load: Callable[[Any], Adapter | None]
    _known: LRUCache[int, tuple[str, Adapter]] = field(factory=lambda: LRUCache(1024), init=False)
    """The path, digest and files of the adapter that was last loaded, by its number."""

    def identity(self, lora: Any) -> str:
        """A digest of its weights and scales. Returns "", and warns, if it is unknown."""
        path, number = str(lora.lora_path), int(getattr(lora, "lora_int_id", 0))
        if getattr(lora, "load_inplace", False):
            return self._unknown(path, number, "it is read again in every step (load_inplace)")
        if number not in self._known or self._known[number][0] != path:
            found = self._load(lora)
            if found is None or not all(found):
                return self._unknown(path, number, "no worker tells what it has loaded")
            self._known[number] = path, found
        digest, before = self._known[number][1]
        if digest and stamps(folder_of(path)) != before:
            return self._unknown(path, number, "its files have changed since; load it under another number")
        return digest

    def loaded(self, number: int, digest: str) -> None:
        """A worker has loaded this under the number. What was known of it holds if it is the same."""
        if number in self._known and self._known[number][1][0] != digest:
            self.forget(number)

    def forget(self, number: int) -> None:
        """Ask the workers again for the adapter of this number."""
        self._known.pop(number, None)

    def _unknown(self, path: str, number: int, why: str) -> str:
        logger.warning("lmkv: requests with the adapter %s are not cached: %s", printable(path), why)
        self._known[number] = path, ("", ())
        return ""
