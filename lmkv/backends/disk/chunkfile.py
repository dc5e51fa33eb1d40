"""Writes and reads chunk files. A file gets its name only when it is complete. Each read verifies checksums."""

from __future__ import annotations

import contextlib
import os
import stat
import time
from collections.abc import Iterator

import numpy as np
from attrs import define, field

from lmkv.backends.disk.fileio import (
    HUGE,
    O_DIRECT,
    Folder,
    Scratch,
    address_of,
    has_huge_pages,
    publish,
    read_fully,
    temporary,
    write_fully,
)
from lmkv.chunks import codec
from lmkv.chunks.codec import PAGE, ChunkFormat, FormatError, Header, SegmentDigests
from lmkv.chunks.layout import align_up
from lmkv.protocols import Chunk, ChunkKey

TOUCH_EVERY = 60.0
"""Shortest time in seconds between two updates of a file's modification time, which records its last use."""

PIECE = 2 << 20
"""Bytes per system call: enough for a fast disk, and few enough that checksums overlap with other I/O."""

SMALL = 2 * PIECE
"""Size in bytes of the largest payload that one system call writes together with the header."""


class WrongLengthError(Exception):
    """A valid file has a payload with another length than the caller expects."""


@define
class ChunkFiles:
    """Writes and reads the chunk files of one namespace. Thread-safe, without locks.

    `direct`: whether to use O_DIRECT for memory that is aligned to pages. `sync`: see `LocalDiskBackend`.
    """

    format: ChunkFormat
    sync: str
    direct: bool
    _scratch: Scratch = field(factory=Scratch, init=False, repr=False)

    def file_bytes(self, payload_bytes: int) -> int:
        return self.format.header_bytes(payload_bytes) + align_up(payload_bytes, PAGE)

    def write(self, chunk: Chunk, folder: Folder, name: str, *, replace: bool = False) -> None:
        """Create the file of a chunk, completely or not at all.

        If the header has no space for all token ids, the file records no token ids. Raises `FileExistsError` if the
        file exists and `replace` is false, and `OSError` if the medium fails.
        """
        with temporary(folder, self._direct_flag(address_of(chunk.payload))) as (fd, unfinished):
            if len(chunk.payload) <= SMALL:
                self._write_at_once(fd, chunk)
            else:
                self._write_in_pieces(fd, chunk)
            if self.sync != "none":
                os.fdatasync(fd)
            # Only now others see the file, and see all of it.
            publish(folder, unfinished, name, replace=replace)
        if self.sync == "full":
            _sync_or_remove(folder, name)

    def _write_at_once(self, fd: int, chunk: Chunk) -> None:
        digests = SegmentDigests(chunk.key, self.format)
        digests.add(chunk.payload)
        write_fully(fd, [self._packed(chunk, digests), *self._padded(chunk.payload)])

    def _write_in_pieces(self, fd: int, chunk: Chunk) -> None:
        """Write the payload, then the header. Each piece is written before its checksums are computed, so no write
        waits.
        """
        begin, step = self.format.header_bytes(len(chunk.payload)), self._piece(self.format.segment_bytes)
        digests = SegmentDigests(chunk.key, self.format)
        for at in range(0, len(chunk.payload), step):
            piece = chunk.payload[at : at + step]
            write_fully(fd, self._padded(piece), begin + at)
            digests.add(piece)
        write_fully(fd, [self._packed(chunk, digests)])

    def _packed(self, chunk: Chunk, digests: SegmentDigests) -> memoryview:
        packed = self._scratch.borrow("header", self.format.header_bytes(len(chunk.payload)))
        self.format.pack(packed, digests, len(chunk.payload), chunk.parent, chunk.tokens)
        return packed

    def read(self, folder: Folder, name: str, key: ChunkKey, into: memoryview) -> None:
        """Read the payload of a chunk's file into the buffer `into`.

        Raises `FormatError` if the file is damaged, `WrongLengthError` if the payload does not have `len(into)` bytes,
        and `OSError` if the medium fails.
        """
        with self._opened(folder, name, address_of(into)) as (fd, status):
            header, done = self._read_start(fd, status.st_size, key, into)
            step = self._piece(header.segment_bytes)
            for at in range(done, len(into), step):
                part = into[at : at + step]
                piece = self._staged(part)
                self._fill(fd, header.header_bytes + at, piece)
                self.format.verify(header, piece, at // header.segment_bytes)
                _copy(piece, part)

    def _read_start(self, fd: int, size: int, key: ChunkKey, into: memoryview) -> tuple[Header, int]:
        """Read the header and usually the first piece of the payload. Returns the header and the number of bytes now in
        `into`.

        If the file has the expected size, one system call reads both, and the piece is verified. Otherwise, or if the
        header has an unexpected length, the result is 0 bytes.
        """
        header_bytes, first = self.format.header_bytes(len(into)), into[: self._piece(self.format.segment_bytes)]
        if size == self.file_bytes(len(into)):
            start, piece = self._scratch.borrow("header", header_bytes), self._staged(first)
            self._fill(fd, 0, piece, start)
            header = self._checked(start, size, key)
        else:
            header, first, piece = self._header_of(fd, size, key), into[:0], into[:0]
        if header.payload_bytes != len(into):
            raise WrongLengthError(f"the chunk has {header.payload_bytes} bytes, but the buffer has {len(into)}")
        whole_segments = len(first) == len(into) or len(first) % header.segment_bytes == 0
        if header.header_bytes != header_bytes or not whole_segments:
            return header, 0
        self.format.verify(header, piece)
        _copy(piece, first)
        return header, len(first)

    def _staged(self, part: memoryview) -> memoryview:
        """Return the memory into which to read a piece: `part` itself, or with O_DIRECT a scratch buffer of huge pages.

        A disk fills one huge page faster than 512 scattered small pages, even if the bytes are then copied to `part`.
        """
        large = HUGE <= len(part) <= 2 * HUGE
        staged = large and has_huge_pages() and self._direct_flag(address_of(part))
        return self._scratch.borrow("piece", len(part)) if staged else part

    def _fill(self, fd: int, offset: int, into: memoryview, *before: memoryview) -> None:
        """Read the file from `offset` on: first into the buffers `before`, then into `into`.

        The last partial page of `into` goes through scratch memory, because O_DIRECT reads whole pages.
        """
        rest = len(into) % PAGE
        whole = len(into) - rest
        tail = self._scratch.borrow("tail", PAGE if rest else 0)
        read_fully(fd, [*before, into[:whole], tail], offset)
        into[whole:] = tail[:rest]

    @staticmethod
    def _piece(segment_bytes: int) -> int:
        """Return how many payload bytes to transfer at once: whole checksum segments, so that each piece can be
        verified.
        """
        return max(PIECE // segment_bytes, 1) * segment_bytes

    def header(self, folder: Folder, name: str, key: ChunkKey) -> Header:
        """Return a file's header, after a check against the file's size. Raises `FormatError` or `OSError`."""
        with folder.opened(name, os.O_RDONLY) as fd:
            return self._header_of(fd, _regular(fd).st_size, key)

    def _direct_flag(self, misalignment: int) -> int:
        return O_DIRECT if self.direct and misalignment % PAGE == 0 else 0

    @contextlib.contextmanager
    def _opened(self, folder: Folder, name: str, misalignment: int) -> Iterator[tuple[int, os.stat_result]]:
        """Open a chunk's file for reading in a `with` block. At the end of the block, the file's time of use is
        updated.
        """
        with folder.opened(name, os.O_RDONLY | self._direct_flag(misalignment)) as fd:
            status = _regular(fd)
            yield fd, status
            # A time in the future needs an update as much as an old one.
            if abs(time.time() - status.st_mtime) > TOUCH_EVERY:
                with contextlib.suppress(OSError):
                    os.utime(fd)

    def _padded(self, payload: memoryview) -> list[memoryview]:
        """Return the payload as views of whole pages. The last partial page is copied to scratch memory and padded with
        zeros.
        """
        rest = len(payload) % PAGE
        if not rest:
            return [payload]
        tail = self._scratch.borrow("tail", PAGE)
        tail[:rest] = payload[-rest:]
        tail[rest:] = bytes(PAGE - rest)
        return [payload[:-rest], tail]

    def _header_of(self, fd: int, size: int, key: ChunkKey) -> Header:
        start = self._scratch.borrow("header", PAGE)
        read_fully(fd, [start])
        nbytes = codec.peek_header_bytes(start)
        if nbytes > PAGE:
            start = self._scratch.borrow("header", nbytes)
            read_fully(fd, [start])
        return self._checked(start, size, key)

    def _checked(self, start: memoryview, size: int, key: ChunkKey) -> Header:
        header = self.format.parse(key, start)
        if header.file_bytes != size:
            raise FormatError(f"the file has {size} bytes, but its header says {header.file_bytes}")
        return header


def _regular(fd: int) -> os.stat_result:
    status = os.fstat(fd)
    if not stat.S_ISREG(status.st_mode):
        raise FormatError("the chunk's file is not a regular file")
    return status


def _copy(piece: memoryview, part: memoryview) -> None:
    """Copy a piece from scratch memory to `part`. Unlike an assignment to a memoryview, the copy releases the GIL."""
    if piece is not part:
        np.copyto(np.frombuffer(part, np.uint8), np.frombuffer(piece, np.uint8))


def _sync_or_remove(folder: Folder, name: str) -> None:
    """Sync the file's name to the medium. If the sync fails, remove the file, because a failed write must leave no
    file.
    """
    try:
        folder.sync()
    except OSError:
        with contextlib.suppress(OSError):
            folder.unlink(name)
        raise
