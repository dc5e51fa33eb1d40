"""`RemoteBackend`: base of backends over a network. A subclass moves the bytes of one value."""

from __future__ import annotations

import time
from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from typing import ClassVar
from urllib.parse import SplitResult, urlsplit

from lmkv.backends.remote.options import DEFAULTS, RemoteOptions
from lmkv.backends.remote.value_codec import ValueCodec
from lmkv.chunks.codec import Authenticator, ChunkFormat, FormatError
from lmkv.chunks.hashing import KEY_BYTES
from lmkv.errors import (
    BackendError,
    BackendUnavailable,
    ClosedError,
    ConfigError,
    CorruptChunkError,
    UsageError,
    mask_secrets,
)
from lmkv.outcomes import HIT, MISS, Read, Written
from lmkv.protocols import Chunk, ChunkKey, Listed

MIN_BYTES_PER_SECOND = 16 << 20
"""Slowest transfer of a value, in bytes per second, before it is given up."""
_MAX_PAGES = 100_000
QUIET_SECONDS = 60.0
"""Pages of a listing, and seconds that it goes on without a chunk, at most: a hundred million names of others."""
_MAX_LISTED = 10_000_000
_MAX_VALUE_BYTES = 1 << 36
"""Chunks of a listing, and bytes of one of them, at most: more is no store's of chunks."""


def split_url(url: str) -> SplitResult:
    """The parts of a URL. The ConfigError never quotes the unparsable part, which may contain a password."""
    try:
        parts = urlsplit(url)
        _ = parts.port
        unread = ":" in parts.netloc and "@" not in parts.netloc and "@" in url.partition("=")[0]
        if unread or any(map(str.isspace, parts.netloc)):
            raise ValueError
    except ValueError:
        reason = "its host or port is invalid; in a password / is %2F, ? is %3F, # is %23"
        raise ConfigError(f"{mask_secrets(url)}: {reason}") from None
    return parts


def batches(names: Sequence[str], size: int) -> Iterator[Sequence[str]]:
    """Names in batches of `size`, one for each round trip."""
    return (names[at : at + size] for at in range(0, len(names), size))


class RemoteBackend(ABC):
    """Base of a backend that keeps values by name in a store shared with other processes and machines.

    Parameters
    ----------
    url
        Where the store is. A subclass reads it; here it is shown, without passwords, by `repr`.
    namespace
        32 bytes: model, layout and versions whose KV is interchangeable. Other namespaces have other names.
    options
        The settings that all remote backends share.

    Notes
    -----
    Other processes change the store, so a tier lists it again after a while. A failure of one value is that key's
    outcome; `contains` and `delete` raise a `BackendError`. No lock is held during I/O. A value that is not the
    chunk of its name is FAILED with a `CorruptChunkError`: nothing in it is used, and nothing is unpickled.

    Examples
    --------
    >>> from lmkv.outcomes import PRESENT, STORED
    >>> class DictBackend(RemoteBackend):
    ...     values = {}
    ...     def _exist(self, names):
    ...         return [name in self.values for name in names]
    ...     def _get(self, key, name, into):
    ...         if name in self.values:
    ...             self.codec.unpack(key, memoryview(self.values[name]), into)
    ...         return name in self.values
    ...     def _put(self, name, chunk):
    ...         if name in self.values:
    ...             return PRESENT
    ...         self.values[name] = bytes(self.codec.header_of(chunk)) + bytes(chunk.payload)
    ...         return STORED
    ...     def _remove(self, names):
    ...         for name in names:
    ...             self.values.pop(name, None)
    ...     def _disconnect(self):
    ...         pass
    ...     def _is_unavailable(self, error):
    ...         return isinstance(error, OSError)
    >>> backend = DictBackend("dict://", bytes(32), RemoteOptions(name="dict"))
    >>> backend.write(Chunk(bytes(32), memoryview(b"payload"))).status
    <WriteStatus.STORED: 'stored'>
    >>> into = memoryview(bytearray(7))
    >>> backend.read(bytes(32), into).status, bytes(into)
    (<ReadStatus.HIT: 'hit'>, b'payload')
    """

    shared: ClassVar[bool] = True

    def __init__(self, url: str, namespace: bytes, options: RemoteOptions = DEFAULTS) -> None:
        if len(namespace) != KEY_BYTES:
            raise ConfigError(f"namespace must have {KEY_BYTES} bytes, not {len(namespace)}")
        self.namespace = namespace
        self.options = options
        self.name = options.name or type(self).__module__.rpartition(".")[2]
        authenticator = Authenticator.of(options.authentication_key)
        self.codec = ValueCodec(ChunkFormat(namespace, max_tokens=options.chunk_tokens, authenticator=authenticator))
        self._safe_url = mask_secrets(url)
        self._root = f"{options.prefix}{namespace.hex()}"
        self._closed = False

    def __repr__(self) -> str:
        return f"<{type(self).__name__} {self.name!r}: {self._safe_url}>"

    def name_of(self, key: ChunkKey) -> str:
        """The name of a chunk's value. Raises UsageError for a key of another length."""
        if len(key) != KEY_BYTES:
            raise UsageError(f"a chunk key must have {KEY_BYTES} bytes, not {len(key)}")
        return f"{self._root}/{key.hex()}"

    def stored_bytes(self, payload_bytes: int) -> int:
        """Length of the value of such a payload."""
        return self.codec.value_bytes(payload_bytes)

    def contains(self, keys: Sequence[ChunkKey]) -> list[bool]:
        """Whether there is a value of each key's name. Its bytes are verified when they are read."""
        self._check_open()
        names = [self.name_of(key) for key in keys]
        try:
            found = self._exist(names) if names else []
            if len(found) != len(names):
                raise ValueError(f"{len(found)} answers about {len(names)} names")
            return found
        except BaseException as error:
            raise self._translated(error, "contains") from error

    def read(self, key: ChunkKey, into: memoryview) -> Read:
        self._check_open()
        name, flat = self.name_of(key), into.cast("B")
        try:
            return HIT if self._get(key, name, flat) else MISS
        except FormatError as error:
            # Corrupt, so that it is deleted: as long as it is there, its chunk is not written again.
            return Read.failed(CorruptChunkError(self.name, "read", key.hex(), str(error)))
        except BaseException as error:
            return Read.failed(self._translated(error, "read", key))

    def write(self, chunk: Chunk) -> Written:
        self._check_open()
        chunk.check()
        name = self.name_of(chunk.key)
        try:
            return self._put(name, chunk)
        except BaseException as error:
            return Written.failed(self._translated(error, "write", chunk.key))

    def delete(self, keys: Sequence[ChunkKey]) -> None:
        self._check_open()
        names = [self.name_of(key) for key in keys]
        try:
            if names:
                self._remove(names)
        except BaseException as error:
            raise self._translated(error, "delete") from error

    def _listing(self, found: Iterator[list[Listed]]) -> Iterator[list[Listed]]:
        """What a store lists, page by page, as long as that can be. Raises a `BackendError`."""
        self._check_open()
        count, until = 0, time.monotonic() + QUIET_SECONDS
        try:
            for pages, batch in enumerate(found, 1):
                self._check_open()
                if (count := count + len(batch)) > _MAX_LISTED:
                    raise ValueError(f"it lists more than {_MAX_LISTED:,} chunks")
                if pages > _MAX_PAGES:
                    raise ValueError(f"its listing has more than {_MAX_PAGES:,} pages")
                if batch:
                    yield [each for each in batch if each.nbytes <= _MAX_VALUE_BYTES]
                    until = time.monotonic() + QUIET_SECONDS
                elif time.monotonic() > until:
                    raise ValueError(f"it lists no chunk for {QUIET_SECONDS:.0f} s, and goes on")
        except BaseException as error:
            raise self._translated(error, "list") from error

    def close(self) -> None:
        if not self._closed:
            self._closed = True
            self._disconnect()

    def _check_open(self) -> None:
        if self._closed:
            raise ClosedError(f"backend {self.name!r} is closed")

    def _translated(self, error: BaseException, action: str, key: ChunkKey = b"") -> BackendError:
        """The `BackendError` for a client's error. Raises one that is not the client's, as Ctrl-C is."""
        if isinstance(error, ClosedError):
            raise error
        if not isinstance(error, Exception):
            raise error
        kind = BackendUnavailable if self._is_unavailable(error) else BackendError
        translated = kind(self.name, action, key.hex(), self._reason(error))
        translated.__cause__ = error
        return translated

    def _reason(self, error: Exception) -> str:
        """Text of a store's error."""
        return f"{type(error).__name__}: {error}"

    # -- requests to the store --------------------------------------------------------------------------------

    @abstractmethod
    def _exist(self, names: Sequence[str]) -> list[bool]:
        """Whether there is a value of each name, in as few round trips as the store allows."""

    @abstractmethod
    def _get(self, key: ChunkKey, name: str, into: memoryview) -> bool:
        """Fill `into` with a value's payload, checked by `codec`; False when there is none."""

    @abstractmethod
    def _put(self, name: str, chunk: Chunk) -> Written:
        """Store a value completely or not at all. One that is there stays as it is, and is PRESENT."""

    @abstractmethod
    def _remove(self, names: Sequence[str]) -> None:
        """Delete values; absent ones are fine."""

    @abstractmethod
    def _disconnect(self) -> None:
        """Let go of every connection."""

    @abstractmethod
    def _is_unavailable(self, error: Exception) -> bool:
        """Whether the store as a whole fails: it does not answer, or refuses us."""
