"""A chunk as one value of a remote store: the header of a chunk's file, then the payload, without padding.

The header names the namespace and the key, and has the checksums of the payload, so that a value that
somebody else has put under the key, or a torn one, is found to be none.
"""

from __future__ import annotations

from attrs import field, frozen

from lmkv.chunks import codec
from lmkv.chunks.codec import FormatError, Header
from lmkv.protocols import Chunk, ChunkKey


class WrongLengthError(Exception):
    """The value is sound, but its payload has another length than the caller expects."""


@frozen
class Blobs:
    """Makes and checks the values of one namespace. `token_room`: most token ids that a header records."""

    namespace: bytes = field(repr=bytes.hex)
    token_room: int = 512
    segment_bytes: int = codec.DEFAULT_SEGMENT_BYTES

    def header_bytes(self, payload_bytes: int) -> int:
        return codec.header_bytes(payload_bytes, self.segment_bytes, self.token_room)

    def blob_bytes(self, payload_bytes: int) -> int:
        """Length of the whole value."""
        return self.header_bytes(payload_bytes) + payload_bytes

    def header_of(self, chunk: Chunk) -> memoryview:
        """What comes before the chunk's payload."""
        payload = chunk.payload
        packed = memoryview(bytearray(self.header_bytes(len(payload))))
        header = Header(
            namespace=self.namespace,
            key=chunk.key,
            payload_bytes=len(payload),
            checksums=codec.segment_checksums(payload, self.segment_bytes),
            segment_bytes=self.segment_bytes,
            header_bytes=len(packed),
            parent=chunk.parent,
            tokens=chunk.tokens if len(chunk.tokens) <= 4 * self.token_room else b"",
        )
        codec.pack_header(header, packed)
        return packed

    def parsed(self, key: ChunkKey, data: memoryview, expected: int) -> Header:
        """The header at the start of `data`, which is the chunk's and of a payload of `expected` bytes.

        Raises `FormatError` for anything but a value of this chunk, and `WrongLengthError`.
        """
        header = codec.parse_header(data)
        if (header.namespace, header.key) != (self.namespace, key):
            raise FormatError(f"it is chunk {header.key.hex()} of namespace {header.namespace.hex()}")
        if header.payload_bytes != expected:
            raise WrongLengthError(f"its payload has {header.payload_bytes} bytes, the buffer {expected}")
        return header

    def unpack(self, key: ChunkKey, value: memoryview, into: memoryview) -> None:
        """Fill `into` with the payload of a whole value. Raises as `parsed` does."""
        header = self.parsed(key, value, len(into))
        if len(value) != header.header_bytes + len(into):
            raise FormatError(f"it has {len(value)} bytes, {header.header_bytes + len(into)} by its header")
        payload = value[header.header_bytes :]
        codec.verify_segments(header, payload)
        into[:] = payload
