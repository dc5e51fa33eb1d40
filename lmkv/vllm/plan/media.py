"""Digests of the images, sounds and videos of a request: of the tensors that vLLM's processor made of them.

vLLM names an item by `identifier`: a hash of its content, a name that its client gave it, or a counter of its process.
Nothing tells these apart, so a name proves nothing. The tensors are what the model sees.
"""

from __future__ import annotations

import hashlib
import logging
from collections.abc import Iterator, Mapping
from typing import Any

from attrs import define, field
from cachetools import LRUCache

from lmkv.chunks.namespace import canonical

logger = logging.getLogger("lmkv.vllm")

_REMEMBERED = 1 << 16
"""Identifiers: more than vLLM's own caches have items."""


class UnnamedMediaError(Exception):
    """An item of a request has no identity, so that its chunks have none."""


@define(eq=False)
class Media:
    """Digests of the items of one engine's requests. Called on the scheduling thread only.

    vLLM's caches know an item by its identifier alone: of two contents with one identifier it may compute either. So
    the first digest of an identifier is remembered, and another one is no identity. `by_name`: the operator vouches
    for all names, and they are digests enough.
    """

    by_name: bool = False
    _first: LRUCache[bytes, tuple[bytes, tuple[str, str]]] = field(
        factory=lambda: LRUCache(_REMEMBERED), init=False, repr=False
    )
    """The keys are digests of the names, because names may have any length."""
    _warned: set[str] = field(factory=set, init=False, repr=False)

    def extras(self, request: Any, chunk_size: int, weights: str = "", adapter: str = "") -> Mapping[int, bytes]:
        """Digests of the items that overlap each chunk, by its number: their placeholder tokens are all alike.

        An item counts with its kind, its digest and its position relative to the chunk. `weights`,
        `adapter`: identities of what vLLM encodes them with. Raises UnnamedMediaError.
        """
        parts: dict[int, list[tuple[int, int, str, bytes]]] = {}
        features = getattr(request, "mm_features", None) or ()
        # All of them, as vLLM encodes those behind one without a name, too.
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
        """vLLM has forgotten all items that it had encoded."""
        self._first.clear()

    def _digest(self, feature: Any, encoded_with: tuple[str, str]) -> bytes | UnnamedMediaError:
        named = canonical(("name", str(feature.identifier)))
        name = hashlib.sha256(named).digest()
        digest = named if self.by_name else _of_tensors(feature)
        if digest is None:
            return self._unnamed(
                "an item's tensors are not in the scheduler's process (--mm-processor-cache-type shm, or embeddings "
                "that another engine has made)"
            )
        mine = name if self.by_name else digest, encoded_with
        if self._first.setdefault(name, mine) != mine:
            return self._unnamed(
                "an item has the identifier of another one, or of one that was encoded with other weights, of which "
                "vLLM may use what it has cached, until its encoder cache is reset"
            )
        return digest

    def _unnamed(self, why: str) -> UnnamedMediaError:
        if why not in self._warned:
            self._warned.add(why)
            logger.warning("lmkv: requests with such images, sounds or videos are not cached: %s", why)
        return UnnamedMediaError(why)


def _of_tensors(feature: Any) -> bytes | None:
    data = getattr(feature, "data", None)
    if not data or any(getattr(element, "data", element) is None for element in data.values()):
        return None
    return digest_of(data)


def digest_of(data: Mapping[str, Any]) -> bytes:
    """Digest of an item's tensors, by their names: `MultiModalKwargsItem`, or a plain mapping."""
    digest = hashlib.sha256()
    for name in sorted(data):
        digest.update(canonical(name))
        element = data[name]
        for piece in _pieces(getattr(element, "data", element)):
            digest.update(piece)
    return digest.digest()


def _pieces(value: Any) -> Iterator[bytes | memoryview]:
    """A nested tensor as bytes that tell where each part of it ends."""
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
