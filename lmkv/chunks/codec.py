"""Encodes and decodes the files of chunks, in the format that docs/development/format.md specifies.

A chunk file has a header of whole 4 KiB pages, and then the payload, padded with zeros to whole pages. This module does
no I/O, and checks each number in a file against the file's real size before allocating memory. Hostile bytes cause only
a `FormatError`.
"""

from __future__ import annotations

import os
import re
import struct
from functools import lru_cache
from hmac import compare_digest

from attrs import define, field, frozen

from lmkv import __version__
from lmkv.chunks.hashing import KEY_BYTES
from lmkv.chunks.layout import align_up
from lmkv.chunks.namespace import HEADER_TAG_BYTES, SALT_BYTES, TAG_BYTES, Authenticator
from lmkv.errors import LmkvError

try:
    # Computes the same checksums several times as fast.
    from isal.isal_zlib import crc32
except ImportError:
    from zlib import crc32

CHECKSUMS = crc32.__module__
"""The module that computes the checksums: isal.isal_zlib if isal is installed, otherwise zlib."""

MAGIC = b"LMKV\r\n\x1a\n"
VERSION = 1
PAGE = 4096
MAX_HEADER_BYTES = 1 << 20
DEFAULT_SEGMENT_BYTES = 1 << 20
DEFAULT_MAX_TOKENS = 512
MAX_SEGMENT_BYTES = 16 << 20

_FIXED = struct.Struct("<8sHHIQIII32s32s32s")
_CHECKSUM = struct.Struct("<I")
_WRITER = struct.Struct("<4H")
Version = tuple[int, ...]
THIS_WRITER: Version = tuple(map(int, re.findall(r"\d+", __version__)[:3]))
REFUSED_WRITERS: frozenset[Version] = frozenset()
"""Versions of lmkv that stored KV under a wrong key (see the changelog). This lmkv reads no chunks of these
versions.
"""
_HAS_PARENT = 1
_AUTHENTICATED = 2
_NO_PARENT = bytes(KEY_BYTES)


class FormatError(LmkvError):
    """Bytes are not a valid chunk file of this version. The message of the error says why."""


@frozen
class Header:
    """The header of a chunk file.

    `tokens`: token ids as little-endian uint32, or empty if the file does not record them. `parent`: the key of the
    chunk before the file's chunk, or empty for the first chunk of a prompt. `checksums`: the CRC-32 of each segment of
    `segment_bytes` bytes of the payload; the last segment may be shorter. `header_bytes`: the offset of the payload in
    bytes. `salt`: random bytes from which the tags are computed. `tags`: the joined authentication tags of all
    segments. `salt` and `tags` are empty unless the file is authenticated. `writer`: the version of lmkv that wrote the
    file; (0, 0, 0) for versions before 0.1.0.
    """

    namespace: bytes = field(repr=bytes.hex)
    key: bytes = field(repr=bytes.hex)
    payload_bytes: int
    checksums: tuple[int, ...] = field(repr=False)
    segment_bytes: int = DEFAULT_SEGMENT_BYTES
    header_bytes: int = PAGE
    parent: bytes = field(default=b"", repr=bytes.hex)
    tokens: bytes = field(default=b"", repr=False)
    salt: bytes = field(default=b"", repr=False)
    tags: bytes = field(default=b"", repr=False)
    writer: Version = THIS_WRITER

    @property
    def file_bytes(self) -> int:
        return self.header_bytes + align_up(self.payload_bytes, PAGE)


@lru_cache(maxsize=1024)
def header_bytes(payload_bytes: int, segment_bytes: int, max_tokens: int, *, authenticated: bool = False) -> int:
    """Return the size in bytes of the header of a file with `payload_bytes` bytes of payload. The header has space for
    `max_tokens` token ids.

    `authenticated`: whether the header also contains authentication tags.
    """
    segments = -(-payload_bytes // segment_bytes)
    tags = SALT_BYTES + segments * TAG_BYTES + HEADER_TAG_BYTES if authenticated else 0
    needed = _FIXED.size + 4 * (segments + max_tokens) + tags + _WRITER.size + _CHECKSUM.size
    return align_up(needed, PAGE)


def segment_checksums(payload: memoryview, segment_bytes: int) -> tuple[int, ...]:
    """Return the CRC-32 of each segment of `segment_bytes` bytes. The GIL is released during segments of more than a
    few KB.
    """
    return tuple(crc32(payload[at : at + segment_bytes]) for at in range(0, len(payload), segment_bytes))


def pack_header(header: Header, into: memoryview, authenticator: Authenticator | None = None) -> None:
    """Write the header into the first `header.header_bytes` bytes of `into`. A header with tags needs an
    `authenticator`. Raises FormatError if the header is inconsistent or does not fit.
    """
    counts = len(header.checksums), len(header.tokens) // 4
    at_tokens = _FIXED.size + 4 * counts[0]
    at_tags = at_tokens + len(header.tokens)
    body = at_tags + len(header.salt + header.tags)
    end = _end_of_body(header.header_bytes, authenticated=authenticator is not None)
    if body > end or header.header_bytes > MAX_HEADER_BYTES:
        raise FormatError(f"{header.header_bytes} bytes are too few for {counts[0]} checksums and {counts[1]} tokens")
    flags = (_HAS_PARENT if header.parent else 0) | (_AUTHENTICATED if authenticator else 0)
    sizes = header.header_bytes, header.payload_bytes, header.segment_bytes, *counts
    digests = header.namespace, header.key, header.parent or _NO_PARENT
    if any(len(digest) != KEY_BYTES for digest in digests):
        raise FormatError("a digest must have 32 bytes")
    if body - at_tags != (SALT_BYTES + counts[0] * TAG_BYTES if authenticator else 0):
        raise FormatError("the number of authentication tags does not match the checksums")
    _FIXED.pack_into(into, 0, MAGIC, VERSION, flags, *sizes, *digests)
    struct.pack_into(f"<{counts[0]}I", into, _FIXED.size, *header.checksums)
    into[at_tokens:at_tags] = header.tokens
    into[at_tags:body] = header.salt + header.tags
    into[body:end] = bytes(end - body)
    _WRITER.pack_into(into, end, *header.writer, 0)
    end += _WRITER.size
    if authenticator:
        into[end : end + HEADER_TAG_BYTES] = authenticator.of_header(into[:end])
    _CHECKSUM.pack_into(into, header.header_bytes - 4, crc32(into[: header.header_bytes - 4]))


def _end_of_body(nbytes: int, *, authenticated: bool) -> int:
    """Return the offset of the writer's version in a header of `nbytes` bytes. The header's own authentication tag (if
    any) and checksum follow after this version.
    """
    return nbytes - _CHECKSUM.size - (HEADER_TAG_BYTES if authenticated else 0) - _WRITER.size


def peek_header_bytes(start: memoryview) -> int:
    """Return the length of a file's header in bytes. `start`: the beginning of the file, at least one page. Raises
    `FormatError`.
    """
    if len(start) < PAGE:
        raise FormatError(f"the chunk has only {len(start)} bytes, fewer than its header needs")
    magic, version, _flags, nbytes = struct.unpack_from("<8sHHI", start)
    if magic != MAGIC:
        raise FormatError("the stored bytes do not begin as a chunk of lmkv does")
    if version != VERSION:
        raise FormatError(f"the chunk has format version {version}; this lmkv reads version {VERSION}")
    if nbytes % PAGE or not PAGE <= nbytes <= MAX_HEADER_BYTES:
        raise FormatError(f"the chunk's header gives an impossible length of {nbytes} bytes")
    return int(nbytes)


def parse_header(data: memoryview, authenticator: Authenticator | None = None) -> Header:
    """Return the header at the start of `data`, which may be longer than the header. Raises only `FormatError`.

    With an authenticator, only headers that were written with the same secret are valid.
    """
    nbytes = peek_header_bytes(data)
    if nbytes > len(data):
        raise FormatError(f"the chunk's header has {nbytes} bytes, but only {len(data)} are there")
    (checksum,) = _CHECKSUM.unpack_from(data, nbytes - 4)
    if crc32(data[: nbytes - 4]) != checksum:
        raise FormatError("the chunk's header does not match its checksum")
    if authenticator:
        end = _end_of_body(nbytes, authenticated=True) + _WRITER.size
        if not compare_digest(authenticator.of_header(data[:end]), data[end : end + HEADER_TAG_BYTES]):
            raise FormatError("the chunk was not written with this engine's authentication key")
    return _decode(data, nbytes)


def _decode(data: memoryview, nbytes: int) -> Header:
    _, _, flags, _, payload, segment, sums, tokens, namespace, key, parent = _FIXED.unpack_from(data)
    if flags & ~(_HAS_PARENT | _AUTHENTICATED):
        raise FormatError(f"the chunk's header has unknown flags: {flags:#x}")
    if segment % PAGE or not PAGE <= segment <= MAX_SEGMENT_BYTES:
        raise FormatError(f"the chunk's header gives an impossible segment length of {segment} bytes")
    if payload == 0 or sums != -(-payload // segment):
        raise FormatError(f"the chunk's header has {sums} checksums, which do not fit {payload} bytes of KV")
    authenticated = bool(flags & _AUTHENTICATED)
    at_tokens = _FIXED.size + 4 * sums
    at_salt = at_tokens + 4 * tokens
    at_tags = at_salt + (SALT_BYTES if authenticated else 0)
    body = at_tags + (TAG_BYTES * sums if authenticated else 0)
    end = _end_of_body(nbytes, authenticated=authenticated)
    if body > end:
        raise FormatError(f"the chunk's header is too short for {tokens} tokens")
    writer = _WRITER.unpack_from(data, end)[:3]
    if writer in REFUSED_WRITERS:
        version = ".".join(map(str, writer))
        raise FormatError(f"lmkv {version} wrote the chunk, maybe with wrong KV, so the chunk is not used")
    return Header(
        namespace=namespace,
        key=key,
        payload_bytes=payload,
        checksums=struct.unpack_from(f"<{sums}I", data, _FIXED.size),
        segment_bytes=segment,
        header_bytes=nbytes,
        parent=parent if flags & _HAS_PARENT else b"",
        tokens=bytes(data[at_tokens:at_salt]),
        salt=bytes(data[at_salt:at_tags]),
        tags=bytes(data[at_tags:body]),
        writer=writer,
    )


def verify_segments(
    header: Header, payload: memoryview, first: int = 0, authenticator: Authenticator | None = None
) -> None:
    """Compare segments of a payload with the checksums in `header`, or with its authentication tags if there is an
    `authenticator`. `payload`: the segments from number `first` on. Raises `FormatError`.
    """
    if authenticator:
        _authenticate_segments(header, payload, first, authenticator)
        return
    sums = segment_checksums(payload, header.segment_bytes)
    for index, found in enumerate(sums, first):
        if found != header.checksums[index]:
            raise FormatError(f"segment {index} of the chunk does not match its checksum")


def _authenticate_segments(header: Header, payload: memoryview, first: int, authenticator: Authenticator) -> None:
    found = authenticator.of_segments(header.salt, header.key, payload, header.segment_bytes, first)
    at = first * TAG_BYTES
    if not compare_digest(found, header.tags[at : at + len(found)]):
        raise FormatError("a segment of the chunk was not written with this engine's authentication key")


def plausible_file_bytes(nbytes: int) -> bool:
    """Return whether a valid file can have a size of `nbytes` bytes: whole pages, at least one for the header and one
    for the payload.
    """
    return nbytes >= 2 * PAGE and nbytes % PAGE == 0


@frozen
class ChunkFormat:
    """Writes headers for the chunks of a namespace, and verifies headers and payloads.

    `max_tokens`: largest number of token ids that a header records. `authenticator`: None if there is no authentication
    key; then only checksums verify the bytes.
    """

    namespace: bytes = field(repr=bytes.hex)
    segment_bytes: int = DEFAULT_SEGMENT_BYTES
    max_tokens: int = DEFAULT_MAX_TOKENS
    authenticator: Authenticator | None = None

    def header_bytes(self, payload_bytes: int) -> int:
        authenticated = self.authenticator is not None
        return header_bytes(payload_bytes, self.segment_bytes, self.max_tokens, authenticated=authenticated)

    def pack(self, into: memoryview, digests: SegmentDigests, payload_bytes: int, parent: bytes, ids: bytes) -> None:
        """Write a header that fills `into`. `ids`: the token ids as little-endian uint32; if there are more than
        `max_tokens`, the header records none.
        """
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
        pack_header(header, into, self.authenticator)

    def parse(self, key: bytes, data: memoryview) -> Header:
        """Return the header at the start of `data`. Raises `FormatError` if the header is invalid or belongs to another
        chunk.
        """
        header = parse_header(data, self.authenticator)
        if (header.namespace, header.key) != (self.namespace, key):
            raise FormatError(f"another chunk is stored here: {header.key.hex()} of namespace {header.namespace.hex()}")
        return header

    def verify(self, header: Header, payload: memoryview, first: int = 0) -> None:
        """Compare segments of a payload with the checksums or tags in `header`. `payload`: the segments from number
        `first` on. Raises `FormatError`.
        """
        verify_segments(header, payload, first, self.authenticator)


@define
class SegmentDigests:
    """Computes the checksums and authentication tags of one payload that is being written. Call `add` with the
    payload's segments in order.
    """

    key: bytes
    _format: ChunkFormat
    checksums: tuple[int, ...] = ()
    tags: bytes = b""
    salt: bytes = field(init=False)

    @salt.default
    def _new_salt(self) -> bytes:
        return os.urandom(SALT_BYTES) if self._format.authenticator else b""

    def add(self, payload: memoryview) -> None:
        """Add the next segments. `payload`: whole segments; only a chunk's last segment may be shorter."""
        first, size = len(self.checksums), self._format.segment_bytes
        self.checksums += segment_checksums(payload, size)
        if self._format.authenticator:
            self.tags += self._format.authenticator.of_segments(self.salt, self.key, payload, size, first)
