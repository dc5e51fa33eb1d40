"""What the bytes of a chunk mean, and the roots that chains of chunk keys grow from.

Two chunks may share a key only if either could stand in for the other. Everything but the tokens that
decides this (model, formats, parallel split, cache salt, LoRA adapter) is hashed into the chain's root
through one injective encoding: no two different descriptions encode to the same bytes.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Mapping
from functools import cached_property
from types import MappingProxyType
from typing import Any

from attrs import Attribute, asdict, field, frozen

from lmkv.errors import UsageError

FORMAT_VERSION = 1
"""Of the keys: raised whenever the same tokens, under the same description, get other keys than before."""

_NAMESPACE_TAG = b"lmkv namespace\0"
_ROOT_TAG = b"lmkv root\0"
_NOTHING: Mapping[str, Any] = MappingProxyType({})


def canonical(value: object) -> bytes:
    """Encode None, int, str, bytes, tuples and mappings of them: a type tag, a 64-bit length, the content.

    Injective: equal bytes mean equal types and equal values. Mappings are sorted by their encoded items.
    Any other type is a `UsageError`.
    """
    match value:
        case None:
            tag, content = b"n", b""
        case bool():
            raise UsageError(f"a key cannot be made of {value!r}")
        case int():
            tag, content = b"i", b"%d" % value
        case str():
            # Lone surrogates are valid in a str; "surrogatepass" keeps them apart instead of failing.
            tag, content = b"s", value.encode("utf-8", "surrogatepass")
        case bytes():
            tag, content = b"b", value
        case tuple():
            tag, content = b"t", b"".join(map(canonical, value))
        case Mapping():
            items = sorted(canonical(key) + canonical(item) for key, item in value.items())
            tag, content = b"m", b"".join(items)
        case _:
            raise UsageError(f"a key cannot be made of {value!r}")
    return tag + len(content).to_bytes(8, "little") + content


def _text(_: object, attribute: Attribute[Any], value: object) -> None:
    if not isinstance(value, str):
        raise UsageError(f"{attribute.name} must be a str, not {value!r}")


def _count(_: object, attribute: Attribute[Any], value: object) -> None:
    if not isinstance(value, int) or isinstance(value, bool) or value < 1:
        raise UsageError(f"{attribute.name} must be a positive int, not {value!r}")


def _pairs_of_text(_: object, attribute: Attribute[Any], value: tuple[tuple[object, object], ...]) -> None:
    if not all(isinstance(text, str) for pair in value for text in pair):
        raise UsageError(f"{attribute.name} must map str to str, not {dict(value)!r}")


def _sorted_items(extra: Mapping[str, str] | Iterable[tuple[str, str]]) -> tuple[tuple[str, str], ...]:
    return tuple(sorted(dict(extra).items()))


# Without slots, because cached_property keeps its value in the instance's __dict__.
@frozen(slots=False, kw_only=True)
class Namespace:
    """What the bytes of a chunk mean. Chunks of different namespaces never share a key.

    `revision`: of the model, or a fingerprint of its weights. `dtype`: of the model. `kv_cache_dtype`: of
    the cache, "auto" when it follows the model. `chunk_size`, `block_size`: tokens. `layout`: page format,
    attention backends, instruction set where pages depend on it. `ranks`: the parallel split.
    `extra`: anything else, a mapping; kept as sorted pairs.
    """

    model: str = field(validator=_text)
    dtype: str = field(validator=_text)
    chunk_size: int = field(validator=_count)
    block_size: int = field(validator=_count)
    revision: str = field(default="", validator=_text)
    kv_cache_dtype: str = field(default="auto", validator=_text)
    layout: str = field(default="", validator=_text)
    ranks: str = field(default="tp1/pp1", validator=_text)
    extra: tuple[tuple[str, str], ...] = field(default=(), converter=_sorted_items, validator=_pairs_of_text)

    @cached_property
    def digest(self) -> bytes:
        """sha256 over the canonical encoding of all fields and `FORMAT_VERSION`, alike in every process."""
        fields = asdict(self, recurse=False) | {"format": FORMAT_VERSION}
        return hashlib.sha256(_NAMESPACE_TAG + canonical(fields)).digest()

    def root(
        self,
        cache_salt: str | None = None,
        lora: tuple[str, str] | None = None,
        extra: Mapping[str, bytes | str] = _NOTHING,
    ) -> bytes:
        """The 32-byte root of a request's chain; the digest itself for a request with nothing special.

        `cache_salt` keeps tenants apart. `lora` is the adapter's name and path (or fingerprint). `extra`
        names whatever else changes the KV of every token. None differs from "", and each field from every
        other. Another type is a `UsageError`.
        """
        if cache_salt is None and lora is None and not extra:
            return self.digest
        fields = {"cache_salt": cache_salt, "lora": lora, "extra": extra}
        return hashlib.sha256(_ROOT_TAG + self.digest + canonical(fields)).digest()
