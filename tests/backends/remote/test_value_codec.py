"""Arbitrary bytes in the place of a value: an error of the two that are documented, or the right payload."""

from __future__ import annotations

import struct
import zlib
from collections.abc import Callable

from hypothesis import given, strategies as st

from lmkv.backends.remote.base import ValueCodec
from lmkv.chunks.codec import ChunkFormat, FormatError
from lmkv.protocols import Chunk
from tests.tables import raised

NAMESPACE = bytes(range(32))
CODEC = ValueCodec(ChunkFormat(NAMESPACE, segment_bytes=4096))
CHUNK = Chunk(b"k" * 32, memoryview(bytes(range(256)) * 40), b"p" * 32, bytes(64))
SOUND = bytes(CODEC.header_of(CHUNK)) + bytes(CHUNK.payload)

Edit = Callable[[bytes], bytes]


def overwritten(at: int, junk: bytes) -> Edit:
    return lambda blob: blob[:at] + junk + blob[at + len(junk) :]


def cut(at: int, count: int) -> Edit:
    return lambda blob: blob[:at] + blob[at + count :]


def repeated(at: int, count: int) -> Edit:
    return lambda blob: blob[: at + count] + blob[at:]


def resealed(blob: bytes) -> bytes:
    """The header's checksum made right, wherever the header says that it ends."""
    if len(blob) < 16:
        return blob
    (end,) = struct.unpack_from("<I", blob, 12)
    if not 136 <= end <= len(blob):
        return blob
    return blob[: end - 4] + struct.pack("<I", zlib.crc32(blob[: end - 4])) + blob[end:]


places = st.one_of(st.integers(0, 160), st.integers(0, len(SOUND)))
edits = st.one_of(
    st.builds(overwritten, places, st.binary(min_size=1, max_size=8)),
    st.builds(overwritten, places, st.sampled_from([b"\0" * 8, b"\xff" * 8, struct.pack("<Q", 1 << 63)])),
    st.builds(cut, places, st.integers(1, 9000)),
    st.builds(repeated, places, st.integers(1, 9000)),
    st.just(resealed),
)


def mutated(blob: bytes, changes: list[Edit]) -> bytes:
    for change in changes:
        blob = change(blob)
    return blob


hostile = st.one_of(
    st.lists(edits, min_size=1, max_size=4).map(lambda changes: mutated(SOUND, changes)),
    st.lists(edits, min_size=1, max_size=4).map(lambda changes: resealed(mutated(SOUND, changes))),
    st.binary(max_size=5000),
)


@given(hostile)
def test_a_value_is_refused_or_right(value: bytes) -> None:
    into = memoryview(bytearray(len(CHUNK.payload)))
    try:
        CODEC.unpack(CHUNK.key, memoryview(value), into)
    except FormatError as error:
        assert len(str(error)) < 300  # noqa: PT017
    else:
        assert into == CHUNK.payload


def test_the_sound_one_is_served() -> None:
    into = memoryview(bytearray(len(CHUNK.payload)))
    CODEC.unpack(CHUNK.key, memoryview(SOUND), into)
    assert into == CHUNK.payload
    raised(FormatError, "", CODEC.unpack, bytes(32), memoryview(SOUND), into)
