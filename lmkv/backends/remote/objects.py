"""`ObjectStoreBackend`: stores chunks as objects in S3, Google Cloud Storage or Azure, or as files in a folder.

The library obstore signs requests, connects and retries. obstore allocates as many bytes as an answer announces, and
aborts its process if there is not enough memory. Therefore `StoreClient` runs obstore in a child process.
"""

from __future__ import annotations

import asyncio
import os
import re
import resource
import stat
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor, wait
from contextlib import suppress
from datetime import timedelta
from functools import cached_property, partial
from itertools import count
from pathlib import Path
from typing import Any, ClassVar
from urllib.parse import parse_qsl, unquote, urlsplit

from lmkv.backends.remote.base import DEFAULTS, MIN_BYTES_PER_SECOND, RemoteOptions, split_url
from lmkv.backends.remote.child import Memory, Part
from lmkv.backends.remote.subprocess_backend import ClientProcess, SubprocessBackend
from lmkv.chunks.hashing import KEY_BYTES
from lmkv.errors import ConfigError, how_to_install
from lmkv.medium import Medium
from lmkv.protocols import Listed

try:
    import obstore
    from obstore import exceptions
    from obstore.store import AzureStore, GCSStore, LocalStore, S3Store
except ImportError as error:
    raise ConfigError(f"object stores need obstore: {how_to_install('s3')}") from error

_STORES: Mapping[str, tuple[Any, tuple[str, ...]]] = {
    "s3": (S3Store, ("access_key_id", "secret_access_key")),
    "gs": (GCSStore, ()),
    "az": (AzureStore, ("account_name", "account_key")),
}
"""For each scheme, the class of obstore, and the names of its options for a user name and a password."""

_MAX_CERTIFICATES = 16 << 20
_ENDPOINT = re.compile(
    r"https?://([\w.-]{1,253}|\[[0-9a-f:.]{2,45}\])(:\d{1,5})?(/[!-?A-~]{0,2000})?", re.ASCII | re.IGNORECASE
)
_NAMES_PLACE = re.compile(r"(endpoint|base_url)(_url)?(_s3|_sts)?$")
_MAX_REQUESTS = 32
"""Largest number of concurrent requests for one call."""
_BATCH_NAMES = 1000
_LOOK_SECONDS = 0.1
"""Seconds that a call waits for the next page of a listing."""
_ERROR_CHARACTERS = 10_000
"""Largest number of characters of an error's text to read."""
_NO_SPACE = ("(os error 28)", "(os error 122)")
_UNCONDITIONAL = ("501 Not Implemented", "NotImplemented", "400 Bad Request")
_MAX_BYTES = 4 << 30
"""Largest number of bytes of memory for this process, no matter how many bytes an answer promises."""


class ObjectStoreBackend(SubprocessBackend):
    """Stores chunks as objects in S3, Google Cloud Storage, Azure or a folder.

    Parameters
    ----------
    url
        `s3://bucket/path`, `gs://bucket/path`, `az://container/path` or `file:///folder`. The query of the URL may have
        options of obstore, such as `?endpoint=http://localhost:9000&region=eu-west-1`. lmkv adds two options:
        `ssl_ca_certs` (a file with the certificates of a private authority) and `clients` (number of processes that
        transfer values, default 4).
    namespace
        32 bytes: a digest of the model, layout and versions.
    options
        The settings of remote backends. `username` and `password` are the access key id and secret access key of S3, or
        the account name and account key of Azure. Without them, obstore reads environment variables such as
        `AWS_ACCESS_KEY_ID`, and then uses the machine's identity. A `ttl` raises ConfigError, because only a lifecycle
        rule of the bucket can expire objects. A request that fails before its `timeout` is repeated once if this is
        safe.

    Raises
    ------
    ConfigError
        The URL or an option is invalid, or there is a `ttl`.

    Notes
    -----
    Thread-safe. The backend connects at the first call. obstore runs in separate processes, because a server's wrong
    answer can crash obstore. Each value is written by one request, completely or not at all, and only if no object has
    its name (`If-None-Match`). A store that ignores this condition keeps the last of several concurrent writes. If a
    store refuses the condition, add `conditional_put=disabled` to the URL. No repr and no message shows keys, tokens or
    signatures.

    Examples
    --------
    >>> ObjectStoreBackend("s3://cache/models?region=eu-west-1&session_token=secret", namespace=bytes(32))
    <ObjectStoreBackend 'objects': s3://cache/models?region=eu-west-1&session_token=***>
    """

    module = "obstore"
    client_module = __name__
    extra = "s3"
    requests = 4

    def __init__(self, url: str, namespace: bytes, options: RemoteOptions = DEFAULTS) -> None:
        super().__init__(url, namespace, options)
        # Listings of obstore have no leading slash.
        self._root = self._root.lstrip("/")
        if options.ttl:
            raise ConfigError(f"{self._safe_url} does not support remote_ttl: set a lifecycle rule on the bucket")
        place = {"url": url, "username": options.username, "password": options.password}
        try:
            check(self._root, options.timeout, *place.values())
            clients = int(dict(parse_qsl(urlsplit(url).query)).get("clients", 4))
        except (ValueError, OSError) as error:
            raise ConfigError(f"{self._safe_url}: {self._reason(error)}") from None
        self._medium = Medium(folder) if (folder := folder_of(url)) else None
        self._set_up({"timeout": options.timeout, **place, "clients": clients})
        self._lister, self._listings = self._process(self._renewed({"timeout": options.timeout, **place})), count()

    def _renewed(self, options: dict[str, Any]) -> Callable[[], Any]:
        given = dict(parse_qsl(urlsplit(options["url"]).query))
        return lambda: {**options, "password": self.options.password_now(), "files": _versions(given)}

    def list_keys(self) -> Iterator[list[Listed]]:
        """Yield the chunks of this namespace in batches, in no particular order. Raises `BackendError`."""
        return self._listing(self._list())

    def _list(self) -> Iterator[list[Listed]]:
        self._check_medium()
        number = next(self._listings)
        self._lister.ask("begin_listing", number, self._root)
        try:
            while (page := self._lister.ask("next_page", number)) is not None:
                yield [Listed(bytes.fromhex(key), nbytes) for key, nbytes in page]
        finally:
            if self._lister.connected:
                with suppress(OSError, RuntimeError):
                    self._lister.ask("end_listing", number)

    def _check_medium(self) -> None:
        """Raise OSError if the folder is on another medium than when the backend was created. Creates a removed folder
        again.
        """
        if self._medium is not None:
            try:
                self._medium.check()
            except FileNotFoundError:
                os.makedirs(self._medium.path, exist_ok=True)

    def _client(self, name: str) -> ClientProcess:
        self._check_medium()
        return super()._client(name)

    def _client_for(self, names: Sequence[str]) -> ClientProcess:
        self._check_medium()
        # Do not queue behind a value in transfer.
        return next((each for each in self._clients if not each.busy), None) or super()._client_for(names)

    def _disconnect(self) -> None:
        super()._disconnect()
        self._lister.close()


# -- in the child process ---------------------------------------------------------------------------------


class StoreClient:
    """Runs obstore in the child process."""

    unavailable: ClassVar[tuple[type[Exception], ...]] = (
        exceptions.GenericError,
        exceptions.PermissionDeniedError,
        exceptions.UnauthenticatedError,
    )

    def __init__(
        self,
        memories: Sequence[Memory],
        *,
        timeout: float,
        url: str,
        username: str | None,
        password: str | None,
        files: object = None,
    ) -> None:
        # obstore reads files of keys and certificates when it opens a store: other `files` are another process.
        resource.setrlimit(resource.RLIMIT_DATA, (_MAX_BYTES, _MAX_BYTES))
        # The end of this process is no fault to look into.
        os.environ |= {"TOKIO_WORKER_THREADS": "2", "RUST_BACKTRACE": "0"}
        self._memories, self._timeout = memories, timeout
        self._open = partial(opened, url=url, username=username, password=password)
        self._stores: dict[int, Any] = {}
        self._folder = folder_of(url)
        # obstore deletes ten at a time elsewhere.
        self._deletes_many = split_url(url).scheme in ("s3", "az")
        unconditional = dict(parse_qsl(urlsplit(url).query)).get("conditional_put") == "disabled"
        self._mode: Any = "overwrite" if unconditional else "create"
        self._threads = ThreadPoolExecutor(_MAX_REQUESTS)
        self._listings: dict[int, _Listing] = {}

    def _store(self, nbytes: int = 0) -> Any:
        """Return obstore's client of the store, with a timeout for a value of `nbytes` bytes."""
        more = -(-nbytes // MIN_BYTES_PER_SECOND)
        if more not in self._stores:
            self._stores[more] = self._open(self._timeout + more)
        return self._stores[more]

    @cached_property
    def _deletes_each(self) -> Any:
        return self._open(self._timeout, deletes_each=True)

    def _views(self, parts: Sequence[Part]) -> list[memoryview]:
        return [memoryview(self._memories[memory].view)[at : at + nbytes] for memory, at, nbytes in parts]

    def _is_other(self, name: str) -> bool:
        """Return whether the store is a folder, and `name` in this folder is not a regular file.

        For example, opening a pipe would wait for its writer.
        """
        with suppress(OSError):
            return bool(self._folder) and not stat.S_ISREG(os.lstat(os.path.join(self._folder, name)).st_mode)
        return False

    def _exists(self, store: Any, name: str) -> bool:
        # Report a pipe or folder as present: the next read finds it damaged and deletes it.
        if self._is_other(name):
            return True
        try:
            obstore.head(store, name)
        except FileNotFoundError:
            return False
        return True

    def exist(self, names: Sequence[str]) -> list[bool]:
        """Return, for each name, whether the store has an object of this name.

        If the request for an object fails, the object counts as absent. If all requests fail, the first error is
        raised.
        """
        store = self._store()
        asked = [self._threads.submit(self._exists, store, name) for name in names]
        done, late = wait(asked, 2 * self._timeout)
        for each in late:
            each.cancel()
        failed = [error for each in done if (error := each.exception())]
        if len(failed) + len(late) == len(asked):
            raise failed[0] if failed else TimeoutError("the object store does not answer")
        return [each.done() and not each.cancelled() and not each.exception() and each.result() for each in asked]

    def get(self, name: str, parts: Sequence[Part]) -> int | None:
        """Read an object into the memory `parts` if its length fits. Returns the object's length in bytes, or None if
        absent.
        """
        nbytes = sum(part[2] for part in parts)
        if self._is_other(name):
            return 0
        try:
            found = obstore.get(self._store(nbytes), name)
        except FileNotFoundError:
            return None
        if found.meta["size"] == nbytes:
            value = memoryview(found.bytes())
            for view in self._views(parts):
                view[:] = value[: len(view)]
                value = value[len(view) :]
        return int(found.meta["size"])

    def put(self, name: str, parts: Sequence[Part]) -> str:
        """Store the memory `parts` as one object. Returns "stored", "present", or the reason for the failure."""
        # Look it up first, so that an existing object is not sent.
        if self._exists(self._store(), name):
            return "present"
        store = self._store(sum(part[2] for part in parts))
        try:
            obstore.put(store, name, self._views(parts), mode=self._mode, use_multipart=False)
        except exceptions.AlreadyExistsError:
            return "present"
        except exceptions.GenericError as error:
            text = str(error)[:_ERROR_CHARACTERS]
            if self._folder and any(code in text for code in _NO_SPACE):
                # After a blank line come internals of obstore.
                return text.partition("\n\n")[0]
            if self._mode == "create" and any(code in text for code in _UNCONDITIONAL):
                raise ConnectionError(f"{UNCONDITIONAL_HINT}: {text}") from None
            raise
        return "stored"

    def remove(self, names: Sequence[str]) -> int:
        """Delete the objects `names`, first to last, until the timeout. Returns how many were deleted or absent."""
        until = time.monotonic() + self._timeout
        if self._deletes_many:
            try:
                obstore.delete(self._store(), list(dict.fromkeys(names)))
            except FileNotFoundError:
                pass  # Azure fails at the first missing object
            except self.unavailable:
                # Some refuse to delete many at a time. One that refuses each is not asked for all.
                _remove(self._deletes_each, names[0])
            else:
                return len(names)
        done = 0
        while done < len(names) and (not done or time.monotonic() < until):
            several = names[done : done + _MAX_REQUESTS]
            list(self._threads.map(partial(_remove, self._deletes_each), several))
            done += len(several)
        return done

    @cached_property
    def _loop(self) -> asyncio.AbstractEventLoop:
        return asyncio.new_event_loop()

    def begin_listing(self, number: int, root: str) -> None:
        self._listings[number] = _Listing(self._store(), root, self._loop)

    def next_page(self, number: int) -> list[tuple[str, int]] | None:
        """Return the key (in hexadecimal) and the length in bytes of each chunk on the next page of the listing
        `number`.

        Returns an empty list if the store has not answered yet, and None at the end of the listing.
        """
        return self._listings[number].next_page()

    def end_listing(self, number: int) -> None:
        self._listings.pop(number, None)

    def close(self) -> None:
        pass


class _Listing:
    """Lists the chunks below `root`, page by page."""

    def __init__(self, store: Any, root: str, loop: asyncio.AbstractEventLoop) -> None:
        self._loop = loop
        self._pages, self._last = obstore.list(store, root, chunk_size=_BATCH_NAMES), ""
        self._chunk = re.compile(rf"{re.escape(root)}/([0-9a-f]{{{2 * KEY_BYTES}}})")
        self._page: asyncio.Future[Any] | None = None

    def next_page(self) -> list[tuple[str, int]] | None:
        # As a coroutine, because obstore skips empty pages forever.
        page = self._loop.run_until_complete(self._next())
        if page is None:
            return None
        if page and page[-1]["path"] == self._last:
            raise ValueError("the store lists the same page twice")
        self._last = page[-1]["path"] if page else self._last
        return [(found[1], each["size"]) for each in page if (found := self._chunk.fullmatch(each["path"]))]

    async def _next(self) -> Any:
        self._page = self._page or asyncio.ensure_future(anext(self._pages, None))
        if not (await asyncio.wait([self._page], timeout=_LOOK_SECONDS))[0]:
            return []
        page, self._page = self._page, None
        return page.result()


UNCONDITIONAL_HINT = "the store refuses If-None-Match: add conditional_put=disabled to the URL"


def _remove(store: Any, name: str) -> None:
    with suppress(FileNotFoundError):
        obstore.delete(store, name)


def folder_of(url: str) -> str:
    """Return the folder of a `file:` URL, or "" for another URL."""
    parts = split_url(url)
    return unquote(parts.path) if parts.scheme == "file" else ""


def _certificates(path: str) -> bytes:
    with Path(path).open("rb") as file:
        found = file.read(_MAX_CERTIFICATES + 1)
    if len(found) > _MAX_CERTIFICATES:
        raise ValueError(f"{path} has more than {_MAX_CERTIFICATES:,} bytes of certificates")
    return found


def check(root: str, *place: Any) -> None:
    """Raise ValueError or OSError if `place` or `root` is invalid.

    `place`: the arguments of `opened`. `root`: the common beginning of the names of lmkv's objects.
    """
    try:
        obstore.list(opened(*place, makes_folder=True), root)
    except exceptions.BaseError as error:
        raise ValueError(str(error)[:_ERROR_CHARACTERS].partition("\n\n")[0]) from None


def _places(options: Mapping[str, str]) -> dict[str, str]:
    """Return the options and cloud variables whose value is an existing path."""
    variables = {name: value for name, value in os.environ.items() if name.startswith(("AWS_", "AZURE_", "GOOGLE_"))}
    named = {**variables, **options}.items()
    return {name: each for name, each in named if "/" in each and "://" not in each and os.path.exists(each)}


def _check_files(options: Mapping[str, str]) -> None:
    """Raise ValueError for an option whose path is not a regular file.

    obstore would read a pipe or device forever, and block all threads.
    """
    for name, place in _places(options).items():
        if not os.path.isfile(place):
            raise ValueError(f"{name} must be the path of a file")


def _versions(options: Mapping[str, str]) -> list[tuple[str, int, int]]:
    """Return path, inode and modification time of each file that `options` or the environment names, to detect
    changes.
    """
    found = []
    for place in _places(options).values():
        with suppress(OSError):
            status = os.stat(place)
            found.append((place, status.st_ino, status.st_mtime_ns))
    return found


def opened(
    timeout: float,
    url: str,
    username: str | None,
    password: str | None,
    *,
    deletes_each: bool = False,
    makes_folder: bool = False,
) -> Any:
    """Return obstore's client of the store at `url`, without connecting.

    `timeout`: seconds for one request. `deletes_each`: whether S3 gets a separate request for each deletion.
    `makes_folder`: whether to create a missing folder of a `file:` URL.
    """
    parts = split_url(url)
    options = dict(parse_qsl(parts.query, keep_blank_values=True))
    bucket = parts.netloc.rpartition("@")[2]
    if parts.scheme == "file":
        if bucket not in ("", "localhost") or options.keys() - {"clients"} or parts.fragment:
            raise ValueError("write the URL of a folder as file:///path, without host and options, and # as %23")
        return LocalStore(folder_of(url), mkdir=makes_folder)
    kind, names = _STORES[parts.scheme]
    if not re.fullmatch(r"[\w.$-]+", bucket):
        raise ValueError(f"the URL names no bucket: write {parts.scheme}://bucket/path")
    if (parts.username or parts.password) and not names:
        raise ValueError("the URL cannot contain credentials: set GOOGLE_APPLICATION_CREDENTIALS to a file with them")
    limits = {"timeout": f"{timeout * 1000:.0f}ms", "connect_timeout": f"{timeout * 1000:.0f}ms"}
    given = (unquote(parts.username or "") or username, unquote(parts.password or "") or password)
    authorities = options.get("ssl_ca_certs")
    _check_files(options)
    options = {name: value for name, value in options.items() if name not in ("ssl_ca_certs", "clients")}
    # obstore panics on an invalid URL. Each of these options has several names.
    named = {name.lower(): value for name, value in options.items() if _NAMES_PLACE.search(name.lower())}
    places = named.values()
    if odd := [key for key, at in named.items() if not (_ENDPOINT.fullmatch(at) and (urlsplit(at).port or 1) > 0)]:
        raise ValueError(f"{odd[0]} must be http://host:port or https://host:port, without a password")
    if odd := [name for name, value in options.items() if any(map(str.isspace, value))]:
        raise ValueError(f"the option {odd[0]} of the URL contains a space")
    return kind(
        bucket,
        prefix=unquote(parts.path).strip("/") or None,
        config={
            **limits,
            **({"unsigned_payload": "true"} if kind is S3Store else {}),
            **({"disable_bulk_delete": "true"} if kind is S3Store and deletes_each else {}),
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


open_url = ObjectStoreBackend
