"""`RemoteBackend`: the base class of backends over a network. Subclasses transfer values to and from a store."""

from __future__ import annotations

import logging
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, ClassVar
from urllib.parse import SplitResult, parse_qs, urlsplit

from attrs import field, frozen

from lmkv.chunks.codec import ChunkFormat, FormatError, Header, SegmentDigests
from lmkv.chunks.hashing import KEY_BYTES
from lmkv.chunks.namespace import Authenticator
from lmkv.errors import (
    BackendError,
    BackendUnavailable,
    ClosedError,
    ConfigError,
    CorruptChunkError,
    UsageError,
    mask_secrets,
    short_repr,
)
from lmkv.protocols import HIT, MISS, Chunk, ChunkKey, Listed, Read, Written

logger = logging.getLogger(__name__)


@frozen(kw_only=True)
class RemoteOptions:
    """Settings of a remote backend. A backend that does not support a setting raises ConfigError or logs a warning.

    Parameters
    ----------
    username, password
        User name and password for a URL that has none.
    renew_password
        A function that reads the password from its file again, because the file may change; see `password_now`.
    prefix
        The beginning of every name that lmkv writes to the store, so that access rules can match these names.
    ttl
        Seconds after which the store drops a value, or None if the store keeps each value until an eviction.
    timeout
        Seconds to wait for a connection or an answer. A value may take one more second for each 16 MiB.
    chunk_tokens
        Largest number of token ids that a value records.
    name
        Name of the tier in logs and statistics; by default the backend's module.
    authentication_key
        A secret of 32 random bytes or more. The backend then serves only values that were written with the same secret.

    Notes
    -----
    Immutable. `repr` shows neither the password nor the authentication key.

    Examples
    --------
    >>> RemoteOptions(password="secret", timeout=5.0).timeout
    5.0
    """

    username: str | None = None
    password: str | None = field(default=None, repr=False)
    renew_password: Callable[[], str | None] | None = field(default=None, repr=False)
    prefix: str = "lmkv:"
    ttl: int | None = None
    timeout: float = 1.0
    chunk_tokens: int = 512
    name: str = ""
    authentication_key: bytes | None = field(default=None, repr=False)

    def password_now(self) -> str | None:
        """Return the password, read again if it comes from a file. If the file is unreadable, return `password`."""
        try:
            return self.renew_password() if self.renew_password else self.password
        except (OSError, ValueError):
            return self.password


DEFAULTS = RemoteOptions()


# -- a chunk as one value ---------------------------------------------------------------------------------


Fill = Callable[[memoryview], None]
"""A function that fills a buffer with the next bytes of a value."""


def filler(value: memoryview) -> Fill:
    """Return a function that fills a buffer with the next bytes of `value` at each call."""

    def fill(part: memoryview) -> None:
        nonlocal value
        part[: len(value)] = value[: len(part)]
        value = value[len(part) :]

    return fill


@frozen
class ValueCodec:
    """Builds and checks the values of one namespace. A value consists of a header and a chunk's payload."""

    format: ChunkFormat

    def value_bytes(self, payload_bytes: int) -> int:
        """Return the length in bytes of the value for a payload of `payload_bytes` bytes."""
        return self.format.header_bytes(payload_bytes) + payload_bytes

    def header_of(self, chunk: Chunk) -> memoryview:
        """Return the header of a chunk's value."""
        payload = chunk.payload
        packed = memoryview(bytearray(self.format.header_bytes(len(payload))))
        digests = SegmentDigests(chunk.key, self.format)
        digests.add(payload)
        self.format.pack(packed, digests, len(payload), chunk.parent, chunk.tokens)
        return packed

    def parsed(self, key: ChunkKey, data: memoryview, expected: int) -> Header:
        """Return the header at the start of `data`.

        Raises `FormatError` if the header is not that of the chunk `key` with a payload of `expected` bytes.
        """
        header = self.format.parse(key, data)
        if header.payload_bytes != expected:
            raise FormatError(f"the chunk has {header.payload_bytes} bytes, but the buffer has {expected}")
        return header

    def receive(self, key: ChunkKey, nbytes: int, fill: Fill, into: memoryview) -> None:
        """Read the payload of a value of `nbytes` bytes into the buffer `into`.

        `fill`: a function that reads the next bytes of the value. Raises `FormatError` if the value is not the chunk
        `key`.
        """
        header_bytes = self.format.header_bytes(len(into))
        start = memoryview(bytearray(min(nbytes, header_bytes)))
        fill(start)
        header = self.parsed(key, start, len(into))
        if nbytes != header_bytes + len(into) or header.header_bytes != header_bytes:
            raise FormatError(f"the value has {nbytes} bytes, but its header says {header.header_bytes + len(into)}")
        self.receive_payload(header, fill, into)

    def receive_payload(self, header: Header, fill: Fill, into: memoryview) -> None:
        """Read the payload that follows `header` into the buffer `into`. `fill` reads the payload's next bytes.

        Raises `FormatError` if a checksum is wrong.
        """
        for index, at in enumerate(range(0, len(into), header.segment_bytes)):
            segment = into[at : at + header.segment_bytes]
            fill(segment)
            # Verify now, while the bytes are in the processor's cache and others arrive.
            self.format.verify(header, segment, index)

    def unpack(self, key: ChunkKey, value: memoryview, into: memoryview) -> None:
        """Copy the payload of a complete value into the buffer `into`. Raises `FormatError` if the value is not the
        chunk `key`.
        """
        self.receive(key, len(value), filler(value), into)


# -- the backend ------------------------------------------------------------------------------------------


MIN_BYTES_PER_SECOND = 16 << 20
"""Lowest speed of a transfer in bytes per second. A slower transfer fails."""
_MAX_PAGES = 100_000
QUIET_SECONDS = 60.0
"""Longest time in seconds for which a listing may find no chunk. A store may have many names that are not lmkv's.

`_MAX_PAGES`: largest number of pages of a listing.
"""
_MAX_LISTED = 10_000_000
_MAX_VALUE_BYTES = 1 << 36
"""Largest size in bytes of a listed chunk; `_MAX_LISTED`: largest number of chunks in a listing. Beyond these limits,
the content is not lmkv's.
"""


def split_url(url: str) -> SplitResult:
    """Return the parts of a URL. Raises ConfigError for an invalid URL.

    The error text does not quote the invalid part, which may contain a password.
    """
    try:
        parts = urlsplit(url)
        _ = parts.port
        unread = ":" in parts.netloc and "@" not in parts.netloc and "@" in url.partition("=")[0]
        if unread or any(map(str.isspace, parts.netloc)):
            raise ValueError
    except ValueError:
        reason = "a host or port is invalid; in a password write / as %2F, ? as %3F, # as %23"
        raise ConfigError(f"{mask_secrets(url)}: {reason}") from None
    return parts


def batches(names: Sequence[str], size: int) -> Iterator[Sequence[str]]:
    """Yield the names in batches of at most `size`. Each batch is one request to the store."""
    return (names[at : at + size] for at in range(0, len(names), size))


class RemoteBackend(ABC):
    """Base class of backends that store each chunk as one named value, in a store that processes on several machines
    share.

    Parameters
    ----------
    url
        The address of the store, in the form that the subclass parses. `repr` shows the address without passwords.
    namespace
        32 bytes: a digest of the model, layout and versions. Chunks of other namespaces have other names.
    options
        The settings of remote backends.

    Notes
    -----
    Thread-safe; no lock is held during I/O. Other processes change the store, so a tier lists the store's chunks
    repeatedly. `read` and `write` return failures as values; `contains` and `delete` raise `BackendError`. If a value
    does not contain the chunk of its name, `read` returns FAILED with a `CorruptChunkError`, and lmkv uses no byte of
    the value. lmkv never unpickles values.

    Examples
    --------
    >>> from lmkv.protocols import PRESENT, STORED
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
        """Return the name under which the store has a chunk. Raises UsageError unless the key has 32 bytes."""
        if len(key) != KEY_BYTES:
            raise UsageError(f"a chunk key must have {KEY_BYTES} bytes, not {len(key)}")
        return f"{self._root}/{key.hex()}"

    def stored_bytes(self, payload_bytes: int) -> int:
        """Return the length in bytes of the value for a payload of `payload_bytes` bytes."""
        return self.codec.value_bytes(payload_bytes)

    def contains(self, keys: Sequence[ChunkKey]) -> list[bool]:
        """Return, for each key, whether the store has a value for the key. Only `read` verifies the bytes of values."""
        self._check_open()
        names = [self.name_of(key) for key in keys]
        try:
            found = self._exist(names) if names else []
            if len(found) != len(names):
                raise ValueError(f"the store gave {len(found)} answers about {len(names)} names")
            return found
        except BaseException as error:
            raise self._translated(error, "contains") from error

    def read(self, key: ChunkKey, into: memoryview) -> Read:
        self._check_open()
        name, flat = self.name_of(key), into.cast("B")
        try:
            return HIT if self._get(key, name, flat) else MISS
        except FormatError as error:
            # Corrupt, so that it is deleted: otherwise its chunk is never written again.
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
        """Yield the chunks of a store's listing, one batch for each answer of the store.

        Raises a `BackendError` if the store fails, or if the listing has implausibly many chunks or answers.
        """
        self._check_open()
        count, until = 0, time.monotonic() + QUIET_SECONDS
        try:
            for pages, batch in enumerate(found, 1):
                self._check_open()
                if (count := count + len(batch)) > _MAX_LISTED:
                    raise ValueError(f"the store lists more than {_MAX_LISTED:,} chunks")
                if pages > _MAX_PAGES:
                    raise ValueError(f"the store's listing has more than {_MAX_PAGES:,} pages")
                if batch:
                    yield [each for each in batch if each.nbytes <= _MAX_VALUE_BYTES]
                    until = time.monotonic() + QUIET_SECONDS
                elif time.monotonic() > until:
                    raise ValueError(f"the store listed no chunk for {QUIET_SECONDS:.0f} s")
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
        """Return an exception of the store's client as a `BackendError`. Re-raises `ClosedError`, and for example
        Ctrl-C.
        """
        if isinstance(error, ClosedError):
            raise error
        if not isinstance(error, Exception):
            raise error
        kind = BackendUnavailable if self._is_unavailable(error) else BackendError
        translated = kind(self.name, action, key.hex(), self._reason(error))
        translated.__cause__ = error
        return translated

    def _reason(self, error: Exception) -> str:
        """Return the error text for an exception of the store's client."""
        return f"{type(error).__name__}: {error}"

    # -- requests to the store --------------------------------------------------------------------------------

    @abstractmethod
    def _exist(self, names: Sequence[str]) -> list[bool]:
        """Return, for each name, whether the store has a value of this name. Use as few round trips as possible."""

    @abstractmethod
    def _get(self, key: ChunkKey, name: str, into: memoryview) -> bool:
        """Read the payload of the value `name` into the buffer `into`, and check it with `codec`.

        Returns False if there is no such value.
        """

    @abstractmethod
    def _put(self, name: str, chunk: Chunk) -> Written:
        """Store a chunk as the value `name`, completely or not at all. If the value exists already, return PRESENT."""

    @abstractmethod
    def _remove(self, names: Sequence[str]) -> None:
        """Delete the values `names`. Absent values are no error."""

    @abstractmethod
    def _disconnect(self) -> None:
        """Close every connection."""

    @abstractmethod
    def _is_unavailable(self, error: Exception) -> bool:
        """Return whether an error affects the whole store: the store does not answer, or denies access."""


class HostPortBackend(RemoteBackend):
    """Base class for stores at a host and a port. A subclass lists the options of its URL, and transfers the values."""

    known: ClassVar[Mapping[str, type[str] | type[int]]]
    """Options that the URL's query may have, with their types."""

    def __init__(self, url: str, namespace: bytes, options: RemoteOptions = DEFAULTS) -> None:
        super().__init__(url, namespace, options)
        self._set_up(self._parse_url(url))
        ignored = [name for name in ("username", "password", "ttl") if getattr(options, name)]
        if ignored:
            names = ", ".join(ignored)
            logger.warning("lmkv: the store at %s does not support %s; lmkv ignores the value", self._safe_url, names)

    def _parse_url(self, url: str) -> dict[str, Any]:
        """Return the host, the port and the query's options of a URL. Raises ConfigError if any of them is invalid."""
        parts = split_url(url)
        given = {key: values[-1] for key, values in parse_qs(parts.query, keep_blank_values=True).items()}
        if unknown := sorted(given.keys() - self.known.keys()):
            raise ConfigError(
                f"{self._safe_url}: unknown option {unknown[0]!r}; known are: {', '.join(sorted(self.known))}"
            )
        options: dict[str, Any] = {}
        for key, value in given.items():
            try:
                options[key] = self.known[key](value)
            except ValueError:
                told = f"{key} = {short_repr(value)} must be a whole number{' of bytes' * key.endswith('size')}"
                raise ConfigError(f"{self._safe_url}: {told}") from None
        if not (parts.hostname and parts.port):
            raise ConfigError(f"{self._safe_url} must have a host and a port: {parts.scheme}://host:port/")
        return {"host": parts.hostname, "port": parts.port, **options}

    @abstractmethod
    def _set_up(self, options: dict[str, Any]) -> None:
        """Prepare the backend for calls, without connecting. `options`: the result of `_parse_url`."""

    def _is_unavailable(self, error: Exception) -> bool:
        return isinstance(error, OSError)
