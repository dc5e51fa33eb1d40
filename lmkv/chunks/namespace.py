"""Namespaces: all conditions, other than tokens, on which the KV of a chunk depends. Every chunk key depends on them
too.

Two chunks may share a key only if their KV is interchangeable. Chunks with equal tokens are interchangeable only if
model, formats, parallelism, cache salt and LoRA adapter are equal. A hash of an injective encoding of these values is
the root of a prompt's keys. With an `Authenticator`, only processes with the same secret share chunks.
"""

from __future__ import annotations

import hashlib
import hmac
from collections.abc import Iterable, Mapping
from functools import cached_property
from types import MappingProxyType
from typing import Any, Self

from attrs import Attribute, asdict, field, frozen

from lmkv.errors import ConfigError, UsageError, how_to_install, short_repr

FORMAT_VERSION = 1
"""Version of the keys. The version changes when the same tokens and namespace get other keys."""

_NAMESPACE_TAG = b"lmkv namespace\0"
_ROOT_TAG = b"lmkv root\0"
_NOTHING: Mapping[str, Any] = MappingProxyType({})

MIN_KEY_BYTES = 32
SALT_BYTES = 32
TAG_BYTES = 16
HEADER_TAG_BYTES = 32
_NONCE_BYTES = 12


def canonical(value: object) -> bytes:
    """Return an encoding of None, an int, str or bytes, or of tuples and mappings of encodable values.

    Each value becomes a type tag, a 64-bit length and the content.

    The encoding is injective: values that differ in type or content differ in their bytes. The items of a mapping are
    sorted by their encoding. Raises UsageError for any other type, such as a bool.
    """
    match value:
        case None:
            tag, content = b"n", b""
        case bool():
            raise UsageError(f"a chunk key is made of int, str, bytes and None, not {short_repr(value)}")
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
            raise UsageError(f"a chunk key is made of int, str, bytes and None, not {short_repr(value)}")
    return tag + len(content).to_bytes(8, "little") + content


def _text(_: object, attribute: Attribute[Any], value: object) -> None:
    if not isinstance(value, str):
        raise UsageError(f"{attribute.name} must be a str, not {short_repr(value)}")


def _count(_: object, attribute: Attribute[Any], value: object) -> None:
    if not isinstance(value, int) or isinstance(value, bool) or value < 1:
        raise UsageError(f"{attribute.name} must be a positive int, not {short_repr(value)}")


def _pairs_of_text(_: object, attribute: Attribute[Any], value: tuple[tuple[object, object], ...]) -> None:
    if not all(isinstance(text, str) for pair in value for text in pair):
        raise UsageError(f"{attribute.name} must map str to str, not {short_repr(dict(value))}")


def _sorted_items(extra: Mapping[str, str] | Iterable[tuple[str, str]]) -> tuple[tuple[str, str], ...]:
    return tuple(sorted(dict(extra).items()))


def tenants_of(cache_salt: str | None, tags: Iterable[tuple[str, str]]) -> list[str]:
    """Return the names under which a request's tenants may have quotas: the label of the request's `cache_salt`, and
    `name:value` for each of the request's `tags`.

    A tag with a colon in its name is left out: tag `a:b` with value `c` would give the same tenant as tag `a` with
    value `b:c`.
    """
    return [
        *([salt_label(cache_salt)] if cache_salt else ()),
        *(f"{name}:{value}" for name, value in sorted(tags) if ":" not in name),
    ]


def salt_label(salt: str) -> str:
    """Return the label that stands for a `cache_salt` in quotas and metrics, because the salt is secret.

    >>> salt_label("alice")
    'salt-2bd806c97f0e00af'
    """
    return f"salt-{hashlib.sha256(salt.encode('utf-8', 'surrogatepass')).hexdigest()[:16]}"


# Without slots, because cached_property keeps its value in the instance's __dict__.
@frozen(slots=False, kw_only=True)
class Namespace:
    """Everything that engines must have in common to share chunks. Different namespaces never share a key.

    Parameters
    ----------
    model, revision
        The model's name, and its revision or a fingerprint of its weights.
    dtype, kv_cache_dtype
        Data types of the model and of the model's KV cache, such as "float32"; "auto" for a cache in the model's data
        type.
    chunk_size, block_size
        Tokens per chunk and per block.
    layout
        The memory layout of the KV cache, such as vLLM's name for the layout.
    ranks
        How ranks divide the model.
    extra
        Anything else on which KV depends, as a mapping of str to str. The attribute contains sorted pairs.

    Raises
    ------
    UsageError
        A value has another type, or a size is below 1.

    Examples
    --------
    >>> plain = Namespace(model="mine", dtype="float32", chunk_size=256, block_size=16)
    >>> tuned = Namespace(model="mine", dtype="float32", chunk_size=256, block_size=16, revision="v2")
    >>> plain.digest == tuned.digest
    False
    >>> plain.root(cache_salt="tenant") == plain.root()
    False
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
        """SHA-256 digest of the encoding of all fields and `FORMAT_VERSION`. The digest is the same in every
        process.
        """
        fields = asdict(self, recurse=False) | {"format": FORMAT_VERSION}
        return hashlib.sha256(_NAMESPACE_TAG + canonical(fields)).digest()

    def root(
        self,
        cache_salt: str | None = None,
        lora: tuple[str, str] | None = None,
        extra: Mapping[str, bytes | str] = _NOTHING,
    ) -> bytes:
        """Return the root of a request's chunk keys, 32 bytes. Without arguments, the root is the namespace's digest.

        Requests share chunks only if their roots are equal. `cache_salt` separates tenants; None and "" give different
        roots. `lora` is the adapter's name and path (or fingerprint). `extra` has everything else that changes the KV
        of every token. Raises UsageError for a value of another type.
        """
        if cache_salt is None and lora is None and not extra:
            return self.digest
        fields = {"cache_salt": cache_salt, "lora": lora, "extra": extra}
        return hashlib.sha256(_ROOT_TAG + self.digest + canonical(fields)).digest()


@frozen
class Authenticator:
    """Makes authentication tags from a secret: HMAC-SHA256 tags of headers, and AES-GMAC tags of segments, with one AES
    key for each file.

    Parameters
    ----------
    secret
        At least 32 random bytes.

    Raises
    ------
    ConfigError
        The secret has fewer than 32 bytes, or the package cryptography is not installed.

    Examples
    --------
    >>> mine, yours = Authenticator(b"m" * 32), Authenticator(b"y" * 32)
    >>> mine.of_header(b"header") == yours.of_header(b"header")
    False
    """

    secret: bytes = field(repr=False)
    _segment_key: bytes = field(init=False, repr=False, eq=False)
    _header_key: bytes = field(init=False, repr=False, eq=False)
    _cipher: Any = field(init=False, repr=False, eq=False)

    @secret.validator
    def _is_long_enough(self, _: object, secret: bytes) -> None:
        if len(secret) < MIN_KEY_BYTES:
            raise ConfigError(f"an authentication key must have at least {MIN_KEY_BYTES} bytes, not {len(secret)}")

    @_segment_key.default
    def _derive_segment_key(self) -> bytes:
        return self._derived(b"segment")

    @_header_key.default
    def _derive_header_key(self) -> bytes:
        return self._derived(b"header")

    @_cipher.default
    def _import_cipher(self) -> Any:
        try:
            from cryptography.hazmat.primitives.ciphers.aead import AESGCM
        except ImportError as error:
            raise ConfigError(f"authentication keys need the package cryptography: {how_to_install('auth')}") from error
        return AESGCM

    @classmethod
    def of(cls, secret: bytes | None) -> Self | None:
        return None if secret is None else cls(secret)

    @property
    def identifier(self) -> str:
        """A public name of the secret, which does not reveal the secret."""
        return self._derived(b"identifier").hex()

    def of_segments(self, salt: bytes, key: bytes, payload: memoryview, segment_bytes: int, first: int = 0) -> bytes:
        """Return the joined tags of the consecutive segments in `payload`, which belong to the file of chunk `key`.

        `segment_bytes`: the size of a segment. `first`: the number of the first segment. `salt`: random bytes, new for
        each file, because two segments must never have the same AES key and number.
        """
        mac = self._cipher(hmac.digest(self._segment_key, salt + key, "sha256")).encrypt
        starts = range(0, len(payload), segment_bytes)
        return b"".join(
            mac(number.to_bytes(_NONCE_BYTES, "little"), b"", payload[at : at + segment_bytes])
            for number, at in enumerate(starts, first)
        )

    def of_header(self, data: memoryview | bytes) -> bytes:
        return hmac.digest(self._header_key, data, "sha256")

    def _derived(self, purpose: bytes) -> bytes:
        return hmac.digest(self.secret, b"lmkv authentication " + purpose, "sha256")
