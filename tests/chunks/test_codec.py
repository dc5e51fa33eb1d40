"""The format: round trips, golden bytes, and that hostile bytes are rejected and nothing else."""

from __future__ import annotations

import importlib.util
import struct
import sys
import zlib
from typing import Any

import pytest
from attrs import evolve
from hypothesis import example, given, strategies as st

from lmkv import __version__
from lmkv.chunks import codec
from lmkv.chunks.codec import PAGE, FormatError, Header
from lmkv.protocols import Chunk
from lmkv.testing import strategies
from tests.tables import raised

NAMESPACE = b"\x01" * 32
SEGMENTS = st.sampled_from([4096, 8192, 65536, codec.DEFAULT_SEGMENT_BYTES])


def header_of(chunk: Chunk, segment_bytes: int = 4096) -> Header:
    nbytes, sums = len(chunk.payload), codec.segment_checksums(chunk.payload, segment_bytes)
    return Header(
        namespace=NAMESPACE,
        key=chunk.key,
        payload_bytes=nbytes,
        checksums=sums,
        segment_bytes=segment_bytes,
        header_bytes=codec.header_bytes(nbytes, segment_bytes, len(chunk.tokens) // 4),
        parent=chunk.parent,
        tokens=chunk.tokens,
    )


def packed(header: Header) -> bytearray:
    data = bytearray(b"\xee" * header.header_bytes)
    codec.pack_header(header, memoryview(data))
    return data


def resealed(data: bytearray) -> memoryview:
    """The header with its checksum made right again: what a liar would write, not what a disk would break."""
    (nbytes,) = struct.unpack_from("<I", data, 12)
    struct.pack_into("<I", data, nbytes - 4, zlib.crc32(data[: nbytes - 4]))
    return memoryview(data)


SMALL = header_of(Chunk(b"\x02" * 32, memoryview(bytes(range(256)) * 40), b"\x03" * 32, bytes(range(32))))


@given(chunk=strategies.chunks(), segment_bytes=SEGMENTS)
def test_a_header_comes_back_as_it_was(chunk: Chunk, segment_bytes: int) -> None:
    header = header_of(chunk, segment_bytes)
    data = memoryview(packed(header))
    assert len(data) == codec.peek_header_bytes(data)
    assert codec.parse_header(data) == header
    codec.verify_segments(header, chunk.payload)


def test_golden_bytes() -> None:
    """Each field at the offset that docs/development/format.md gives it; whoever changes this needs a new version."""
    data = bytes(packed(SMALL))
    assert data[:8] == b"LMKV\r\n\x1a\n"
    assert struct.unpack_from("<HHIQIII", data, 8) == (1, 1, 4096, 10240, 4096, 3, 8)
    assert data[36:68] == NAMESPACE
    assert data[68:100] == b"\x02" * 32
    assert data[100:132] == b"\x03" * 32
    payload = bytes(range(256)) * 40
    assert struct.unpack_from("<3I", data, 132) == tuple(zlib.crc32(payload[at : at + 4096]) for at in (0, 4096, 8192))
    assert data[144:176] == bytes(range(32))
    assert data[176:4084] == bytes(4084 - 176)
    assert struct.unpack_from("<4H", data, 4084) == (*codec.THIS_WRITER, 0)
    assert __version__.startswith(".".join(map(str, codec.THIS_WRITER)))
    assert struct.unpack_from("<I", data, 4092) == (zlib.crc32(data[:4092]),)
    assert SMALL.file_bytes == 4096 + 12288


def test_a_chunk_of_a_writer_that_is_known_to_be_wrong_is_not_read(monkeypatch: pytest.MonkeyPatch) -> None:
    older = memoryview(packed(evolve(SMALL, writer=(0, 0, 9))))
    unknown = memoryview(packed(evolve(SMALL, writer=(0, 0, 0))))
    assert codec.parse_header(older).writer == (0, 0, 9)
    monkeypatch.setattr(codec, "REFUSED_WRITERS", {(0, 0, 9)})
    raised(FormatError, r"lmkv 0\.0\.9 wrote the chunk", codec.parse_header, older)
    assert codec.parse_header(unknown).writer == (0, 0, 0)
    assert codec.parse_header(memoryview(packed(SMALL))) == SMALL


def test_every_flipped_bit_of_a_header_is_noticed() -> None:
    good = packed(SMALL)
    for at in range(len(good)):
        for bit in (0, 3, 7):
            data = bytearray(good)
            data[at] ^= 1 << bit
            raised(FormatError, "", codec.parse_header, memoryview(data))


def test_every_shortened_header_is_noticed() -> None:
    good = memoryview(packed(SMALL))
    for nbytes in range(len(good)):
        raised(FormatError, "", codec.parse_header, good[:nbytes])


@given(st.binary(max_size=3 * PAGE))
@example(b"")
def test_random_bytes_are_rejected(data: bytes) -> None:
    raised(FormatError, "", codec.parse_header, memoryview(data))


@given(at=st.integers(0, 131), junk=st.binary(min_size=1, max_size=16))
def test_sealed_lies_are_rejected_or_harmless(at: int, junk: bytes) -> None:
    """Fields overwritten and the checksum made right: a rejection, or a header that keeps its invariants."""
    data = packed(SMALL)
    data[at : at + len(junk)] = junk
    data = data[: 2 * PAGE]
    try:
        nbytes = codec.peek_header_bytes(memoryview(data))
        header = codec.parse_header(resealed(data)) if nbytes <= len(data) else SMALL
    except FormatError:
        return
    assert PAGE <= header.header_bytes <= codec.MAX_HEADER_BYTES
    assert len(header.checksums) == -(-header.payload_bytes // header.segment_bytes)
    assert len(header.tokens) + 4 * len(header.checksums) < header.header_bytes


LIES: dict[int, tuple[str, dict[int, str]]] = {
    0: ("<Q", {0: "do not begin as a chunk"}),
    8: ("<H", {2: "version 2"}),
    10: ("<H", {4: "flags"}),
    12: (
        "<I",
        {
            **{wrong: f"an impossible length of {wrong} bytes" for wrong in (0, 4095, 0xFFFFF000)},
            8192: "header has 8192 bytes",
        },
    ),
    16: ("<Q", {wrong: f"do not fit {wrong} bytes of KV" for wrong in (0, 2**64 - 1)}),
    24: ("<I", {wrong: f"segment length of {wrong} bytes" for wrong in (0, 4097, 1 << 31)}),
    28: ("<I", {2**32 - 1: "4294967295 checksums"}),
    32: ("<I", {wrong: f"{wrong} tokens" for wrong in (2**32 - 1, 1000)}),
}


def test_each_lie_has_its_complaint() -> None:
    for offset, (form, lies) in LIES.items():
        for value, complaint in lies.items():
            data = packed(SMALL)
            struct.pack_into(form, data, offset, value)
            if offset != 12:
                resealed(data)
            raised(FormatError, complaint, codec.parse_header, memoryview(data))
    # A payload of exabytes would want more checksums than a header can hold, so it never gets that far.
    data = packed(SMALL)
    struct.pack_into("<QIII", data, 16, (2**32 - 1) * 4096, 4096, 2**32 - 1, 0)
    raised(FormatError, "is too short", codec.parse_header, resealed(data))


def test_a_header_that_cannot_be_is_not_packed() -> None:
    changes: list[dict[str, Any]] = [
        *({"tokens": bytes(4096)}, {"key": b"short"}, {"namespace": b""}, {"parent": b"x"}, {"header_bytes": 1 << 21})
    ]
    for change in changes:
        header = evolve(SMALL, **change)
        raised(FormatError, "", codec.pack_header, header, memoryview(bytearray(header.header_bytes)))


@given(data=st.data(), chunk=strategies.chunks(), segment_bytes=SEGMENTS)
def test_any_changed_byte_of_a_payload_is_noticed(data: st.DataObject, chunk: Chunk, segment_bytes: int) -> None:
    header, at = header_of(chunk, segment_bytes), data.draw(st.integers(0, len(chunk.payload) - 1))
    broken = bytearray(chunk.payload)
    broken[at] ^= data.draw(st.integers(1, 255))
    raised(FormatError, f"segment {at // segment_bytes} ", codec.verify_segments, header, memoryview(broken))


def test_sizes_that_a_sound_file_can_have() -> None:
    sizes = (0, 4096, 8191, 8192, 8193, 12288)
    assert [nbytes for nbytes in sizes if codec.plausible_file_bytes(nbytes)] == [8192, 12288]
    # Headers are one page for all but giants.
    for payload, room, expected in (
        *((1, 512, 4096), (32 << 20, 512, 4096), (400 << 20, 512, 4096), (500 << 20, 512, 8192), (1, 1024, 8192)),
    ):
        assert codec.header_bytes(payload, codec.DEFAULT_SEGMENT_BYTES, room) == expected


def test_without_isal_zlib_computes_the_same_checksums(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "isal.isal_zlib", None)
    spec = importlib.util.find_spec("lmkv.chunks.codec")
    assert spec is not None
    assert spec.loader is not None
    without = importlib.util.module_from_spec(spec)
    monkeypatch.setitem(sys.modules, "lmkv.chunks.codec", without)
    spec.loader.exec_module(without)
    assert without.CHECKSUMS == "zlib"
    payload = memoryview(bytes(range(256)) * 100)
    assert without.segment_checksums(payload, 4096) == codec.segment_checksums(payload, 4096)


def test_with_isal_it_is_used() -> None:
    pytest.importorskip("isal")
    assert codec.CHECKSUMS == "isal.isal_zlib"
