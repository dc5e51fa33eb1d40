"""What listens at the address of a remote store and is none: every call ends in time, and nobody else has to wait."""

from __future__ import annotations

import gc
import itertools
import struct
import time
import tracemalloc
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from typing import Any

import pytest
from hypothesis import event, given, strategies as st

pytest.importorskip("redis")
pytest.importorskip("obstore")

from lmkv.backends.remote import base
from lmkv.backends.remote.base import RemoteBackend, RemoteOptions, ValueCodec
from lmkv.backends.remote.infinistore import InfiniStoreBackend
from lmkv.backends.remote.objects import ObjectStoreBackend
from lmkv.backends.remote.redis import RedisBackend
from lmkv.backends.remote.subprocess_backend import START_LIMIT, SubprocessBackend
from lmkv.chunks.codec import ChunkFormat
from lmkv.errors import BackendError, BackendUnavailable, ClosedError, ConfigError
from lmkv.protocols import HIT, Chunk, Listed, ReadStatus, WriteStatus
from lmkv.testing.backend_suite import chunk_of, listed, new_key
from tests.backends.remote.hostile import Answer, Endpoint, longest_pause, of_http, of_redis
from tests.backends.remote.server_suite import GIVEN_UP
from tests.kit import LIMIT, eventually, raised

NAMESPACE = bytes(range(32))
TIMEOUT = 0.5
PAUSE = 2.0
"""Seconds that a thread may wait for the interpreter on a busy machine; whole answers took it for 4 to 40."""


def every_call(backend: RemoteBackend, chunk: Chunk | None = None) -> Iterator[tuple[str, object]]:
    """The name and the outcome of each call, an error if it raised one of lmkv's. Each ends in time, and none lies."""
    chunk = chunk or chunk_of(5000)
    into = memoryview(bytearray(len(chunk.payload)))
    calls: dict[str, Callable[[], Any]] = {
        "contains": lambda: backend.contains([chunk.key, new_key()]),
        "read": lambda: backend.read(chunk.key, into),
        "write": lambda: backend.write(chunk),
        "delete": lambda: backend.delete([chunk.key]),
        "list": lambda: list(itertools.islice(backend.list_keys(), 100)) if hasattr(backend, "list_keys") else [],
    }
    # On a busy machine the process of a client takes its time to start.
    limit = GIVEN_UP + START_LIMIT * isinstance(backend, SubprocessBackend)
    for name, call in calls.items():
        started = time.monotonic()
        try:
            outcome = call()
        except BackendError as error:
            outcome = error
        assert time.monotonic() - started < limit, f"{name} took too long"
        assert len(str(outcome)) < 3000
        if outcome is HIT:
            assert into == chunk.payload
        yield name, outcome


def refuses_all(backend: RemoteBackend) -> None:
    outcomes = dict(every_call(backend))
    for name in ("contains", "delete", "list"):
        assert isinstance(outcomes[name], BackendError), (name, outcomes[name])
    assert outcomes["read"].status is ReadStatus.FAILED  # type: ignore[attr-defined]
    assert outcomes["write"].status is WriteStatus.FAILED  # type: ignore[attr-defined]


def redis_at(endpoint: Endpoint, timeout: float = TIMEOUT, scheme: str = "redis") -> Any:
    url = f"{scheme}://127.0.0.1:{endpoint.port}"
    return closing(RedisBackend(url, NAMESPACE, RemoteOptions(timeout=timeout)))


def s3_at(endpoint: Endpoint, timeout: float, options: str = "") -> Any:
    url = f"s3://bucket?endpoint=http://127.0.0.1:{endpoint.port}&region=us-east-1{options}"
    given = RemoteOptions(timeout=timeout, username="me", password="hunter2")
    return closing(ObjectStoreBackend(url, NAMESPACE, given))


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
    with Endpoint(REDIS[kind]) as endpoint, longest_pause() as pause, redis_at(endpoint, scheme=scheme) as backend:
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

    with Endpoint(answer) as endpoint, redis_at(endpoint) as backend:
        refuses_all(backend)


ERROR = b"<Error><Code>Bad</Code><Message>" + b"?a" * 40_000 + b"</Message></Error>"


@pytest.mark.parametrize("status", ["400 Bad Request", "403 Forbidden", "500 Internal Server Error", "301 Moved"])
def test_an_error_page_of_s3_is_read_in_no_time_and_shown_in_a_line(status: str) -> None:
    served = Endpoint(of_http(ERROR, status), closes=True)
    with served as endpoint, longest_pause() as pause, s3_at(endpoint, 2.0) as backend:
        refuses_all(backend)
        assert raised(BackendError, "", backend.contains, [new_key()]).isprintable()
    assert pause[0] < PAUSE


@pytest.mark.parametrize("status", ["200 OK", "503 Slow Down"])
def test_an_object_store_that_promises_more_bytes_than_there_are_ends_no_engine(status: str) -> None:
    """Its client makes room for them, and ends its process."""
    answer = of_http(b"<Error/>", status, Content_Length=10**12)
    with Endpoint(answer) as endpoint, s3_at(endpoint, TIMEOUT, "&clients=1") as backend:
        outcomes = dict(every_call(backend))
    assert isinstance(outcomes["list"], BackendUnavailable)


def test_an_endpoint_that_is_no_url_is_refused() -> None:
    options = RemoteOptions(username="me", password="c2VjcmV0")
    why = r"must be http://host:port|Port out of range"
    for url in ("s3://bucket?region=x&endpoint=", "az://bucket?endpoint=", "gs://bucket?base_url="):
        for at in ("host:x", "host:99999", ":80", "[", "[::1", "a\\b", "%zz", "\u00e9"):
            raised(ConfigError, why, ObjectStoreBackend, f"{url}http://{at}", NAMESPACE, options)


def test_a_panic_of_the_client_is_an_error_like_any_other() -> None:
    """A host of this name has no form for the network, which obstore's client finds when it signs."""
    url = "s3://bucket?region=x&endpoint=http://xn--a"
    with closing(ObjectStoreBackend(url, NAMESPACE, RemoteOptions(username="me", password="x"))) as backend:
        refuses_all(backend)


class Answering(InfiniStoreBackend):
    """Its client answers anything."""

    answers: list[bool]
    lists: list[list[Listed]]

    def _exist(self, names: Sequence[str]) -> list[bool]:
        return self.answers

    def list_keys(self) -> Iterator[list[Listed]]:
        return self._listing(iter(self.lists))


LINE = b"+" + b"x" * 4090 + b"\r\n"
TOO_MUCH = {
    "lines": b"*524288\r\n" + LINE * 8192,
    "lists of lines": (b"*8\r\n" + LINE * 8) * 1024,
    "values": (b"$1000000\r\n" + b"x" * 1_000_000 + b"\r\n") * 32,
    "lists of nothing": (b"*1000\r\n" + b"$-1\r\n" * 1000) * 1000,
}


@pytest.mark.parametrize("kind", TOO_MUCH)
def test_all_answers_of_a_call_have_room_for_one(kind: str) -> None:
    with Endpoint(of_redis(TOO_MUCH[kind])) as endpoint, redis_at(endpoint, 10 * LIMIT) as backend:
        keys = [new_key() for _ in range(1000)]
        tracemalloc.start()
        try:
            why = "the answer has more than 16,777,216 bytes or 524,288 items"
            raised(BackendError, why, backend.contains, keys)
            assert tracemalloc.get_traced_memory()[1] < 64 << 20
        finally:
            tracemalloc.stop()


def scanning(places: Iterator[int]) -> Answer:
    """A SCAN that comes to these places, and finds nothing."""

    def answers(received: bytes) -> Iterator[bytes]:
        if b"\r\nSCAN\r\n" in received:
            cursor = b"%d" % next(places)
            yield b"*2\r\n$%d\r\n%b\r\n*0\r\n" % (len(cursor), cursor)
        else:
            yield from of_redis(b"$-1\r\n")(received)

    return answers


@pytest.mark.parametrize(
    ("places", "says"),
    [
        (itertools.repeat(1), "repeats itself"),
        (itertools.cycle(range(1, 20)), "repeats itself"),
        (itertools.count(1), "the store's listing has more than 100 pages"),
    ],
    ids=["one place", "a circle", "new places"],
)
def test_a_scan_that_never_ends_is_given_up(places: Iterator[int], says: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(base, "_MAX_PAGES", 100)
    with Endpoint(scanning(places)) as endpoint, redis_at(endpoint, LIMIT) as backend:
        raised(BackendError, says, lambda: list(backend.list_keys()))
        monkeypatch.setattr(base, "QUIET_SECONDS", 0.0)
        raised(BackendError, "the store listed no chunk for 0 s", lambda: list(backend.list_keys()))


def of_cluster(ranges: Sequence[tuple[int, int]], hosts: Sequence[str], port: int, otherwise: bytes) -> Answer:
    """A node that says these are the cluster's slots, each range at the next host."""

    def text(value: str) -> bytes:
        return b"$%d\r\n%b\r\n" % (len(value), value.encode())

    parts = [
        b"*3\r\n:%d\r\n:%d\r\n*3\r\n%b:%d\r\n%b" % (first, last, text(host), port, text(f"{number:040x}"))
        for number, ((first, last), host) in enumerate(zip(ranges, hosts, strict=True))
    ]
    slots, others = b"*%d\r\n%b" % (len(parts), b"".join(parts)), of_redis(otherwise)

    def answers(received: bytes) -> Iterable[bytes]:
        if b"SLOTS\r\n" in received:
            return [slots]
        return [b"*0\r\n"] if b"COMMAND\r\n" in received else others(received)

    return answers


@pytest.mark.parametrize(
    ("ranges", "hosts"),
    [
        ([(0, (1 << 63) - 2)], ["127.0.0.1"]),
        ([(0, 16383)] * 5000, ["127.0.0.1"] * 5000),
        ([(-(1 << 62), 16383)], ["127.0.0.1"]),
        ([(slot, slot) for slot in range(16384)], [f"127.1.{slot // 250}.{slot % 250}" for slot in range(16384)]),
    ],
    ids=["endless range", "the same again and again", "negative", "many nodes"],
)
def test_slots_that_no_cluster_has_are_not_visited(ranges: list[tuple[int, int]], hosts: list[str]) -> None:
    with (
        Endpoint(of_cluster(ranges, hosts, 1, b":1\r\n")) as endpoint,
        redis_at(endpoint, timeout=LIMIT, scheme="redis+cluster") as backend,
    ):
        started = time.thread_time()
        raised(
            BackendUnavailable,
            "the cluster's answer names impossible slots or too many nodes",
            backend.contains,
            [chunk_of(10).key],
        )
        assert time.thread_time() - started < 5.0


def test_redirections_to_ever_new_nodes_make_no_clients_without_end(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("lmkv.backends.remote.redis.MAX_NODES", 8)
    hosts = (f"0x{127:0{2 + high}x}.0.0.0x{1:0{1 + low}x}" for high in range(40) for low in range(40))
    port = 0

    def answer(received: bytes) -> Iterable[bytes]:
        moved = f"-MOVED 0 {next(hosts)}:{port}\r\n".encode()
        return of_cluster([(0, 16383)], ["127.0.0.1"], port, moved)(received)

    with Endpoint(answer) as endpoint:
        port = endpoint.port
        with redis_at(endpoint, timeout=LIMIT, scheme="redis+cluster") as backend:
            for _ in range(10):
                chunk = chunk_of(10)
                assert backend.read(chunk.key, memoryview(bytearray(10))).error is not None
                assert len(backend._connected().get_nodes()) <= 16


def s3_page(*names: str) -> bytes:
    """A page that says where the next one begins: where it began itself."""
    contents = "".join(
        f"<Contents><Key>{name}</Key><Size>5</Size><LastModified>2026-01-01T00:00:00.000Z</LastModified>"
        "<ETag>&quot;x&quot;</ETag></Contents>"
        for name in names
    )
    token = "<IsTruncated>true</IsTruncated><NextContinuationToken>again</NextContinuationToken>"
    return f'<?xml version="1.0"?><ListBucketResult>{contents}{token}</ListBucketResult>'.encode()


@pytest.mark.parametrize("full", [True, False], ids=["full", "empty"])
def test_a_listing_of_s3_that_never_ends_is_given_up(full: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(base, "QUIET_SECONDS", 0.2)
    names = [f"lmkv:{NAMESPACE.hex()}/{number:064x}" for number in range(1000 if full else 0)]
    with Endpoint(of_http(s3_page(*names)), closes=True) as endpoint, s3_at(endpoint, LIMIT) as backend:
        listing = backend.list_keys()
        if full:
            assert len(next(listing)) == len(names)
        raised(BackendError, "the same page twice" if full else "the store listed no chunk for 0 s", next, listing)


def test_a_listing_that_never_ends_does_when_it_is_closed() -> None:
    endless = Endpoint(of_http(s3_page()), closes=True)
    with endless as endpoint, s3_at(endpoint, LIMIT) as backend, ThreadPoolExecutor(1) as pool:
        listing = pool.submit(listed, backend)
        eventually(lambda: endpoint.connections > 10)
        backend.close()
        raised(ClosedError, "", listing.result, LIMIT / 2)


def test_answers_are_as_many_as_names_and_a_listing_ends(monkeypatch: pytest.MonkeyPatch) -> None:
    with closing(Answering("infinistore://127.0.0.1:1", NAMESPACE)) as backend:
        for answers in ([], [True], [True] * 3):
            backend.answers = answers
            raised(BackendError, f"{len(answers)} answers about 2 names", backend.contains, [new_key(), new_key()])
        sound, absurd = Listed(new_key(), 5000), Listed(new_key(), 1 << 60)
        backend.lists = [[sound, absurd]] * 5
        assert list(backend.list_keys()) == [[sound]] * 5
        monkeypatch.setattr(base, "_MAX_LISTED", 9)
        raised(BackendError, "the store lists more than 9 chunks", lambda: list(backend.list_keys()))


# -- any answers ----------------------------------------------------------------------------------------------

CHUNK = Chunk(bytes([7]) * 32, memoryview(bytes(range(60))))
NAME = f"lmkv:{NAMESPACE.hex()}/{CHUNK.key.hex()}"
VALUE = bytes(ValueCodec(ChunkFormat(NAMESPACE, max_tokens=0)).header_of(CHUNK)) + bytes(CHUNK.payload)


def of_parts(*parts: st.SearchStrategy[bytes] | bytes) -> st.SearchStrategy[bytes]:
    return st.tuples(*(part if isinstance(part, st.SearchStrategy) else st.just(part) for part in parts)).map(b"".join)


@st.composite
def near(draw: st.DrawFn, value: bytes) -> bytes:
    """The value, or one that is somewhere another."""
    at, more = draw(st.integers(0, len(value))), draw(st.binary(max_size=3))
    return draw(st.sampled_from([value, value[:at], value[:at] + more + value[at + len(more) :], value + more]))


numbers = st.one_of(
    st.sampled_from([0, 1, -1, 2, 404, 200, 507, len(VALUE), len(VALUE) - 1, 2**31 - 1, 2**32 - 1, 2**63, 10**30]),
    st.integers(-5, 10),
)
digits = numbers.map(lambda number: b"%d" % number)
errors = st.sampled_from(
    [*(b"ERR no", b"MOVED 1 127.0.0.1:1", b"ASK 5", b"MOVED x", b"WRONGTYPE no", b"OOM", b"LOADING", b"NOAUTH"), b""]
)
words = st.one_of(digits, errors, near(VALUE), st.sampled_from([NAME.encode(), b"OK", b""]), st.binary(max_size=9))
of_resp = st.recursive(
    st.one_of(
        *(of_parts(kind, text, b"\r\n") for kind in (b":", b"+", b"-", b"$", b"*") for text in (digits, words)),
        words.map(lambda word: b"$%d\r\n%b\r\n" % (len(word), word)),
    ),
    lambda inner: st.lists(inner, min_size=1, max_size=4).map(
        lambda parts: b"*%d\r\n%b" % (len(parts), b"".join(parts))
    ),
    max_leaves=6,
)
of_redis_that_has_it = st.sampled_from([b":1\r\n", b":0\r\n", b"$%d\r\n%b\r\n" % (len(VALUE), VALUE), b"$-1\r\n"])
of_infinistore = st.one_of(
    st.lists(numbers.map(lambda number: struct.pack("<I", number % 2**32)), max_size=6).map(b"".join),
    near(struct.pack("<III", 200, 0, len(VALUE)) + VALUE),
)
LISTING = """<?xml version="1.0" encoding="UTF-8"?><ListBucketResult><Name>bucket</Name><KeyCount>1</KeyCount>
<IsTruncated>false</IsTruncated><Contents><Key>NAME</Key><LastModified>2026-01-01T00:00:00.000Z</LastModified>
<ETag>"1"</ETag><Size>60</Size></Contents></ListBucketResult>""".replace("NAME", NAME).encode()
DELETED = f"<DeleteResult><Deleted><Key>{NAME}</Key></Deleted></DeleteResult>".encode()
bodies = st.one_of(near(VALUE), near(LISTING), near(DELETED), st.binary(max_size=30))
DATE = b"Thu, 01 Jan 2026 00:00:00 GMT"
dates = st.sampled_from([DATE, b"never", b"Thu, 99 Jan 99999 00:00:00 GMT", b""])


@st.composite
def of_s3(draw: st.DrawFn) -> bytes:
    body = draw(bodies)
    if draw(st.booleans()):
        lines = [b"HTTP/1.1 200 OK", b"Content-Length: %d" % len(body), b'ETag: "1"', b"Last-Modified: " + DATE]
        return b"\r\n".join([*lines, b"", body])
    status = draw(
        st.sampled_from([200, 200, 200, 204, 206, 301, 304, 400, 403, 404, 409, 412, 416, 429, 500, 503, 999])
    )
    length = draw(st.sampled_from([b"%d" % len(body)] * 4 + [b"0", b"-1", b"%d" % 2**63, b"%d" % 10**12, b"x"]))
    lines = [b"HTTP/1.1 %d x" % status, b"Content-Length: " + length, b"ETag: " + draw(st.sampled_from([b'"1"', b""]))]
    lines += [b"Last-Modified: " + draw(dates), *draw(st.lists(st.sampled_from(ODD_HEADERS), max_size=2))]
    return b"\r\n".join([*lines, b"", body])


ODD_HEADERS = [
    *(b"Content-Range: bytes 0-4/5", b"Content-Range: bytes x", b"Transfer-Encoding: chunked", b"Connection: close"),
    *(b"Content-Encoding: gzip", b"Location: http://127.0.0.1:1/", b"Retry-After: 999999999", b"x" * 5000 + b": y"),
]
KINDS: dict[str, tuple[Any, str, st.SearchStrategy[bytes]]] = {
    "redis": (RedisBackend, "redis://127.0.0.1:{}", of_resp | of_redis_that_has_it),
    "cluster": (RedisBackend, "redis+cluster://127.0.0.1:{}", of_resp),
    "s3": (ObjectStoreBackend, "s3://bucket?endpoint=http://127.0.0.1:{}&region=x&clients=1", of_s3()),
    "azure": (ObjectStoreBackend, "az://bucket?endpoint=http://127.0.0.1:{}/me&clients=1", of_s3()),
    "infinistore": (InfiniStoreBackend, "infinistore://127.0.0.1:{}", of_infinistore),
}


def in_turn(answers: list[bytes], *, greets: bool) -> Answer:
    """One answer after the other, and the last for ever."""
    left = iter(answers)

    def answer(received: bytes) -> Iterator[bytes]:
        if greets and received.startswith(b"*") and b"\r\nCLIENT\r\n" in received:
            yield from of_redis(b"")(received)
        else:
            yield next(left, answers[-1])

    return answer


@st.composite
def answering(draw: st.DrawFn) -> tuple[str, list[bytes], bool, bool]:
    kind = draw(st.sampled_from(sorted(KINDS)))
    answers = draw(st.lists(st.one_of(KINDS[kind][2], KINDS[kind][2], st.binary(max_size=30)), min_size=1, max_size=6))
    return kind, answers, draw(st.sampled_from([True, True, False])), draw(st.sampled_from([True, True, False]))


SAID = b"-ERR no|-MOVED 1 127.0.0.1:1|-ASK 1 127.0.0.1:1|-LOADING|-NOAUTH|*0|:1|+OK|$-1".split(b"|")


@pytest.mark.parametrize("kind", ["redis", "cluster", "infinistore"])
def test_a_closed_backend_leaves_no_connection(kind: str) -> None:
    """Not even to the collector of garbage, which would complain of a socket that nobody has closed."""
    make, url, _ = KINDS[kind]
    gc.disable()
    try:
        for said in SAID:
            with Endpoint(of_redis(said + b"\r\n")) as endpoint:
                with closing(make(url.format(endpoint.port), NAMESPACE, RemoteOptions(timeout=0.1))) as backend:
                    deque(every_call(backend), 0)
                eventually(endpoint.is_left, f"{said!r}", LIMIT / 10)
                assert endpoint.connections
    finally:
        gc.enable()


@pytest.mark.slow("each example has a client of its own, and those of object stores processes")
@given(answering())
def test_any_answers(given: tuple[str, list[bytes], bool, bool]) -> None:
    """An outcome of lmkv's, in time, and never a byte that is not the chunk's."""
    kind, answers, greets, closes = given
    make, url, _ = KINDS[kind]
    name, word = ("me", "c2VjcmV0") if "://bucket" in url else (None, None)
    options = RemoteOptions(timeout=0.1, chunk_tokens=0, username=name, password=word)
    with (
        Endpoint(in_turn(answers, greets=greets), closes=closes) as endpoint,
        closing(make(url.format(endpoint.port), NAMESPACE, options)) as backend,
    ):
        for name, outcome in every_call(backend, CHUNK):
            event(f"{kind} {name} {getattr(outcome, 'status', type(outcome).__name__)}")
