"""`ObjectStoreBackend`: chunks as objects of S3, Google Cloud Storage or Azure, or as files of a folder."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from itertools import count
from typing import Any
from urllib.parse import parse_qsl, urlsplit

from lmkv.backends.remote.object_client import StoreClient, check, folder_of
from lmkv.backends.remote.options import DEFAULTS, RemoteOptions
from lmkv.backends.remote.subprocess_backend import ClientProcess, SubprocessBackend
from lmkv.errors import ConfigError
from lmkv.medium import Medium
from lmkv.protocols import Listed


class ObjectStoreBackend(SubprocessBackend):
    """A bucket, a container or a folder as a backend.

    Parameters
    ----------
    url
        `s3://bucket/path`, `gs://bucket/path`, `az://container/path` or `file:///folder`. Options of obstore follow
        in its query: `?endpoint=http://localhost:9000&region=eu-west-1`; `ssl_ca_certs=/path/ca.pem` names the
        certificates of a private authority, and `clients` the number of processes that move values (4).
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
    Nothing is connected before the first call. Any number of threads may call. obstore runs in processes of its own,
    because an answer that promises more bytes than there are ends its process. A value is sent in one request, which
    a store does completely or not at all, and only if the name is free (`If-None-Match`). A store that ignores this
    condition keeps the last of several concurrent writes; for one that refuses it, add `conditional_put=disabled`.
    Keys, tokens and signatures are in no repr and no message.

    Examples
    --------
    >>> ObjectStoreBackend("s3://cache/models?region=eu-west-1&session_token=secret", namespace=bytes(32))
    <ObjectStoreBackend 'objects': s3://cache/models?region=eu-west-1&session_token=***>
    """

    module = "obstore"
    client_module = StoreClient.__module__
    install = "pip install 'lmkv[s3]'"
    requests = 4

    def __init__(self, url: str, namespace: bytes, options: RemoteOptions = DEFAULTS) -> None:
        super().__init__(url, namespace, options)
        # Listings of obstore have no leading slash.
        self._root = self._root.lstrip("/")
        if options.ttl:
            raise ConfigError(f"{self._safe_url}: no ttl here; a lifecycle rule of the bucket expires its objects")
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
        return lambda: {**options, "password": self.options.password_now()}

    def list_keys(self) -> Iterator[list[Listed]]:
        """List the chunks of this namespace in batches, in no order."""
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
        """Raise OSError where a folder is on another medium than at the start. One that was removed is made again."""
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
        # Not behind a value that is being moved.
        return next((each for each in self._clients if not each.busy), None) or super()._client_for(names)

    def _disconnect(self) -> None:
        super()._disconnect()
        self._lister.close()


open_url = ObjectStoreBackend
