"""`ObjectStoreBackend`: chunks as objects of S3, Google Cloud Storage or Azure, or as files of a folder.

obstore signs, connects and retries. A header and its payload are sent without joining them in memory.
"""

from __future__ import annotations

import asyncio
import os
import re
import time
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import Any
from urllib.parse import SplitResult, parse_qsl, unquote, urlsplit

from lmkv.backends.remote import base
from lmkv.backends.remote.base import MIN_BYTES_PER_SECOND, RemoteBackend, split_url
from lmkv.backends.remote.options import DEFAULTS, RemoteOptions
from lmkv.chunks.codec import FormatError
from lmkv.chunks.hashing import KEY_BYTES
from lmkv.errors import ConfigError, outside
from lmkv.outcomes import PRESENT, STORED, Written
from lmkv.protocols import Chunk, ChunkKey, Listed

try:
    import obstore
    from obstore import exceptions
    from obstore.store import AzureStore, GCSStore, LocalStore, S3Store
except ImportError as error:
    raise ConfigError("object stores need obstore: pip install 'lmkv[s3]'") from error

_STORES: Mapping[str, tuple[Any, tuple[str, ...]]] = {
    "s3": (S3Store, ("access_key_id", "secret_access_key")),
    "gs": (GCSStore, ()),
    "az": (AzureStore, ("account_name", "account_key")),
}
"""Scheme -> class of obstore, and its options for a name and a password."""

_MAX_CERTIFICATES = 16 << 20
_ENDPOINT = re.compile(
    r"https?://([\w.-]{1,253}|\[[0-9a-f:.]{2,45}\])(:\d{1,5})?(/[!-?A-~]{0,2000})?", re.ASCII | re.IGNORECASE
)
_MAX_REQUESTS = 32
"""Requests under way for one call of `contains` or `delete`."""
_BATCH_NAMES = 1000
_LOOK_SECONDS = 0.1
"""How often a listing looks whether it was closed."""
_SAID = 10_000
"""Characters of an error that are looked at."""
_NO_SPACE = ("(os error 28)", "(os error 122)")


class ObjectStoreBackend(RemoteBackend):
    """A bucket, a container or a folder as a backend.

    Parameters
    ----------
    url
        `s3://bucket/path`, `gs://bucket/path`, `az://container/path` or `file:///folder`. Options of obstore follow
        in its query: `?endpoint=http://localhost:9000&region=eu-west-1`; `ssl_ca_certs=/path/ca.pem` names the
        certificates of a private authority.
    namespace
        32 bytes: model, layout and versions whose KV is interchangeable.
    options
        The settings that all remote backends share. `username` and `password` are access key id and secret access key
        of S3, account name and account key of Azure; without them obstore's environment variables apply
        (`AWS_ACCESS_KEY_ID`, ...), then the machine's identity. A `ttl` is refused: a lifecycle rule of the bucket
        expires objects. A request that fails before its `timeout` is repeated once, if that is safe.

    Raises
    ------
    ConfigError
        The URL or an option is invalid, or there is a `ttl`.

    Notes
    -----
    Nothing is connected before the first call. Any number of threads may call. A value is sent in one request, which
    a store does completely or not at all, and only if the name is free (`If-None-Match`). A store that ignores this
    condition keeps the last of several concurrent writes; for one that refuses it, add `conditional_put=disabled`.
    Keys, tokens and signatures are in no repr and no message.

    Examples
    --------
    >>> ObjectStoreBackend("s3://cache/models?region=eu-west-1&session_token=secret", namespace=bytes(32))
    <ObjectStoreBackend 'objects': s3://cache/models?region=eu-west-1&session_token=***>
    """

    def __init__(self, url: str, namespace: bytes, options: RemoteOptions = DEFAULTS) -> None:
        super().__init__(url, namespace, options)
        # Listings of obstore have no leading slash.
        self._root = self._root.lstrip("/")
        if options.ttl:
            raise ConfigError(f"{self._safe_url}: no ttl here; a lifecycle rule of the bucket expires its objects")
        parts = split_url(url)
        given = dict(parse_qsl(parts.query, keep_blank_values=True))
        self._mode = "overwrite" if given.get("conditional_put") == "disabled" else "create"
        self._stores: dict[int, Any] = {}
        self._open = partial(_opened, parts, given, options.username, options.password)
        try:
            self._store = self._store_for(0)
            # Sends nothing, but checks that the prefix can be part of a name.
            obstore.list(self._store, self._root)
        except (exceptions.BaseError, ValueError, OSError) as error:
            raise ConfigError(f"{self._safe_url}: {_said(error)}") from None
        self._threads = ThreadPoolExecutor(_MAX_REQUESTS, "lmkv-objects")

    def list_keys(self) -> Iterator[list[Listed]]:
        """List the chunks of this namespace in batches, in no order."""
        return self._listing(self._list())

    def _list(self) -> Iterator[list[Listed]]:
        pages, last = obstore.list(self._store, self._root, chunk_size=_BATCH_NAMES), ""
        # Not one page after the other here: obstore skips empty ones for ever, and only a coroutine of its ends early.
        while page := self._threads.submit(asyncio.run, self._next_page(pages)).result():
            if page[-1]["path"] == last:
                raise ValueError("it lists the same page again")
            last = page[-1]["path"]
            yield [Listed(key, each["size"]) for each in page if (key := self._key_of(each["path"]))]

    async def _next_page(self, pages: Any) -> Any:
        """The next page of a listing that has names; None at its end."""
        page, until = asyncio.ensure_future(anext(pages, None)), time.monotonic() + base.QUIET_SECONDS
        while not (await asyncio.wait([page], timeout=_LOOK_SECONDS))[0]:
            self._check_open()
            if time.monotonic() > until:
                raise TimeoutError(f"it lists nothing for {base.QUIET_SECONDS:.0f} s, and goes on")
        return page.result()

    def _key_of(self, path: str) -> ChunkKey | None:
        """The key in a path; None for other objects."""
        found = re.fullmatch(rf"{re.escape(self._root)}/([0-9a-f]{{{2 * KEY_BYTES}}})", path)
        return bytes.fromhex(found[1]) if found else None

    def _store_for(self, nbytes: int) -> Any:
        """A store of obstore whose timeout suits a value of `nbytes`."""
        more = -(-nbytes // MIN_BYTES_PER_SECOND)
        if more not in self._stores:
            # Two threads may both make one; either will do.
            self._stores[more] = self._open(self.options.timeout + more)
        return self._stores[more]

    # -- requests to the store --------------------------------------------------------------------------------

    def _exist(self, names: Sequence[str]) -> list[bool]:
        return list(self._threads.map(self._exists, names))

    def _exists(self, name: str) -> bool:
        try:
            obstore.head(self._store, name)
        except FileNotFoundError:
            return False
        return True

    def _get(self, key: ChunkKey, name: str, into: memoryview) -> bool:
        try:
            found = obstore.get(self._store_for(len(into)), name)
        except FileNotFoundError:
            return False
        if found.meta["size"] != self.codec.value_bytes(len(into)):
            self._refuse(key, found, len(into))
        self.codec.unpack(key, memoryview(found.bytes()), into)
        return True

    def _refuse(self, key: ChunkKey, found: Any, expected: int) -> None:
        """Raise the error of a value of another length. Its size is unbounded, so only its beginning is read."""
        start = next(found.stream(min_chunk_size=self.codec.header_bytes(expected)), b"")
        header = self.codec.parsed(key, memoryview(start), expected)
        raise FormatError(f"it has {found.meta['size']} bytes, {header.header_bytes + expected} by its header")

    def _put(self, name: str, chunk: Chunk) -> Written:
        # Look it up first, so that an existing value is not sent.
        if self._exists(name):
            return PRESENT
        try:
            store = self._store_for(len(chunk.payload))
            value = [self.codec.header_of(chunk), chunk.payload]
            obstore.put(store, name, value, mode=self._mode, use_multipart=False)
        except exceptions.AlreadyExistsError:
            return PRESENT
        except exceptions.GenericError as error:
            if any(code in str(error)[:_SAID] for code in _NO_SPACE):
                return Written.rejected(_said(error))
            raise
        return STORED

    def _remove(self, names: Sequence[str]) -> None:
        names = list(dict.fromkeys(names))
        try:
            obstore.delete(self._store, names)
        except FileNotFoundError:
            # Stores other than S3 fail at the first missing value: delete one by one.
            list(self._threads.map(self._remove_one, names))

    def _remove_one(self, name: str) -> None:
        with suppress(FileNotFoundError):
            obstore.delete(self._store, name)

    def _disconnect(self) -> None:
        self._threads.shutdown(wait=False, cancel_futures=True)

    def _is_unavailable(self, error: Exception) -> bool:
        unreachable = (exceptions.GenericError, exceptions.PermissionDeniedError, exceptions.UnauthenticatedError)
        return isinstance(error, (*unreachable, OSError))

    def _reason(self, error: Exception) -> str:
        return f"{type(error).__name__}: {_said(error)}"


open_url = ObjectStoreBackend


def _said(error: Exception) -> str:
    # After a blank line come internals of obstore.
    return outside(str(error)[:_SAID].partition("\n\n")[0])


def _certificates(path: str) -> bytes:
    with Path(path).open("rb") as file:
        found = file.read(_MAX_CERTIFICATES + 1)
    if len(found) > _MAX_CERTIFICATES:
        raise ValueError(f"{path} has more than {_MAX_CERTIFICATES:,} bytes of certificates")
    return found


def _opened(
    parts: SplitResult, options: dict[str, str], username: str | None, password: str | None, timeout: float
) -> Any:
    """The store of obstore for a URL; connects to nothing."""
    bucket = parts.netloc.rpartition("@")[2]
    if parts.scheme == "file":
        if bucket not in ("", "localhost") or options or parts.fragment:
            raise ValueError("a folder is file:///path, without host and options; # is %23")
        return LocalStore(unquote(parts.path), mkdir=True)
    kind, names = _STORES[parts.scheme]
    if not re.fullmatch(r"[\w.$-]+", bucket):
        raise ValueError(f"it names no bucket: {parts.scheme}://bucket/path")
    if (parts.username or parts.password) and not names:
        raise ValueError("credentials cannot be in its URL; GOOGLE_APPLICATION_CREDENTIALS names a file with them")
    limits = {"timeout": f"{timeout * 1000:.0f}ms", "connect_timeout": f"{timeout * 1000:.0f}ms"}
    given = (unquote(parts.username or "") or username, unquote(parts.password or "") or password)
    authorities = options.get("ssl_ca_certs")
    if authorities and os.path.exists(authorities) and not os.path.isfile(authorities):
        raise ValueError("ssl_ca_certs names no file")
    options = {name: value for name, value in options.items() if name != "ssl_ca_certs"}
    places = [options[name] for name in ("endpoint", "base_url") if name in options]
    # obstore panics on an invalid URL.
    if not all(_ENDPOINT.fullmatch(place) and (urlsplit(place).port or 1) > 0 for place in places):
        raise ValueError("an endpoint must be http://host:port or https://host:port, without a password")
    if any(char.isspace() for value in options.values() for char in value):
        raise ValueError("an option has a blank")
    return kind(
        bucket,
        prefix=unquote(parts.path).strip("/") or None,
        config={
            **limits,
            **({"unsigned_payload": "true"} if kind is S3Store else {}),
            **({"allow_http": "true"} if any(place.startswith("http://") for place in places) else {}),
            **{name: value for name, value in zip(names, given, strict=False) if value},
            **options,
        },
        client_options={**limits, "root_certificate": _certificates(authorities)} if authorities else None,
        retry_config={
            "max_retries": 1,
            "retry_timeout": timedelta(seconds=timeout),
            "backoff": {"init_backoff": timedelta(milliseconds=10), "max_backoff": timedelta(milliseconds=100)},
        },
    )
