"""How the chunks of one namespace are packed and verified, in a file as in a value of a remote store."""

from __future__ import annotations

import os

from attrs import define, field, frozen

from lmkv.chunks import codec
from lmkv.chunks.authentication import SALT_BYTES, Authenticator
from lmkv.chunks.codec import FormatError, Header


@frozen
class ChunkFormat:
    """Packs and verifies the chunks of a namespace, on any medium.

    `max_tokens`: most token ids that a header records. `authenticator`: None without a key; then
    checksums alone tell whether bytes are those that were written.
    """

    namespace: bytes = field(repr=bytes.hex)
    segment_bytes: int = codec.DEFAULT_SEGMENT_BYTES
    max_tokens: int = codec.DEFAULT_MAX_TOKENS
    authenticator: Authenticator | None = None

    def header_bytes(self, payload_bytes: int) -> int:
        authenticated = self.authenticator is not None
        return codec.header_bytes(payload_bytes, self.segment_bytes, self.max_tokens, authenticated=authenticated)

    def pack(self, into: memoryview, digests: SegmentDigests, payload_bytes: int, parent: bytes, ids: bytes) -> None:
        """Write a header over all of `into`. More token `ids` than there is room for are not recorded."""
        header = Header(
            namespace=self.namespace,
            key=digests.key,
            payload_bytes=payload_bytes,
            checksums=digests.checksums,
            segment_bytes=self.segment_bytes,
            header_bytes=len(into),
            parent=parent,
            tokens=ids if len(ids) <= 4 * self.max_tokens else b"",
            salt=digests.salt,
            tags=digests.tags,
        )
        codec.pack_header(header, into, self.authenticator)

    def parse(self, key: bytes, data: memoryview) -> Header:
        """The header at the start of `data`, checked to be that of the chunk. Raises `FormatError`."""
        header = codec.parse_header(data, self.authenticator)
        if (header.namespace, header.key) != (self.namespace, key):
            raise FormatError(f"it is chunk {header.key.hex()} of namespace {header.namespace.hex()}")
        return header

    def verify(self, header: Header, payload: memoryview, first: int = 0) -> None:
        """Verify consecutive segments, the first of which is number `first`. Raises `FormatError`."""
        codec.verify_segments(header, payload, first, self.authenticator)


@define
class SegmentDigests:
    """Computes the digests by which one written payload will be verified: `add` its segments, in their order."""

    key: bytes
    _format: ChunkFormat
    checksums: tuple[int, ...] = ()
    tags: bytes = b""
    salt: bytes = field(init=False)

    @salt.default
    def _new_salt(self) -> bytes:
        return os.urandom(SALT_BYTES) if self._format.authenticator else b""

    def add(self, payload: memoryview) -> None:
        """Add whole segments; the payload's last one may be shorter."""
        first, size = len(self.checksums), self._format.segment_bytes
        self.checksums += codec.segment_checksums(payload, size)
        if self._format.authenticator:
            self.tags += self._format.authenticator.of_segments(self.salt, self.key, payload, size, first)
