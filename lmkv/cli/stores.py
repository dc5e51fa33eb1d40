"""Tests whether a folder can be a disk tier, and which calls a remote store refuses."""

from __future__ import annotations

import hashlib
import mmap
import os
import re
import shutil
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import closing
from pathlib import Path
from typing import Any, Literal

from attrs import frozen

from lmkv.backends.disk import LocalDiskBackend
from lmkv.backends.remote.base import DEFAULTS
from lmkv.build import open_remote
from lmkv.chunks.layout import ALIGNMENT
from lmkv.config import Config
from lmkv.config.urls import RemoteURL
from lmkv.errors import BackendError, BackendUnavailable, outside
from lmkv.protocols import MISS, STORED, Backend, Chunk, Read, ReadStatus, WriteStatus, Written
from lmkv.store.guards import attempt, close_all
from lmkv.store.health import as_backend_error, checked

VERBS = ("lookups", "reads", "writes", "deletions")
_NAMESPACE = hashlib.sha256(b"lmkv doctor").digest()
_SIZE = 1 << 20
_SPARE = 5.0
"""Seconds in addition to the timeouts of calls, for the client's work before and after the calls."""

_COMMANDS = {"lookups": "exists", "reads": "get", "writes": "set", "deletions": "unlink"}
_ACTIONS = {
    "lookups": "GetObject and s3:ListBucket",
    "reads": "GetObject",
    "writes": "PutObject",
    "deletions": "DeleteObject",
}
_REMEDIES = {
    r"(?i)never written|<html|</body|fewer than its header": "correct the endpoint in remote_url: a web page "
    "answers there",
    "MovedError": "this server is a node of a cluster: begin the URL with redis+cluster://",
    r"run the '(?P<command>[\w|-]+)'": "give the store's user +{command}",
    r"NoPermission|NOPERM": "give the store's user +{known}, and access to names that begin with remote_prefix",
    r"(?i)wrongpass|noauth|authentic|SignatureDoes|InvalidAccessKey": "correct remote_password, and remote_username if "
    "the store has users",
    "NoSuchBucket": "create the bucket, or correct its name in remote_url",
    r"(?i)permissiondenied|accessdenied|\b403\b": "allow s3:{action}",
    r"(?i)maxmemory|\bOOM\b|memory left|no space|quota": "give the store more memory, or let it evict (allkeys-lru)",
    r"closed by the server|closed the connection|reset by peer": "is this a Redis server? With TLS the URL begins with "
    "rediss://",
    r"(?i)read.?only": "name the primary server in remote_url, because a replica takes no writes",
    r"(?i)error sending request": "start the store, or correct the endpoint in remote_url (http:// or https://?)",
    r"(?i)refused|time.?out|timed out|not? answer|resol|not known|unreachable": "start the store or correct remote_url",
}


@frozen
class FolderFacts:
    """The result of `try_folder`. `tried`: the folder, or its nearest existing parent.

    `free_bytes`: free space in this folder. `direct_io`: whether O_DIRECT works in this folder.
    """

    tried: str
    free_bytes: int
    direct_io: bool


def try_folder(path: str | os.PathLike[str], direct: Literal["auto", "on", "off"] = "auto") -> FolderFacts:
    """Write, read and delete one chunk in a temporary folder below `path`.

    Raises ConfigError, OSError, or BackendError if the medium fails. BackendUnavailable means that a file is in place
    of the folder.
    """
    absolute = Path(path).absolute()
    tried = next(place for place in (absolute, *absolute.parents) if place.exists())
    if not tried.is_dir():
        raise BackendUnavailable(
            "disk", "open", reason=f"{tried} is not a folder: remove the file, or name another folder"
        )
    with (
        tempfile.TemporaryDirectory(prefix=".lmkv-try-", dir=tried) as folder,
        closing(LocalDiskBackend(folder, _NAMESPACE, direct=direct)) as backend,
        # Memory that is aligned to pages, because O_DIRECT is used for no other.
        mmap.mmap(-1, 16 * ALIGNMENT) as given,
        mmap.mmap(-1, 16 * ALIGNMENT) as returned,
    ):
        given.write(os.urandom(len(given)))
        with memoryview(given) as payload, memoryview(returned) as into:
            written = backend.write(Chunk(_NAMESPACE, payload))
            if written.status is not WriteStatus.STORED:
                raise written.error or BackendError(backend.name, "write", reason=written.reason)
            read = backend.read(_NAMESPACE, into)
            if read.status is not ReadStatus.HIT or into != payload:
                raise read.error or BackendError(
                    backend.name, "read", reason="the read bytes differ from the written bytes"
                )
        return FolderFacts(str(tried), shutil.disk_usage(tried).free, backend.direct_io)


def refusals(config: Config, url: RemoteURL) -> dict[str, str]:
    """Write, read and delete a chunk in a remote store. Returns the reason for each of `VERBS` that fails.

    The reasons are the store's error texts. The chunk is in a namespace for tests. Raises ConfigError.
    """
    key, timeout = config.authentication_bytes, config.remote_timeout
    backend = open_remote(config, url, _NAMESPACE, key, name=url.store_kind, chunk_tokens=DEFAULTS.chunk_tokens)
    found: dict[str, str] = {}
    asking = threading.Thread(target=lambda: found.update(_ask(backend, timeout)), daemon=True)
    asking.start()
    asking.join(len(VERBS) * timeout + _SPARE)
    if asking.is_alive():
        # Its thread is left behind.
        return dict.fromkeys(VERBS, "no answer in time")
    close_all([(url.store_kind, backend)])
    return {verb: in_short(reason) for verb, reason in found.items()}


def odd_policy(config: Config, url: RemoteURL) -> str:
    """Return a warning if a Redis server does not evict chunks when it is full, else ""."""
    backend: Any = open_remote(config, url, _NAMESPACE, None, name=url.store_kind, chunk_tokens=DEFAULTS.chunk_tokens)
    # A user without the right to ask has no limit here.
    limit, policy = attempt(backend.memory_policy, lambda error: (0, ""))
    close_all([(url.store_kind, backend)])
    evicts = policy.startswith("allkeys") or (policy.startswith("volatile") and config.remote_ttl)
    told = f"has the maxmemory-policy {policy}, which evicts no chunk when the server is full: set allkeys-lru"
    return "" if evicts or not limit else f"remote_url {url} {told}"


def in_short(reason: str) -> str:
    """Return the error text of an object store without the description of the request.

    >>> in_short("PermissionDenied: Error performing HEAD http://h/x in 3ms - HTTP error: error sending request")
    'PermissionDenied: HTTP error: error sending request'
    """
    if found := re.search(r"<Code>(.*?)</Code>.*?<Message>(.*?)</Message>", reason, re.DOTALL):
        return f"{found[1]}: {found[2]}"
    kind, detail = reason.partition(":")[0], reason.rpartition(" - ")[2]
    return f"{kind}: {detail}".rstrip(": ") if "Error performing" in reason else reason


def remedy(verb: str, reason: str) -> str:
    """Return how to fix a refused call. `verb`: the kind of call. `reason`: the store's error text.

    >>> remedy("deletions", "this user has no permissions to run the 'unlink' command")
    "give the store's user +unlink"
    """
    for pattern, text in _REMEDIES.items():
        if found := re.search(pattern, reason):
            known = {"known": _COMMANDS.get(verb, "@read +@write"), "action": _ACTIONS.get(verb, "*")}
            return text.format(**known, **found.groupdict())
    return "see in docs/remote.md what lmkv needs from a store"


def likeliest(refused: Mapping[str, str]) -> str:
    """Return the call in `refused` with the error text that most likely names the cause. `refused`: texts by call."""
    patterns = list(_REMEDIES)

    def rank(verb: str) -> int:
        return next((at for at, each in enumerate(patterns) if re.search(each, refused[verb])), len(patterns))

    return min(refused, key=rank)


def _look_up_nothing(backend: Backend) -> None:
    """Look up a chunk that does not exist. Raises BackendError if the store claims to have the chunk."""
    if any(backend.contains([os.urandom(32)])):
        raise BackendError(backend.name, "lookup", reason="the store claims to have a chunk that was never written")


def _ask(backend: Backend, timeout: float) -> Iterator[tuple[str, str]]:
    started = time.monotonic()
    if reason := _failure(lambda: _look_up_nothing(backend)):
        yield "lookups", reason
        if time.monotonic() - started >= timeout:
            # It does not answer: each other call would take as long.
            yield from ((verb, reason) for verb in VERBS[1:])
            return
    key = os.urandom(32)
    if reason := _failure(lambda: backend.delete([key])):
        yield "deletions", reason
        key = bytes(32)
    payload = hashlib.shake_128(key).digest(_SIZE)
    written = attempt(
        lambda: checked(backend.write(Chunk(key, memoryview(payload))), Written),
        lambda error: Written.failed(as_backend_error(backend.name, "write", key, error)),
    )
    if written.status not in (WriteStatus.STORED, WriteStatus.PRESENT):
        yield "writes", written.error.reason if written.error else outside(written.reason)
    into = bytearray(_SIZE)
    read = attempt(
        lambda: checked(backend.read(key, memoryview(into)), Read),
        lambda error: Read.failed(as_backend_error(backend.name, "read", key, error)),
    )
    if read.error is not None:
        yield "reads", read.error.reason
    elif written is STORED and (read is MISS or (read.status is ReadStatus.HIT and into != payload)):
        yield "reads", "the store did not return the chunk that lmkv had written"
    if written.status is WriteStatus.STORED:
        _failure(lambda: backend.delete([key]))


def _failure(call: Callable[[], object]) -> str:
    """Return the error text of a call that fails, or "" if the call succeeds."""

    def tried() -> str:
        call()
        return ""

    return attempt(tried, lambda error: as_backend_error("", "", b"", error).reason)
