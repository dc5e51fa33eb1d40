"""Reads the content of a folder of chunks from names and headers, and deletes chunks."""

from __future__ import annotations

import contextlib
import logging
import os
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path

from attrs import define, field, frozen

from lmkv.backends.disk.backend import LocalDiskBackend
from lmkv.backends.disk.chunkfile import ChunkFiles
from lmkv.backends.disk.description import description
from lmkv.backends.disk.fileio import Folder, ShortReadError, read_fully
from lmkv.backends.disk.folder import QUARANTINE, ChunkFolder
from lmkv.backends.disk.namespaces import digests
from lmkv.backends.disk.root import NotTrustedError, Root
from lmkv.chunks import codec
from lmkv.chunks.codec import ChunkFormat, Header
from lmkv.chunks.namespace import Namespace
from lmkv.protocols import Listed

logger = logging.getLogger(__name__)

_TOKEN_BYTES = 4


@frozen
class Content:
    """A namespace's folder, and the chunks in it, least recently used first. `set_aside`: entries of `quarantine/`."""

    root: Path
    digest: bytes
    namespace: Namespace | None
    chunks: list[Listed]
    set_aside: int

    @property
    def nbytes(self) -> int:
        return sum(chunk.nbytes for chunk in self.chunks)


@define
class Totals:
    """Totals over the headers of a namespace's chunks. `damaged`: files that cannot be served -> reason."""

    tokens: int = 0
    damaged: dict[str, str] = field(factory=dict)


def contents(root: Path, beginning: str = "") -> Iterator[Content]:
    """The namespaces below a root whose digest has this beginning. Raises OSError."""
    for digest in digests(root, beginning):
        try:
            yield _content(root, digest)
        except NotTrustedError as error:
            logger.warning("lmkv: left out: %s", error)


def _content(root: Path, digest: bytes) -> Content:
    folder = ChunkFolder(Root.checked(root), digest)
    chunks = sorted(folder.scan(), key=lambda chunk: chunk.last_used)
    count = 0
    with contextlib.suppress(FileNotFoundError, NotADirectoryError), folder.entered(QUARANTINE) as quarantine:
        count = sum(1 for _ in quarantine.entries())
    return Content(root, digest, description(folder.path), chunks, count)


def add_up(content: Content, advance: Callable[[], object], *, payloads: bool) -> Totals:
    """Read every header, and every payload if wanted. A chunk that is deleted meanwhile does not count."""
    folder, totals = ChunkFolder(Root.checked(content.root), content.digest), Totals()
    files = ChunkFiles(ChunkFormat(content.digest), sync="none", direct=False)
    for chunk in content.chunks:
        try:
            with folder.place_of(chunk.key) as (place, name):
                header = files.header(place, name, chunk.key)
                if payloads:
                    _verify(place, name, header)
            totals.tokens += len(header.tokens) // _TOKEN_BYTES
        except FileNotFoundError:
            pass
        except (codec.FormatError, ShortReadError, OSError) as error:
            totals.damaged[folder.path_of(chunk.key)] = str(error)
        advance()
    return totals


def _verify(folder: Folder, name: str, header: Header) -> None:
    """Check every checksum, without counting as a use. Raises the errors of a read."""
    size = header.segment_bytes
    with folder.opened(name, os.O_RDONLY) as fd:
        for segment, at in enumerate(range(0, header.payload_bytes, size)):
            part = memoryview(bytearray(min(size, header.payload_bytes - at)))
            read_fully(fd, [part], header.header_bytes + at)
            codec.verify_segments(header, part, segment)


def delete(root: Path, chunks: Mapping[bytes, list[Listed]], advance: Callable[[], object]) -> int:
    """Delete chunks by namespace; returns the bytes that this freed. Raises BackendError."""
    freed = 0
    for digest, listed in chunks.items():
        backend = LocalDiskBackend(str(root), digest, direct="off")
        for chunk in listed:
            freed += backend.reclaim([chunk.key])
            advance()
        backend.close()
    return freed


def least_recently_used(found: list[Content], before: float, max_bytes: float) -> dict[bytes, list[Listed]]:
    """Chunks by namespace that were last used `before`, and more of the oldest until `max_bytes` are left."""
    excess = sum(content.nbytes for content in found) - max_bytes
    chosen: dict[bytes, list[Listed]] = {}
    by_use = sorted(((chunk, one.digest) for one in found for chunk in one.chunks), key=lambda pair: pair[0].last_used)
    for chunk, digest in by_use:
        if not (chunk.last_used < before or excess > 0):
            break
        chosen.setdefault(digest, []).append(chunk)
        excess -= chunk.nbytes
    return chosen
