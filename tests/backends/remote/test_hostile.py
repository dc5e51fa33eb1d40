"""What listens at the address of a remote store and is none: every call ends in time, and nobody else has to wait."""

from __future__ import annotations

import itertools
import time
from collections.abc import Callable, Iterator
from contextlib import closing
from typing import Any

import pytest

from lmkv.backends.remote.base import RemoteBackend
from lmkv.backends.remote.objects import ObjectStoreBackend
from lmkv.backends.remote.options import RemoteOptions
from lmkv.backends.remote.redis import RedisBackend
from lmkv.errors import BackendError
from lmkv.outcomes import ReadStatus, WriteStatus
from lmkv.testing.backend_suite import chunk_of, new_key
from tests.backends.remote.hostile import Answer, Endpoint, longest_pause, of_http, of_redis
from tests.backends.remote.server_suite import GIVEN_UP

NAMESPACE = bytes(range(32))
TIMEOUT = 0.5
PAUSE = 2.0
"""Seconds that a thread may wait for the interpreter on a busy machine; whole answers took it for 4 to 40."""


def every_call(backend: RemoteBackend) -> Iterator[tuple[str, object]]:
    """The name and the outcome of each call, an error if it raised one of lmkv's. Each ends in time."""
    chunk = chunk_of(5000)
    into = memoryview(bytearray(5000))
    calls: dict[str, Callable[[], Any]] = {
        "contains": lambda: backend.contains([chunk.key, new_key()]),
        "read": lambda: backend.read(chunk.key, into),
        "write": lambda: backend.write(chunk),
        "delete": lambda: backend.delete([chunk.key]),
        "list": lambda: list(itertools.islice(backend.list_keys(), 100)) if hasattr(backend, "list_keys") else [],
    }
    for name, call in calls.items():
        started = time.monotonic()
        try:
            outcome = call()
        except BackendError as error:
            outcome = error
        assert time.monotonic() - started < GIVEN_UP, f"{name} took too long"
        assert len(str(outcome)) < 3000
        yield name, outcome


def refuses_all(backend: RemoteBackend) -> None:
    outcomes = dict(every_call(backend))
    for name in ("contains", "delete", "list"):
        assert isinstance(outcomes[name], BackendError), (name, outcomes[name])
    assert outcomes["read"].status is ReadStatus.FAILED  # type: ignore[attr-defined]
    assert outcomes["write"].status is WriteStatus.FAILED  # type: ignore[attr-defined]


def endlessly(start: bytes, piece: bytes, many: int = 4096) -> Answer:
    return lambda _: itertools.chain([start], itertools.repeat(piece * many))


REDIS = {
    "many items": endlessly(b"*2147483647\r\n", b":1\r\n"),
    "many items of many": endlessly(b"", b"*1000000\r\n"),
    "deep": endlessly(b"", b"*1\r\n"),
    "a large value": endlessly(b"$9223372036854775807\r\n", b"x"),
    "a value of gigabytes": endlessly(b"$2147483647\r\n", b"x"),
    "a line": endlessly(b"+", b"x"),
    "zeros": endlessly(b"", b"\0"),
    "an error": endlessly(b"-ERR ", b"?a"),
    "numbers of digits": endlessly(b":", b"9"),
    "words": endlessly(b"", b"+1\r\n"),
    "nothing": lambda _: [],
    "lies": of_redis(b"*200000000\r\n"),
    "no value": of_redis(b"$-2\r\n"),
}


@pytest.mark.parametrize("kind", REDIS)
@pytest.mark.parametrize("scheme", ["redis", "redis+cluster"])
def test_a_redis_that_is_none_holds_nobody_up(scheme: str, kind: str) -> None:
    with Endpoint(REDIS[kind]) as endpoint, longest_pause() as pause:
        url = f"{scheme}://127.0.0.1:{endpoint.port}"
        with closing(RedisBackend(url, NAMESPACE, RemoteOptions(timeout=TIMEOUT))) as backend:
            refuses_all(backend)
    assert endpoint.connections
    assert pause[0] < PAUSE


@pytest.mark.parametrize("greets", [True, False], ids=["later", "from the start"])
def test_a_redis_that_answers_bit_by_bit_is_given_up(greets: bool) -> None:
    def answer(received: bytes) -> Iterator[bytes]:
        if greets and b"\r\nCLIENT\r\n" in received:
            yield from of_redis(b"")(received)
            return
        yield b"$"
        while not endpoint.closed.wait(0.05):
            yield b"1"

    with Endpoint(answer) as endpoint:
        url = f"redis://127.0.0.1:{endpoint.port}"
        with closing(RedisBackend(url, NAMESPACE, RemoteOptions(timeout=TIMEOUT))) as backend:
            refuses_all(backend)


ERROR = b"<Error><Code>Bad</Code><Message>" + b"?a" * 40_000 + b"</Message></Error>"


@pytest.mark.parametrize("status", ["400 Bad Request", "403 Forbidden", "500 Internal Server Error", "301 Moved"])
def test_an_error_page_of_s3_is_read_in_no_time_and_shown_in_a_line(status: str) -> None:
    with Endpoint(of_http(ERROR, status), closes=True) as endpoint, longest_pause() as pause:
        url = f"s3://bucket?endpoint=http://127.0.0.1:{endpoint.port}&region=us-east-1"
        options = RemoteOptions(timeout=2.0, username="me", password="hunter2")
        with closing(ObjectStoreBackend(url, NAMESPACE, options)) as backend:
            refuses_all(backend)
            with pytest.raises(BackendError) as refused:
                backend.contains([new_key()])
    assert str(refused.value).isprintable()
    assert pause[0] < PAUSE
