"""A chunk as one value of a remote store: the header of a chunk's file, then the payload, without padding.

The header has the namespace, the key and the checksums of the payload, so that a torn value, or a foreign one under
the key, is detected.
"""

from __future__ import annotations

from collections.abc import Callable

from attrs import frozen

from lmkv.chunks.codec import ChunkFormat, FormatError, Header, SegmentDigests
from lmkv.protocols import Chunk, ChunkKey

Fill = Callable[[memoryview], None]
"""Fills a buffer with the next bytes of a value."""


def filler(value: memoryview) -> Fill:
    """A function that fills buffers with the next bytes of `value`, as far as there are any."""

    def fill(part: memoryview) -> None:
        nonlocal value
        part[: len(value)] = value[: len(part)]
        value = value[len(part) :]

    return fill


@frozen
class ValueCodec:
    """Makes and checks the values of one namespace."""

    format: ChunkFormat

    def header_bytes(self, payload_bytes: int) -> int:
        return self.format.header_bytes(payload_bytes)

    def value_bytes(self, payload_bytes: int) -> int:
        """Length of the whole value."""
        return self.header_bytes(payload_bytes) + payload_bytes

    def header_of(self, chunk: Chunk) -> memoryview:
        """The header of a chunk's value."""
        payload = chunk.payload
        packed = memoryview(bytearray(self.header_bytes(len(payload))))
        digests = SegmentDigests(chunk.key, self.format)
        digests.add(payload)
        self.format.pack(packed, digests, len(payload), chunk.parent, chunk.tokens)
        return packed

    def parsed(self, key: ChunkKey, data: memoryview, expected: int) -> Header:
        """The header at the start of `data`, checked against the key and a payload of `expected` bytes.

        Raises `FormatError`.
        """
        header = self.format.parse(key, data)
        if header.payload_bytes != expected:
            raise FormatError(f"its payload has {header.payload_bytes} bytes, the buffer {expected}")
        return header

    def receive(self, key: ChunkKey, nbytes: int, fill: Fill, into: memoryview) -> None:
        """Fill `into` with the payload of a value of `nbytes`, which `fill` reads on. Raises as `parsed` does."""
        header_bytes = self.header_bytes(len(into))
        start = memoryview(bytearray(min(nbytes, header_bytes)))
        fill(start)
        header = self.parsed(key, start, len(into))
        if nbytes != header_bytes + len(into) or header.header_bytes != header_bytes:
            raise FormatError(f"it has {nbytes} bytes, {header.header_bytes + len(into)} by its header")
        self.receive_payload(header, fill, into)

    def receive_payload(self, header: Header, fill: Fill, into: memoryview) -> None:
        """Fill `into` with a payload that `fill` reads on. Raises `FormatError`."""
        for index, at in enumerate(range(0, len(into), header.segment_bytes)):
            segment = into[at : at + header.segment_bytes]
            fill(segment)
            # Verify now, while the bytes are in the processor's cache and more of them arrive.
            self.format.verify(header, segment, index)

    def unpack(self, key: ChunkKey, value: memoryview, into: memoryview) -> None:
        """Fill `into` with the payload of a whole value. Raises as `parsed` does."""
        self.receive(key, len(value), filler(value), into)
