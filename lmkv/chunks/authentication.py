"""Tags that prove who wrote a chunk, for tiers that others may write to: only holders of the key can make them."""

from __future__ import annotations

import hmac
from typing import Any, Self

from attrs import field, frozen

from lmkv.errors import ConfigError

MIN_KEY_BYTES = 32
SALT_BYTES = 32
TAG_BYTES = 16
HEADER_TAG_BYTES = 32
_NONCE_BYTES = 12


@frozen
class Authenticator:
    """Makes tags from a secret: HMAC-SHA256 of headers, and AES-GMAC of segments with a key for each file.

    Parameters
    ----------
    secret
        32 random bytes at least.

    Raises
    ------
    ConfigError
        The secret is shorter, or cryptography is not installed.

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
            raise ConfigError("an authentication key needs cryptography: pip install 'lmkv[auth]'") from error
        return AESGCM

    @classmethod
    def of(cls, secret: bytes | None) -> Self | None:
        return None if secret is None else cls(secret)

    @property
    def identifier(self) -> str:
        """A public name of the key, from which the key cannot be found out."""
        return self._derived(b"identifier").hex()

    def of_segments(self, salt: bytes, key: bytes, payload: memoryview, segment_bytes: int, first: int = 0) -> bytes:
        """The joined tags of consecutive segments in the file of chunk `key`, from number `first` on.

        `salt`: random, and new for each file, because two segments must never have the same key and number.
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
