"""Identifies everything except tokens that decides KV: salt, adapter, tags, weights, images, sounds and videos.

vLLM names an image, sound or video by an `identifier`: a hash of its content, a name from the client, or a counter.
lmkv cannot tell a hash from a client's name, so lmkv does not trust identifiers. lmkv hashes the tensors that vLLM's
processor makes, because the model sees only these tensors.
"""

from __future__ import annotations

import hashlib
import logging
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

from attrs import define, field
from cachetools import LRUCache

from lmkv.chunks.namespace import Namespace, canonical
from lmkv.errors import printable

logger = logging.getLogger("lmkv.vllm")


def request_root(
    namespace: Namespace, request: Any, tags: Iterable[tuple[str, str]], loaded: str = "", adapter: str = ""
) -> bytes:
    """Return the root of a request's chunk keys: a digest of namespace, cache salt, LoRA adapter, tags and weights.

    `tags`: pairs of name and value. `loaded`: the identity of the model that the workers have loaded. `adapter`: the
    identity of the request's adapter (see `Adapters`).
    """
    lora = getattr(request, "lora_request", None)
    extra = {"lora": adapter} if lora is not None else {}
    named = (str(lora.lora_name), str(lora.lora_path)) if lora is not None else None
    extra |= {f"tag.{name}": value for name, value in tags} | ({"loaded": loaded} if loaded else {})
    return namespace.root(cache_salt=getattr(request, "cache_salt", None), lora=named, extra=extra)


def tagged_root(namespace: Namespace, tags: Iterable[tuple[str, str]], loaded: str, cache_salt: str | None) -> bytes:
    """Return the root of the chunk keys of a prompt that has no adapter. The arguments are those of `request_root`."""
    extra = {f"tag.{name}": value for name, value in tags} | ({"loaded": loaded} if loaded else {})
    return namespace.root(cache_salt=cache_salt, lora=None, extra=extra)


SUFFIXES = (".safetensors", ".bin", ".pt", ".pth", ".gguf")
_CONFIG = "adapter_config.json"
Stamps = tuple[tuple[str, int, int, int], ...]


def stamps(folder: Path) -> Stamps:
    """Return `(name, inode, size, time)` of each file of weights or configuration in `folder`; () if there are none.

    The result changes when such a file is written.
    """
    with suppress(OSError):
        # Not a broken link, a folder or a pipe of such a name.
        files = sorted(file for file in folder.iterdir() if file.suffix in (*SUFFIXES, ".json") and file.is_file())
        found = [(file.name, file.stat()) for file in files]
        return tuple((name, status.st_ino, status.st_size, status.st_mtime_ns) for name, status in found)
    return ()


def folder_of(path: str, file: str = _CONFIG) -> Path:
    """Return the local folder that vLLM uses for `path`: the path itself, or a snapshot in the Hugging Face cache that
    contains `file`.
    """
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
"""A loaded LoRA adapter: a digest of its weights and scales, and the `stamps` of its files before the load."""


@define(eq=False)
class Adapters:
    """Identifies the LoRA adapters that one engine serves. Only the scheduling thread calls its methods.

    `load(lora)`: a function that returns an adapter as the workers have loaded it, or None if unknown. If an adapter's
    files change after its load, requests with this adapter are not cached, because vLLM may have read the new files.
    Clients must then load the adapter under another name.
    """

    _load: Callable[[Any], Adapter | None]
    _known: LRUCache[int, tuple[str, Adapter]] = field(factory=lambda: LRUCache(1024), init=False)
    """For each adapter number: the path, digest and file stamps of the last adapter with this number."""

    def identity(self, lora: Any) -> str:
        """Return a digest of an adapter's weights and scales. If the adapter is unknown, log a warning and return
        "".
        """
        path, number = str(lora.lora_path), int(getattr(lora, "lora_int_id", 0))
        if getattr(lora, "load_inplace", False):
            return self._unknown(path, number, "vLLM reads the adapter again in every step (load_inplace)")
        if number not in self._known or self._known[number][0] != path:
            found = self._load(lora)
            if found is None or not all(found):
                return self._unknown(path, number, "the workers cannot identify the adapter that they have loaded")
            self._known[number] = path, found
        digest, before = self._known[number][1]
        if digest and stamps(folder_of(path)) != before:
            return self._unknown(path, number, "the adapter's files have changed: load the adapter under another name")
        return digest

    def loaded(self, number: int, digest: str) -> None:
        """Note that a worker has loaded an adapter with this digest as number `number`, and forget any other digest of
        this number.
        """
        if number in self._known and self._known[number][1][0] != digest:
            self.forget(number)

    def forget(self, number: int) -> None:
        """Forget adapter number `number`, so that `identity` asks the workers again."""
        self._known.pop(number, None)

    def _unknown(self, path: str, number: int, why: str) -> str:
        logger.warning("lmkv: requests with the adapter %s are not cached: %s", printable(path), why)
        self._known[number] = path, ("", ())
        return ""


# -- images, sounds and videos ----------------------------------------------------------------------------


_REMEMBERED = 1 << 16
"""Number of identifiers to remember: more than vLLM's caches have items."""


class UnnamedMediaError(Exception):
    """lmkv cannot identify an image, sound or video of a request, so the request is not cached."""


@define(eq=False)
class Media:
    """Identifies the images, sounds and videos (items) of one engine's requests. Only the scheduling thread calls its
    methods.

    vLLM's caches use only identifiers. If two different items have the same identifier, vLLM may use either item for
    both. Therefore lmkv remembers the first digest of an identifier, and rejects any other digest. `by_name`: whether
    to use identifiers instead of digests, because the operator guarantees that identifiers are unique.
    """

    by_name: bool = False
    _first: LRUCache[bytes, tuple[bytes, tuple[str, str]]] = field(
        factory=lambda: LRUCache(_REMEMBERED), init=False, repr=False
    )
    """For the digest of each identifier: the item's first digest, and the weights and adapter that encoded the item."""
    _warned: set[str] = field(factory=set, init=False, repr=False)

    def extras(self, request: Any, chunk_size: int, weights: str = "", adapter: str = "") -> Mapping[int, bytes]:
        """Return a digest of the items that overlap each chunk, by chunk index. Tokens alone do not distinguish items.

        The digest covers kind, content and position of each item. `weights`, `adapter`: identities of the weights and
        the adapter that encode the items. Raises UnnamedMediaError for an item that cannot be identified.
        """
        parts: dict[int, list[tuple[int, int, str, bytes]]] = {}
        features = getattr(request, "mm_features", None) or ()
        # All of them, because vLLM also encodes those behind an unnamed one.
        name = getattr(getattr(request, "lora_request", None), "lora_name", None)
        # An adapter of the encoder is part of an item's identifier.
        with_adapter = {False: (weights, ""), True: (weights, adapter)}
        digests = [self._digest(each, with_adapter[str(each.identifier).startswith(f"{name}:")]) for each in features]
        for feature, digest in zip(features, digests, strict=True):
            if isinstance(digest, UnnamedMediaError):
                raise digest
            offset, length = feature.mm_position.offset, feature.mm_position.length
            for chunk in range(offset // chunk_size, -(-(offset + length) // chunk_size)):
                place = offset - chunk * chunk_size
                parts.setdefault(chunk, []).append((place, length, str(feature.modality), digest))
        return {chunk: hashlib.sha256(canonical(tuple(sorted(found)))).digest() for chunk, found in parts.items()}

    def clear(self) -> None:
        """Forget all items, because vLLM has cleared its encoder cache."""
        self._first.clear()

    def _digest(self, feature: Any, encoded_with: tuple[str, str]) -> bytes | UnnamedMediaError:
        named = canonical(("name", str(feature.identifier)))
        name = hashlib.sha256(named).digest()
        digest = named if self.by_name else _of_tensors(feature)
        if digest is None:
            return self._unnamed(
                "the scheduler does not have an item's tensors, because of --mm-processor-cache-type shm or because "
                "another engine has computed the embeddings"
            )
        mine = name if self.by_name else digest, encoded_with
        if self._first.setdefault(name, mine) != mine:
            return self._unnamed(
                "vLLM may have cached another item, or other weights' embeddings, under an item's identifier: reset "
                "vLLM's encoder cache"
            )
        return digest

    def _unnamed(self, why: str) -> UnnamedMediaError:
        if why not in self._warned:
            self._warned.add(why)
            logger.warning("lmkv: some requests with images, sounds or videos are not cached: %s", why)
        return UnnamedMediaError(why)


def _of_tensors(feature: Any) -> bytes | None:
    data = getattr(feature, "data", None)
    if not data or any(getattr(element, "data", element) is None for element in data.values()):
        return None
    return digest_of(data)


def digest_of(data: Mapping[str, Any]) -> bytes:
    """Return a digest of an item's tensors and their names. `data`: a `MultiModalKwargsItem`, or a plain mapping."""
    digest = hashlib.sha256()
    for name in sorted(data):
        digest.update(canonical(name))
        element = data[name]
        for piece in _pieces(getattr(element, "data", element)):
            digest.update(piece)
    return digest.digest()


def _pieces(value: Any) -> Iterator[bytes | memoryview]:
    """Yield the content of nested tensors as bytes. Headers with types and lengths make the bytes unambiguous."""
    import torch

    if isinstance(value, torch.Tensor):
        yield canonical(("tensor", str(value.dtype), tuple(value.shape)))
        yield value.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy().data
    elif isinstance(value, list | tuple):
        yield canonical(("list", len(value)))
        for part in value:
            yield from _pieces(part)
    else:
        yield canonical((type(value).__name__, repr(value)))
