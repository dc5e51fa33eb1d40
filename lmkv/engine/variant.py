"""`Variant`: everything besides tokens that two prompts must have in common to share KV."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from attrs import astuple, field, frozen

from lmkv.chunks.namespace import Namespace
from lmkv.errors import UsageError, short_repr


@frozen
class Variant:
    """Everything besides tokens that two prompts must have in common to share KV.

    Parameters
    ----------
    cache_salt
        Separates tenants.
    lora
        Name and path of an adapter.
    tags
        Anything else, by name.

    Notes
    -----
    Immutable: threads may share it.

    Examples
    --------
    >>> Variant(cache_salt="tenant 1") == Variant(cache_salt="tenant 2")
    False
    """

    cache_salt: str | None = None
    lora: tuple[str, str] | None = None
    tags: Mapping[str, str] = field(factory=dict)


PLAIN = Variant()


def root_of(variant: Variant, namespace: Namespace) -> bytes:
    """The root of the chunk keys of a prompt. Raises UsageError for a variant whose parts have other types."""
    if variant is PLAIN and not variant.tags:
        # Most prompts: in caches that a copy has left cold, the rest takes as long as hashing a thousand tokens.
        return namespace.digest
    _check(variant)
    tags = {f"tag.{name}": value for name, value in variant.tags.items()}
    return namespace.root(cache_salt=variant.cache_salt, lora=variant.lora, extra=tags)


def _check(given: object) -> None:
    parts: Any = astuple(given, recurse=False) if isinstance(given, Variant) else (None, None, None)
    salt, lora, tags = parts
    if isinstance(tags, Mapping) and isinstance(lora, tuple | None):
        texts = (*(lora or ("", "")), *tags, *tags.values(), "" if salt is None else salt)
        if len(lora or "ab") == 2 and all(isinstance(text, str) for text in texts):
            return
    expected = "Variant(cache_salt=str, lora=(str, str), tags={str: str})"
    raise UsageError(f"variant must be {expected}, not {short_repr(given)}")
