"""Object stores: the public suite over real servers and a folder, and what can happen to an object or a connection.

moto heeds `If-None-Match` of one writer at a time and takes any key; rclone heeds keys, and overwrites; azurite heeds
both. Google's client speaks with an rclone that heeds neither.
"""

from __future__ import annotations

import json
import logging
import os
import re
import shutil
import subprocess
import threading
import time
from collections.abc import Iterator
from contextlib import closing, suppress
from pathlib import Path
from typing import Any
from urllib.parse import quote

import pytest

pytest.importorskip("obstore")

import obstore
from obstore.store import AzureStore, GCSStore, S3Store

from lmkv.backends.adapters import WrapperBackend
from lmkv.backends.remote.base import RemoteOptions
from lmkv.backends.remote.objects import ObjectStoreBackend
from lmkv.build import build_store
from lmkv.chunks.layout import KVLayout, LayerPages
from lmkv.chunks.namespace import Namespace
from lmkv.config import Config
from lmkv.errors import BackendUnavailable, ConfigError, CorruptChunkError
from lmkv.protocols import Backend, Chunk, ChunkKey, Read, ReadStatus, WriteStatus
from lmkv.testing.backend_suite import (
    BackendSuite,
    chunk_of,
    in_threads,
    listed,
    new_key,
    read_back,
    sizes_of,
    statuses,
)
from tests.backends.remote.server_suite import DAMAGES, assert_apart, assert_damage_fails, assert_unavailable
from tests.backends.remote.subprocess_suite import ProcessSuite
from tests.forked import Child, Tell
from tests.kit import LIMIT, chain, eventually, every, lower, mounted_tmpfs, put_through, raised, small_store
from tests.rules import RuledProxy
from tests.servers import ObjectServer, Proxy, object_server

NAMESPACE = bytes(range(32))
KINDS = ("moto", "rclone", "azurite", "google")
STORED, PRESENT = WriteStatus.STORED, WriteStatus.PRESENT
USER, SECRET, CONDITIONAL = ObjectServer.USER, ObjectServer.SECRET, ObjectServer.CONDITIONAL


@pytest.fixture(scope="module", params=KINDS)
def server(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[ObjectServer]:
    with object_server(request.param, tmp_path_factory.mktemp(request.param)) as server:
        yield server


def backend_of(url: str, **options: Any) -> ObjectStoreBackend:
    return ObjectStoreBackend(
        url, NAMESPACE, RemoteOptions(**{"timeout": 20.0, "username": USER, "password": SECRET, **options})
    )


class ReadsAgain(WrapperBackend):
    """Reads again what the server did not answer: rclone may end an answer when its file is replaced."""

    def read(self, key: ChunkKey, into: memoryview) -> Read:
        for _ in range(20):
            read = super().read(key, into)
            if not isinstance(read.error, BackendUnavailable):
                break
        return read


class TestServerSuite(BackendSuite):
    @pytest.fixture(autouse=True)
    def _servers(self, server: ObjectServer) -> None:
        self.server = server

    def make(self, folder: Path) -> Backend:
        return backend_of(self.server.url(folder.name))

    def test_one_of_many_writers_of_a_key_stores_it(self, keeping: Backend) -> None:
        if self.server.kind == "azurite":
            super().test_one_of_many_writers_of_a_key_stores_it(keeping)
            return
        # rclone overwrites, and moto looks before it stores, in two steps that others' come between: several store it,
        # and whatever is read is one writer's whole.
        chunk = chunk_of(50_000)
        results = in_threads(4, lambda _: keeping.write(chunk).status)
        assert STORED in results
        assert set(results) <= {STORED, PRESENT}
        assert read_back(keeping, chunk) == chunk.payload

    def test_many_threads_at_once(self, keeping: Backend) -> None:
        super().test_many_threads_at_once(keeping if self.server.kind in CONDITIONAL else ReadsAgain(keeping))


class TestFolderSuite(BackendSuite):
    def make(self, folder: Path) -> Backend:
        return backend_of(f"file://{folder}/a%20folder")


# -- what is under a name --------------------------------------------------------------------------------


@pytest.fixture
def backend(server: ObjectServer, tmp_path: Path) -> Iterator[ObjectStoreBackend]:
    with closing(backend_of(server.url(tmp_path.name))) as backend:
        yield backend


@pytest.fixture
def raw(server: ObjectServer, tmp_path: Path) -> Any:
    """The same place, for whatever somebody else does there."""
    return raw_store(server, tmp_path.name)


@pytest.fixture
def folder(tmp_path: Path) -> Iterator[ObjectStoreBackend]:
    with closing(backend_of(f"file://{tmp_path}")) as backend:
        yield backend


@pytest.fixture
def proxy(server: ObjectServer) -> Iterator[Proxy]:
    with closing(Proxy(server.port)) as proxy:
        yield proxy


@pytest.fixture
def behind(proxy: Proxy, server: ObjectServer, tmp_path: Path) -> Iterator[ObjectStoreBackend]:
    """A backend whose requests go through the proxy, each for a second at most."""
    with closing(backend_of(server.url(tmp_path.name, port=proxy.port), timeout=1.0)) as backend:
        yield backend


def raw_store(server: ObjectServer, path: str) -> Any:
    over_http: Any = {"prefix": path, "client_options": {"allow_http": True}}
    if server.kind == "azurite":
        endpoint = f"http://127.0.0.1:{server.port}/{USER}"
        return AzureStore("bucket", account_name=USER, account_key=SECRET, endpoint=endpoint, **over_http)
    endpoint = f"http://127.0.0.1:{server.port}"
    if server.kind == "google":
        return GCSStore("bucket", base_url=endpoint, service_account=str(server.service_account()), **over_http)
    return S3Store("bucket", access_key_id=USER, secret_access_key=SECRET, endpoint=endpoint, **over_http)


def replaced(raw: Any, name: str, value: bytes | bytearray) -> None:
    obstore.put(raw, name, value, use_multipart=False)


def test_a_value_that_is_not_the_chunk_fails_and_can_be_replaced(backend: ObjectStoreBackend, raw: Any) -> None:
    assert_damage_fails(
        backend,
        lambda chunk: bytes(obstore.get(raw, backend.name_of(chunk.key)).bytes()),
        lambda chunk, value: replaced(raw, backend.name_of(chunk.key), value),
        {**DAMAGES, "nothing": lambda value, other: b""},
    )


def test_what_is_no_file_is_not_opened_and_is_replaced(folder: ObjectStoreBackend, tmp_path: Path) -> None:
    chunk = chunk_of(100)
    for put in (os.mkfifo, lambda path: path.symlink_to("/dev/zero"), lambda path: path.symlink_to(path.name)):
        assert folder.write(chunk).status is STORED
        [path] = tmp_path.rglob(chunk.key.hex())
        path.unlink()
        put(path)
        started = time.monotonic()
        assert folder.contains([chunk.key]) == [True]
        assert folder.write(chunk).status is PRESENT
        read = folder.read(chunk.key, memoryview(bytearray(100)))
        assert isinstance(read.error, CorruptChunkError)
        folder.delete([chunk.key])
        assert time.monotonic() - started < folder.options.timeout
    assert folder.write(chunk).status is STORED
    assert read_back(folder, chunk) == chunk.payload


def test_of_a_huge_foreign_file_only_the_beginning_is_read(folder: ObjectStoreBackend, tmp_path: Path) -> None:
    chunk = chunk_of(9000)
    assert folder.write(chunk).status is STORED
    os.truncate(tmp_path / folder.name_of(chunk.key), 1 << 40)
    read = folder.read(chunk.key, memoryview(bytearray(9000)))
    assert isinstance(read.error, CorruptChunkError)


def test_of_a_large_foreign_object_only_the_beginning_is_read(
    backend: ObjectStoreBackend, behind: ObjectStoreBackend, proxy: Proxy, raw: Any
) -> None:
    key = new_key()
    replaced(raw, backend.name_of(key), bytes(100 << 20))
    read = behind.read(key, memoryview(bytearray(9000)))
    assert isinstance(read.error, CorruptChunkError)
    assert proxy.forwarded < 50 << 20


def test_other_namespaces_paths_and_prefixes_are_other_chunks(
    backend: ObjectStoreBackend, server: ObjectServer, tmp_path: Path
) -> None:
    url = server.url(tmp_path.name)
    others = [
        ObjectStoreBackend(url, bytes(32), RemoteOptions(timeout=20.0, username=USER, password=SECRET)),
        backend_of(url, prefix="a team/lmkv"),
        backend_of(url, prefix=""),
        backend_of(url, prefix="/other/"),
        backend_of(server.url(f"{tmp_path.name}/deeper")),
    ]
    assert_apart(backend, others)


def test_objects_of_others_are_not_listed(backend: ObjectStoreBackend, raw: Any) -> None:
    chunk = chunk_of(500)
    name = backend.name_of(chunk.key)
    for other in (name[:-1], f"{name}0", f"{name[:-1]}Z", f"{name.rpartition('/')[0]}/deeper/{'0' * 64}"):
        replaced(raw, other, b"somebody else's")
    assert listed(backend) == {}
    assert backend.write(chunk).status is STORED
    assert listed(backend) == sizes_of(backend, [chunk])


def test_long_listings_come_in_pages_and_many_are_deleted_at_once(tmp_path: Path) -> None:
    with object_server("rclone", tmp_path) as server, closing(backend_of(server.url())) as backend:
        keys = [new_key() for _ in range(2100)]
        (server.bucket / backend.name_of(keys[0])).parent.mkdir()
        for key in keys:
            (server.bucket / backend.name_of(key)).touch()
        batches = list(backend.list_keys())
        assert len(batches) > 2
        assert listed(backend) == dict.fromkeys(keys, 0)
        assert backend.contains([*keys[:40], new_key(), *keys[-40:]]) == [True] * 40 + [False] + [True] * 40
        backend.delete([new_key(), *keys[:-1], new_key()])
        assert listed(backend) == {keys[-1]: 0}


def test_many_are_deleted_however_late_each_answer_is(server: ObjectServer, proxy: Proxy, tmp_path: Path) -> None:
    """Google's client deletes each by itself, a few at a time."""
    with closing(backend_of(server.url(tmp_path.name, port=proxy.port), timeout=2.0)) as backend:
        chunks = [chunk_of(100) for _ in range(300)]
        with closing(backend_of(server.url(tmp_path.name))) as other:
            assert set(statuses(other, chunks)) == {STORED}
            proxy.latency = 0.05
            backend.delete([chunk.key for chunk in chunks])
            proxy.latency = 0.0
            assert listed(other) == {}


def test_what_is_there_is_not_sent_again(behind: ObjectStoreBackend, proxy: Proxy) -> None:
    chunk = chunk_of(1 << 20)
    eventually(lambda: behind.write(chunk).status is STORED)
    before = proxy.forwarded
    assert before > 1 << 20
    assert behind.write(chunk).status is PRESENT
    assert proxy.forwarded - before < 10_000


def test_a_server_that_refuses_conditions_is_written_without(server: ObjectServer, tmp_path: Path) -> None:
    if server.kind in ("azurite", "google"):
        pytest.skip("an option of S3")
    with closing(backend_of(f"{server.url(tmp_path.name)}&conditional_put=disabled")) as backend:
        chunk = chunk_of(500)
        assert statuses(backend, [chunk, chunk]) == [STORED, PRESENT]
        assert read_back(backend, chunk) == chunk.payload


def test_engines_that_write_a_chunk_at_the_same_time_harm_nothing(server: ObjectServer, tmp_path: Path) -> None:
    """Their KV may differ in rounding. Whoever reads meanwhile has one writer's, whole, or none."""
    backends = [backend_of(server.url(tmp_path.name)) for _ in range(4)]
    for _ in range(5):
        key = new_key()
        chunks = [chunk_of(500_000, key) for _ in backends]
        seen: list[Any] = []

        def read(index: int, key: bytes = key, seen: list[Any] = seen) -> None:
            into = memoryview(bytearray(500_000))
            found = backends[index].read(key, into)
            seen.append((found, bytes(into)))

        def work(index: int, read: Any = read, chunks: list[Chunk] = chunks) -> WriteStatus | None:
            if index < 4:
                return backends[index].write(chunks[index]).status
            for _ in range(20):
                read(index - 4)
            return None

        written = in_threads(8, work)[:4]
        read(0)
        assert STORED in written
        assert server.kind not in CONDITIONAL or sorted(map(str, written)) == sorted(map(str, [STORED] + [PRESENT] * 3))
        for found, payload in seen:
            assert found.status is not ReadStatus.HIT or payload in [chunk.payload for chunk in chunks]
            # rclone may end an answer when its file is replaced.
            assert found.error is None or (
                server.kind not in CONDITIONAL and isinstance(found.error, BackendUnavailable)
            )
        assert seen[-1][0].status is ReadStatus.HIT
    for each in backends:
        each.close()


# -- connections -----------------------------------------------------------------------------------------


def assert_all_unavailable(backend: ObjectStoreBackend, chunk: Chunk) -> list[str]:
    """Every call raises; returns the messages of the errors."""
    with pytest.raises(BackendUnavailable) as listing:
        list(backend.list_keys())
    with pytest.raises(BackendUnavailable) as deleting:
        backend.delete([chunk.key])
    return [repr(listing.value), repr(deleting.value), *assert_unavailable(backend, chunk)]


@pytest.mark.parametrize("kind", KINDS)
def test_a_server_that_is_killed_is_unavailable_until_it_is_back(tmp_path: Path, kind: str) -> None:
    with object_server(kind, tmp_path) as server, closing(backend_of(server.url())) as backend:
        chunk = chunk_of(100)
        assert backend.write(chunk).status is STORED
        server.kill()
        assert_all_unavailable(backend, chunk)
        server.start()
        # moto had it in its memory, and azurite may not have written it yet.
        assert backend.write(chunk).status in ((STORED, PRESENT) if kind in CONDITIONAL else (PRESENT,))
        assert read_back(backend, chunk) == chunk.payload


def test_connections_that_die_in_the_middle_of_values_serve_no_wrong_byte(
    backend: ObjectStoreBackend, proxy: Proxy, server: ObjectServer, tmp_path: Path
) -> None:
    chunks = [chunk_of(1 << 20) for _ in range(4)]
    statuses(backend, chunks)
    stop = threading.Event()

    def cut_off() -> None:
        while not stop.is_set():
            proxy.cut()

    with closing(backend_of(server.url(tmp_path.name, port=proxy.port))) as cut:
        killer = threading.Thread(target=cut_off)
        killer.start()
        found = []
        for number in range(60):
            into = memoryview(bytearray(1 << 20))
            read = cut.read(chunks[number % 4].key, into)
            found.append(read.status)
            assert read.status is not ReadStatus.HIT or into == chunks[number % 4].payload
            assert read.error is None or isinstance(read.error, BackendUnavailable)
        stop.set()
        killer.join()
        assert ReadStatus.FAILED in found
        assert ReadStatus.MISS not in found
        eventually(lambda: cut.contains([chunks[0].key]) == [True])
        assert read_back(cut, chunks[0]) == chunks[0].payload


@pytest.mark.parametrize("deaf", ["the server", "the network"])
def test_what_does_not_answer_is_given_up_in_time(
    behind: ObjectStoreBackend, proxy: Proxy, server: ObjectServer, deaf: str
) -> None:
    chunk = chunk_of(100)
    eventually(lambda: behind.write(chunk).status in (STORED, PRESENT))
    if deaf == "the server":
        server.pause()
    proxy.deaf = deaf == "the network"
    try:
        started = time.monotonic()
        assert_all_unavailable(behind, chunk)
        raised(BackendUnavailable, "", behind.contains, [new_key() for _ in range(1000)])
        assert time.monotonic() - started < LIMIT
    finally:
        server.resume()
    proxy.deaf = False
    into = memoryview(bytearray(100))
    # A paused server may carry out the deletion that was given up, even after a write that has found the chunk.
    eventually(
        lambda: behind.write(chunk).status is PRESENT and behind.read(chunk.key, into).status is ReadStatus.HIT,
        "it answers again",
    )
    assert into == chunk.payload


def test_a_value_that_comes_too_slowly_is_given_up(
    backend: ObjectStoreBackend, behind: ObjectStoreBackend, proxy: Proxy, server: ObjectServer, tmp_path: Path
) -> None:
    chunk = chunk_of(32 << 20)
    assert backend.write(chunk).status is STORED
    proxy.delay = 0.2
    started = time.monotonic()
    read = behind.read(chunk.key, memoryview(bytearray(32 << 20)))
    assert isinstance(read.error, BackendUnavailable)
    assert time.monotonic() - started < LIMIT
    with closing(backend_of(server.url(tmp_path.name, port=proxy.port))) as patient:
        assert patient.contains([chunk.key]) == [True], "400 ms are no failure"


def test_without_its_bucket_there_is_nothing_and_writes_say_why(server: ObjectServer) -> None:
    with closing(backend_of(server.url().replace("://bucket", "://nobody-made-it"))) as backend:
        chunk = chunk_of(100)
        assert backend.contains([chunk.key]) == [False]
        assert read_back(backend, chunk) is None
        written = backend.write(chunk)
        assert isinstance(written.error, BackendUnavailable)
        assert "NoSuchBucket" in str(written.error) or "ContainerNotFound" in str(written.error)


# -- who may, and what is shown --------------------------------------------------------------------------


def test_keys_come_from_settings_from_the_url_or_from_the_environment(
    server: ObjectServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    url, chunk = server.url(tmp_path.name), chunk_of(100)
    if server.kind == "google":
        pytest.skip("a file has its key")
    named = url.replace("://", f"://{USER}:{quote(SECRET)}@", 1)
    with closing(backend_of(named, username="nobody", password="bm90aGluZw==")) as by_url:
        assert by_url.write(chunk).status is STORED
        assert SECRET not in repr(by_url)
        assert quote(SECRET) not in repr(by_url)
    names = ("AZURE_STORAGE_ACCOUNT_NAME", "AZURE_STORAGE_ACCOUNT_KEY")
    if server.kind != "azurite":
        names = ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY")
        monkeypatch.setenv("AWS_ENDPOINT_URL", f"http://127.0.0.1:{server.port}")
        monkeypatch.setenv("AWS_ALLOW_HTTP", "true")
        url = f"s3://bucket/{tmp_path.name}"
    for name, value in zip(names, (USER, SECRET), strict=True):
        monkeypatch.setenv(name, value)
    with closing(backend_of(url, username=None, password=None)) as by_environment:
        assert by_environment.write(chunk).status is PRESENT


def test_googles_key_comes_from_a_file_and_is_shown_nowhere(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.DEBUG)
    with object_server("google", tmp_path) as server:
        file, url = server.service_account(), f"gs://bucket?base_url=http://127.0.0.1:{server.port}"
        monkeypatch.setenv("GOOGLE_APPLICATION_CREDENTIALS", str(file))
        with closing(backend_of(url, username=None, password=None)) as backend:
            chunk = chunk_of(100)
            assert backend.write(chunk).status is STORED
            assert read_back(backend, chunk) == chunk.payload
            server.kill()
            texts = [repr(backend), *assert_all_unavailable(backend, chunk)]
        key = json.loads(file.read_text())["private_key"].splitlines()[1]
        file.write_text(file.read_text().replace("PRIVATE KEY", "KEY"))
        with pytest.raises(ConfigError) as refused:
            backend_of(url, username=None, password=None)
        texts += [str(refused.value), caplog.text]
    assert not [text for text in texts if key in text]


def test_wrong_keys_are_refused_and_shown_nowhere(
    server: ObjectServer, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    if server.kind in ("moto", "google"):
        pytest.skip("it takes any key")
    caplog.set_level(logging.DEBUG)
    secret, url = "aHVudGVyMg==", server.url(tmp_path.name)
    wrong = [
        backend_of(url, password=secret),
        backend_of(url.replace("://", f"://{USER}:{quote(secret)}@", 1)),
        backend_of(f"{url}&{'account_key' if server.kind == 'azurite' else 'secret_access_key'}={secret}"),
    ]
    texts = []
    for each in wrong:
        texts += [repr(each), *assert_all_unavailable(each, chunk_of(100))]
        each.close()
    with pytest.raises(ConfigError) as refused:
        backend_of(f"{url}&account_key={secret}&secret_access_key={secret}")
    texts += [str(refused.value), caplog.text]
    assert not [text for text in texts if secret in text or quote(secret) in text]


def test_keys_that_end_in_the_middle_are_misses_until_they_hold_again(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with object_server("rclone", tmp_path) as server, closing(backend_of(server.url())) as backend:
        chunk = chunk_of(100)
        assert backend.write(chunk).status is STORED
        server.expect("another")
        texts = assert_all_unavailable(backend, chunk)
        server.expect(SECRET)
        assert read_back(backend, chunk) == chunk.payload
    assert not [text for text in [*texts, caplog.text] if SECRET in text or quote(SECRET) in text]


def test_a_shared_access_signature_is_shown_nowhere(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.DEBUG)
    with object_server("azurite", tmp_path) as server:
        sas = quote("sv=2021-12-02&ss=b&srt=co&sp=rwl&se=2099-01-01&sig=aHVudGVyMg==")
        url = f"{server.url()}&account_name={USER}&sas_key={sas}"
        with closing(backend_of(url, username=None, password=None)) as backend:
            texts = [repr(backend), *assert_all_unavailable(backend, chunk_of(100))]
            server.kill()
            texts += assert_all_unavailable(backend, chunk_of(100))
    assert not [text for text in [*texts, caplog.text] if "aHVudGVyMg" in text]


def certified(folder: Path) -> tuple[str, ...]:
    """Options of a server with a new certificate, `cert` in the folder."""
    make = ["openssl", "req", "-x509", "-newkey", "rsa:2048", "-nodes", "-days", "2", "-subj", "/CN=localhost"]
    # Self-signed, and no authority: a server's certificate must not be one.
    make += ["-addext", "subjectAltName=DNS:localhost,IP:127.0.0.1", "-addext", "basicConstraints=critical,CA:FALSE"]
    subprocess.run([*make, "-keyout", folder / "key", "-out", folder / "cert"], check=True, capture_output=True)
    return "--cert", str(folder / "cert"), "--key", str(folder / "key")


def test_a_certificate_that_was_replaced_is_read_again(tmp_path: Path) -> None:
    certificate = f"ssl_ca_certs={tmp_path / 'cert'}"
    with (
        object_server("rclone", tmp_path, *certified(tmp_path)) as server,
        closing(backend_of(f"{server.url(scheme='https')}&{certificate}")) as backend,
    ):
        first, second = chunk_of(100), chunk_of(100)
        assert backend.write(first).status is STORED
        server.kill()
        certified(tmp_path)
        server.start()
        # Each process notices it with a call of its own.
        eventually(lambda: backend.write(second).status in (STORED, PRESENT))
        eventually(lambda: backend.read(first.key, memoryview(bytearray(100))).status is ReadStatus.HIT)
        assert read_back(backend, first) == first.payload


def test_tls(tmp_path: Path) -> None:
    options = certified(tmp_path)
    with object_server("rclone", tmp_path, *options) as server:
        url, chunk = server.url(scheme="https"), chunk_of(3 << 20)
        with closing(backend_of(f"{url}&ssl_ca_certs={tmp_path / 'cert'}")) as backend:
            assert backend.write(chunk).status is STORED
            assert read_back(backend, chunk) == chunk.payload
        with closing(backend_of(url)) as distrusting:
            assert_all_unavailable(distrusting, chunk)


# -- settings --------------------------------------------------------------------------------------------


REFUSED: dict[str, str] = {
    "s3:///path": "names no bucket", "s3://two%20words/path": "names no bucket",
    "s3://bucket?endpoint=minio:9000": "must be http://host:port",
    "s3://bucket?aws_endpoint_url=http://host:x": "must be http://host:port",
    "s3://bucket?endpoint=http://id:hunter2@minio:9000": "without a password",
    "gs://bucket?base_url=http%3A%2F%2Fid%3Ahunter2%40host": "without a password",
    "gs://bucket?google_base_url=http://host:99999": "range",
    "s3://bucket?clients=65": "1 to 64", "s3://bucket?region=us%20east": "space", "s3://bucket?colour=red": "colour",
    "s3://bucket?pool_idle_timeout=soon": "soon", "s3://bucket?ssl_ca_certs=/nowhere/ca.pem": "ca.pem",
    "s3://id:hunter2/x@bucket": "in a password write / as %2F",
    "gs://user:hunter2@bucket": "GOOGLE_APPLICATION_CREDENTIALS",
    "gs://bucket?service_account_key=hunter2": "gs://bucket", "file://host/folder": "file:///path",
    "file:///folder?region=here": "file:///path", "file:///folder#1": "%23",
    "file:///proc/nowhere": "file:///proc/nowhere",
}  # fmt: skip


def test_what_cannot_work_is_refused_at_once() -> None:
    def check(url: str, says: str, **options: Any) -> None:
        told = raised(ConfigError, says, ObjectStoreBackend, url, NAMESPACE, RemoteOptions(**options))
        assert "hunter2" not in told

    every(REFUSED.items(), check)
    check("s3://bucket", "lifecycle rule on the bucket", ttl=60)
    check("s3://bucket", "empty path segment", prefix="a//b")
    check("file:///tmp/lmkv-nothing", r"\.\.", prefix="../")


def test_a_file_of_keys_that_is_no_file_is_refused_at_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """obstore would wait for the other end of a pipe, and let no other thread run."""
    os.mkfifo(tmp_path / "keys")
    url = f"gs://bucket?service_account={tmp_path}/keys"
    raised(ConfigError, "must be the path of a file", ObjectStoreBackend, url, NAMESPACE)
    monkeypatch.setenv("GOOGLE_APPLICATION_CREDENTIALS", str(tmp_path / "keys"))
    raised(ConfigError, "must be the path of a file", ObjectStoreBackend, "gs://bucket", NAMESPACE)


def test_another_engine_finds_what_one_has_stored(server: ObjectServer, tmp_path: Path) -> None:
    layout = KVLayout(8, (LayerPages(4096, 2),))
    namespace = Namespace(model="m", dtype="float32", chunk_size=8, block_size=4)
    options = {
        "remote_url": server.url(tmp_path.name),
        "remote_urls": f"file://localhost{tmp_path}",
        "remote_username": USER,
        "remote_password": SECRET,
        "remote_timeout": 20.0,
        "max_local_cpu_size": 16 * layout.slot_bytes / 2**30,
    }
    config = Config.load(extra=options, env={})
    chunks = {new_key(): os.urandom(layout.slot_bytes) for _ in range(4)}
    with closing(build_store(config, namespace, layout, shared=False)) as first:
        with first.reserve(list(chunks)) as reservation:
            for key, slot in reservation.slots.items():
                first.slab.view(slot)[:] = chunks[key]
            reservation.commit()
        assert first.drain(LIMIT)
    with closing(build_store(config, namespace, layout, shared=False)) as second:
        shared_lookup = second.look_up_shared(list(chunks))
        assert shared_lookup is None or shared_lookup.wait(LIMIT)
        promotion = second.promote(list(chunks))
        assert promotion.wait(LIMIT)
        with second.lease(promotion.keys) as lease:
            assert {key: second.slab.view(slot) for key, slot in zip(lease.keys, lease.slots, strict=True)} == chunks
        promotion.release()
        assert second.wait_indexed(LIMIT)
        assert [tier.name for tier in second.stats().tiers[1:]] == ["objects", "objects-2"]
        assert [tier.used_bytes > sum(map(len, chunks.values())) for tier in second.stats().tiers[1:]] == [True] * 2


# -- a folder --------------------------------------------------------------------------------------------


def test_a_full_folder_rejects_and_takes_more_when_there_is_room(tmp_path: Path) -> None:
    with mounted_tmpfs(tmp_path, "size=8m"), closing(backend_of(f"file://{tmp_path}")) as backend:
        chunks = [chunk_of(1 << 20) for _ in range(10)]
        found = statuses(backend, chunks)
        assert found[0] is STORED
        assert found[-1] is WriteStatus.REJECTED
        assert "\n" not in backend.write(chunks[-1]).reason
        stored = [chunk for chunk, status in zip(chunks, found, strict=True) if status is STORED]
        assert listed(backend) == sizes_of(backend, stored)
        assert all(read_back(backend, chunk) == chunk.payload for chunk in stored)
        backend.delete([stored[0].key])
        assert backend.write(stored[0]).status is STORED


def write_for_ever(tell: Tell, url: str) -> None:
    backend = backend_of(url)
    tell("ready")
    while True:
        backend.write(chunk_of(3 << 20))


def test_a_writer_that_is_killed_leaves_whole_chunks_only(folder: ObjectStoreBackend, tmp_path: Path) -> None:
    for number in range(3):
        with Child(write_for_ever, f"file://{tmp_path}") as child:
            assert child.heard() == "ready"
            eventually(lambda number=number: len(listed(folder)) > 2 * number)  # type: ignore[misc]
    for key in listed(folder):
        read = folder.read(key, memoryview(bytearray(3 << 20)))
        assert read.status is ReadStatus.HIT, read.error


def test_a_folder_that_is_removed_is_made_again(tmp_path: Path) -> None:
    with closing(backend_of(f"file://{tmp_path}/folder")) as backend:
        chunk = chunk_of(100)
        assert backend.write(chunk).status is STORED
        shutil.rmtree(tmp_path / "folder")
        assert backend.contains([chunk.key]) == [False]
        assert read_back(backend, chunk) is None
        assert backend.write(chunk).status is STORED
        assert read_back(backend, chunk) == chunk.payload


# -- a store that refuses some requests ------------------------------------------------------------------


class TestProcesses(ProcessSuite):
    kind = ObjectStoreBackend

    @pytest.fixture(autouse=True)
    def _folder(self, tmp_path: Path) -> None:
        self.url = f"file://{tmp_path}"

    test_what_it_does_not_have_is_said = None  # type: ignore[assignment]


@pytest.fixture
def ruled(server: ObjectServer) -> Iterator[RuledProxy]:
    if server.kind not in ("moto", "rclone"):
        pytest.skip("answers of S3")
    with RuledProxy(server.port) as proxy:
        yield proxy


@pytest.fixture
def refusing(server: ObjectServer, ruled: RuledProxy, tmp_path: Path) -> Iterator[ObjectStoreBackend]:
    with closing(backend_of(server.url(tmp_path.name, port=ruled.port))) as backend:
        yield backend


def refusal(code: str) -> bytes:
    return f'<?xml version="1.0"?><Error><Code>{code}</Code><Message>No.</Message></Error>'.encode()


def test_a_store_that_refuses_to_delete_many_deletes_each(refusing: ObjectStoreBackend, ruled: RuledProxy) -> None:
    """Ceph and others want a checksum there that is not sent. One that refuses to delete is not asked for each."""
    chunks = [chunk_of(100) for _ in range(40)]
    keys = [chunk.key for chunk in chunks]
    assert statuses(refusing, chunks) == [STORED] * 40
    ruled.rule = lambda method, path: (403, refusal("AccessDenied")) if method in ("POST", "DELETE") else None
    raised(BackendUnavailable, "AccessDenied", refusing.delete, keys)
    assert ruled.refused <= 4
    ruled.rule = lambda method, path: (400, refusal("MissingContentMD5")) if method == "POST" else None
    before = ruled.refused
    refusing.delete(keys)
    assert ruled.refused > before
    assert listed(refusing) == {}


def test_a_question_that_fails_loses_its_own_answer_only(refusing: ObjectStoreBackend, ruled: RuledProxy) -> None:
    chunks = [chunk_of(100) for _ in range(20)]
    keys = [chunk.key for chunk in chunks]
    assert statuses(refusing, chunks) == [STORED] * 20
    busy = {chunks[7].key.hex(), chunks[12].key.hex()}
    ruled.rule = lambda method, path: (503, b"") if path[-64:] in busy else None
    assert [index for index, found in enumerate(refusing.contains(keys)) if not found] == [7, 12]
    ruled.rule = lambda method, path: (503, b"")
    raised(BackendUnavailable, "", refusing.contains, keys)


def test_a_store_that_refuses_conditions_is_told_apart(refusing: ObjectStoreBackend, ruled: RuledProxy) -> None:
    ruled.rule = lambda method, path: (501, refusal("NotImplemented")) if method == "PUT" else None
    written = refusing.write(chunk_of(100))
    assert isinstance(written.error, BackendUnavailable)
    assert "add conditional_put=disabled" in str(written.error)


def test_a_reason_is_logged_once_however_long_each_request_took(
    refusing: ObjectStoreBackend, ruled: RuledProxy, caplog: pytest.LogCaptureFixture
) -> None:
    ruled.rule = lambda method, path: (403, refusal("AccessDenied")) if method == "PUT" else None
    with closing(small_store(16, lower(refusing))) as store:
        for key in chain("refused", 4):
            put_through(store, [key])
        assert store.stats().tiers[1].write_failures == 4
    [line] = [record.getMessage() for record in caplog.records if "failed" in record.getMessage()]
    assert re.search(r"write of chunk [0-9a-f]{64} failed: PermissionDeniedError: .* for path \.\.\. Error", line)


def test_a_key_is_read_again_once_it_is_refused(tmp_path: Path) -> None:
    password = [SECRET]
    with object_server("rclone", tmp_path) as server:
        options = RemoteOptions(timeout=20.0, username=USER, password=SECRET, renew_password=lambda: password[0])
        with closing(ObjectStoreBackend(server.url(), NAMESPACE, options)) as backend:
            chunk = chunk_of(100)
            assert backend.write(chunk).status is STORED
            server.expect("another")
            assert_all_unavailable(backend, chunk)
            password[0] = "another"
            eventually(lambda: backend.read(chunk.key, memoryview(bytearray(100))).status is ReadStatus.HIT)
            with suppress(BackendUnavailable):
                listed(backend)
            assert listed(backend) == sizes_of(backend, [chunk])


def test_a_folder_whose_medium_is_gone_takes_nothing_until_it_is_back(tmp_path: Path) -> None:
    medium, kept = tmp_path / "medium", tmp_path / "kept"
    medium.mkdir()
    kept.mkdir()
    bind, leave = ["mount", "--bind", str(kept), str(medium)], ["umount", "-l", str(medium)]
    with mounted_tmpfs(kept):
        subprocess.run(bind, check=True)
        with closing(backend_of(f"file://{medium}/folder")) as backend:
            chunk = chunk_of(100)
            assert backend.write(chunk).status is STORED
            subprocess.run(leave, check=True)
            assert "the file system of the folder is no longer mounted" in assert_all_unavailable(backend, chunk)[0]
            (medium / "folder").mkdir()
            assert "is no longer on the file system" in assert_all_unavailable(backend, chunk)[0]
            assert not list((medium / "folder").iterdir())
            subprocess.run(bind, check=True)
            assert read_back(backend, chunk) == chunk.payload
            subprocess.run(leave, check=True)
