"""Chunks with a key: who may write to the medium, and knows the format, cannot change what is served."""

from __future__ import annotations

import hmac
import os
import struct
import sys
import zlib
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from attrs import frozen
from hypothesis import given, strategies as st

pytest.importorskip("cryptography")

from cryptography.hazmat.primitives.ciphers.aead import AESGCM

from lmkv import Config, Engine
from lmkv.backends.disk import LocalDiskBackend
from lmkv.backends.remote.base import RemoteOptions
from lmkv.chunks import codec
from lmkv.chunks.codec import ChunkFormat, FormatError, SegmentDigests
from lmkv.chunks.namespace import Authenticator
from lmkv.errors import ConfigError, CorruptChunkError
from lmkv.protocols import Backend, Chunk, ChunkKey, ReadStatus, WriteStatus
from lmkv.testing.backend_suite import BackendSuite, chunk_of, new_key, read_back, statuses
from tests.backends import test_backends
from tests.kit import LIMIT, raised
from tests.servers import redis_server

KEY, OTHER_KEY = b"k" * 32, b"K" * 64
NAMESPACE, OTHER_NAMESPACE = bytes(range(32)), bytes(32)
NBYTES = 3 * 4096 + 100


class TestDiskSuite(BackendSuite):
    def make(self, folder: Path) -> Backend:
        return LocalDiskBackend(folder, NAMESPACE, segment_bytes=8192, authentication_key=KEY)


class TestDiskInPiecesSuite(test_backends.TestDiskInPieces):
    def make(self, folder: Path) -> Backend:
        return LocalDiskBackend(folder, NAMESPACE, segment_bytes=4096, authentication_key=KEY)


class TestObjectsSuite(BackendSuite):
    def make(self, folder: Path) -> Backend:
        objects = pytest.importorskip("lmkv.backends.remote.objects", exc_type=ConfigError)
        backend: Backend = objects.open_url(f"file://{folder}/bucket", NAMESPACE, RemoteOptions(authentication_key=KEY))
        return backend


@pytest.fixture(scope="module", params=["valkey", "redis"])
def server_url(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    pytest.importorskip("redis")
    with redis_server(request.param, tmp_path_factory.mktemp(request.param)) as server:
        yield server.url


class TestRedisSuite(BackendSuite):
    @pytest.fixture(autouse=True)
    def _server(self, server_url: str) -> None:
        self.url = server_url

    def make(self, folder: Path) -> Backend:
        # A prefix of its own: each test begins with nothing.
        backend: Backend = redis_backend(self.url, KEY, prefix=f"{folder}:")
        return backend


def redis_backend(url: str, key: bytes | None, namespace: bytes = NAMESPACE, **options: Any) -> Any:
    from lmkv.backends.remote.redis import RedisBackend

    return RedisBackend(url, namespace, RemoteOptions(timeout=LIMIT, authentication_key=key, **options))


# -- forgeries -------------------------------------------------------------------------------------------


@frozen
class Medium:
    """`open(key, namespace)`: a backend over it. `get` and `put` are the attacker's: header and payload as they lie."""

    open: Callable[..., Backend]
    get: Callable[[ChunkKey], bytes]
    put: Callable[[ChunkKey, bytes], object]


def of_files(open_: Callable[..., Backend], path: Callable[[ChunkKey], Path], page: int = 1) -> Medium:
    """Each in a file of whole pages."""

    def put(key: ChunkKey, blob: bytes) -> None:
        path(key).parent.mkdir(exist_ok=True)
        path(key).write_bytes(blob + bytes(-len(blob) % page))

    return Medium(open_, lambda key: path(key).read_bytes()[: 4096 + NBYTES], put)


@pytest.fixture
def disk(tmp_path: Path) -> Medium:
    return of_files(
        lambda key, namespace=NAMESPACE: LocalDiskBackend(tmp_path, namespace, authentication_key=key),
        lambda key: tmp_path / NAMESPACE.hex() / key[:1].hex() / f"{key.hex()}.kv1",
        4096,
    )


@pytest.fixture
def objects(tmp_path: Path) -> Medium:
    module = pytest.importorskip("lmkv.backends.remote.objects", exc_type=ConfigError)
    return of_files(
        lambda key, namespace=NAMESPACE: module.open_url(
            f"file://{tmp_path}/bucket", namespace, RemoteOptions(authentication_key=key)
        ),
        lambda key: tmp_path / "bucket" / f"lmkv:{NAMESPACE.hex()}" / key.hex(),
    )


def field(offset: int, form: str, value: int) -> Callable[[bytes], bytes]:
    """Overwrite a number in the header."""

    def forge(blob: bytes) -> bytes:
        packed = struct.pack(form, value)
        return blob[:offset] + packed + blob[offset + len(packed) :]

    return forge


def resealed(blob: bytes) -> bytes:
    """With all checksums made right again, as docs/development/format.md says: they have no key."""
    (header_bytes,) = struct.unpack_from("<I", blob, 12)
    (segment,) = struct.unpack_from("<I", blob, 24)
    payload = blob[header_bytes:]
    sums = [zlib.crc32(payload[at : at + segment]) for at in range(0, len(payload), segment)]
    header = bytearray(blob[:header_bytes])
    struct.pack_into(f"<{len(sums)}I", header, 132, *sums)
    struct.pack_into("<I", header, header_bytes - 4, zlib.crc32(header[:-4]))
    return bytes(header) + payload


def cut(blob: bytes) -> bytes:
    return field(16, "<Q", NBYTES - 100)(blob)[:-100]


FORGERIES: dict[str, Callable[[bytes], bytes]] = {
    "a byte of the payload": lambda blob: blob[:-1] + bytes([blob[-1] ^ 1]),
    "another payload": lambda blob: blob[:4096] + os.urandom(NBYTES),
    "a shorter payload": cut,
    "without the flag": field(10, "<H", 1),
    "an unknown flag": field(10, "<H", 7),
    "without the parent": field(10, "<H", 2),
    "another parent": lambda blob: blob[:100] + bytes(32) + blob[132:],
    "another token": field(136, "<I", 7),
    "fewer tokens": field(32, "<I", 8),
    "another salt": lambda blob: blob[:200] + bytes(32) + blob[232:],
    "no tag of the segment": lambda blob: blob[:232] + bytes(16) + blob[248:],
    "no tag of the header": lambda blob: blob[:4060] + bytes(32) + blob[4092:],
}


@pytest.fixture
def redis(server_url: str) -> Medium:
    from redis import Redis

    client = Redis.from_url(server_url)

    def name(key: ChunkKey) -> str:
        return f"lmkv:{NAMESPACE.hex()}/{key.hex()}"

    return Medium(
        open=lambda key, namespace=NAMESPACE: redis_backend(server_url, key, namespace),
        get=lambda key: bytes(client.get(name(key))),  # type: ignore[arg-type]
        put=lambda key, blob: client.set(name(key), blob),
    )


def refuses_what_is_forged(medium: Medium) -> None:
    """By an attacker in the medium, and by engines without a key or with another one, however valid it is."""
    for what, forgery in FORGERIES.items():
        backend, chunk = medium.open(KEY), chunk_of(NBYTES)
        assert backend.write(chunk).status is WriteStatus.STORED
        sound = medium.get(chunk.key)
        assert resealed(sound) == sound
        medium.put(chunk.key, resealed(forgery(sound)))
        assert_refused_and_replaced(backend, chunk, what)
    for key in (None, OTHER_KEY):
        forger, forged = medium.open(key), chunk_of(NBYTES)
        assert forger.write(forged).status is WriteStatus.STORED
        assert read_back(forger, forged) == forged.payload
        forger.close()
        assert_refused_and_replaced(medium.open(KEY), chunk_of(NBYTES, forged.key), "the format is right in every byte")
    # One authentication key signs both values, and each is genuine only where its writer put it.
    elsewhere = ChunkFormat(OTHER_NAMESPACE, authenticator=Authenticator(KEY))
    values: dict[str, Callable[[Chunk, Chunk], bytes]] = {
        "another's": lambda chunk, other: medium.get(other.key),
        "another namespace's": lambda chunk, other: blob_of(
            elsewhere, Chunk(chunk.key, other.payload, other.parent, other.tokens)
        ),
        "another's payload": lambda chunk, other: resealed(medium.get(chunk.key)[:4096] + medium.get(other.key)[4096:]),
    }
    for what, value in values.items():
        backend, chunk, other = medium.open(KEY), chunk_of(NBYTES), chunk_of(NBYTES)
        assert statuses(backend, [chunk, other]) == [WriteStatus.STORED] * 2
        medium.put(chunk.key, value(chunk, other))
        assert_refused_and_replaced(backend, chunk, what)


@pytest.mark.parametrize("kind", ["disk", "objects"])
def test_a_forged_file_is_a_corrupt_one_and_can_be_replaced(kind: str, request: pytest.FixtureRequest) -> None:
    refuses_what_is_forged(request.getfixturevalue(kind))


def test_a_forged_value_is_a_corrupt_one_and_can_be_replaced(redis: Medium) -> None:
    refuses_what_is_forged(redis)


def assert_refused_and_replaced(backend: Backend, chunk: Chunk, what: str) -> None:
    read = backend.read(chunk.key, memoryview(bytearray(len(chunk.payload))))
    assert read.status is ReadStatus.FAILED, what
    assert isinstance(read.error, CorruptChunkError)
    backend.delete([chunk.key])
    assert backend.write(chunk).status is WriteStatus.STORED
    assert read_back(backend, chunk) == chunk.payload
    backend.close()


def test_a_forgery_in_the_place_of_a_file_does_not_count_as_present(disk: Medium) -> None:
    """Its header is enough to know."""
    backend, chunk = disk.open(KEY), chunk_of(NBYTES)
    disk.open(None).write(chunk_of(NBYTES, chunk.key))
    assert backend.write(chunk).status is WriteStatus.STORED
    assert read_back(backend, chunk) == chunk.payload


# -- any change ------------------------------------------------------------------------------------------

FORMAT = ChunkFormat(NAMESPACE, segment_bytes=4096, authenticator=Authenticator(KEY))
CHUNK = Chunk(bytes(32), memoryview(bytes(range(256)) * 40), b"p" * 32, bytes(64))


def blob_of(chunk_format: ChunkFormat, chunk: Chunk) -> bytes:
    packed = memoryview(bytearray(chunk_format.header_bytes(len(chunk.payload))))
    checks = SegmentDigests(chunk.key, chunk_format)
    checks.add(chunk.payload)
    chunk_format.pack(packed, checks, len(chunk.payload), chunk.parent, chunk.tokens)
    return bytes(packed) + bytes(chunk.payload)


BLOB = blob_of(FORMAT, CHUNK)


def served(blob: bytes, key: ChunkKey = CHUNK.key) -> bytes:
    """The payload, by the key and the format alone. Raises FormatError."""
    data = memoryview(blob)
    header = FORMAT.parse(key, data)
    payload = data[header.header_bytes :]
    if len(payload) != header.payload_bytes:
        raise FormatError("another length")
    FORMAT.verify(header, payload)
    return bytes(payload)


@given(st.lists(st.tuples(st.integers(0, len(BLOB) - 1), st.integers(1, 255)), min_size=1, max_size=4))
def test_whatever_bytes_are_changed_and_checksums_made_right_it_is_refused(changes: list[tuple[int, int]]) -> None:
    assert served(BLOB) == CHUNK.payload
    blob = bytearray(BLOB)
    for at, flips in changes:
        blob[at] ^= flips
    for forged in (bytes(blob), resealed_if_possible(bytes(blob))):
        if forged != BLOB:
            raised(FormatError, "", served, forged)


def resealed_if_possible(blob: bytes) -> bytes:
    """Where the changed lengths leave anything to seal."""
    try:
        return resealed(blob)
    except (struct.error, ValueError):
        return blob


@given(
    key=st.one_of(st.none(), st.binary(min_size=32, max_size=40).filter(lambda key: key != KEY)),
    payload=st.binary(min_size=1, max_size=9000),
    segment=st.sampled_from([4096, 8192, codec.DEFAULT_SEGMENT_BYTES]),
)
def test_nothing_that_is_made_without_the_key_is_served(key: bytes | None, payload: bytes, segment: int) -> None:
    forger = ChunkFormat(NAMESPACE, segment, authenticator=Authenticator.of(key))
    with pytest.raises(FormatError, match="authentication key"):
        served(blob_of(forger, Chunk(CHUNK.key, memoryview(payload), CHUNK.parent, CHUNK.tokens)))


def test_each_file_has_tags_of_its_own() -> None:
    """AES-GMAC gives its key away when a key and a number are used for two segments."""
    again = blob_of(FORMAT, CHUNK)
    one, two = (FORMAT.parse(CHUNK.key, memoryview(blob)) for blob in (BLOB, again))
    assert one.salt != two.salt
    assert not set(tags_in(one.tags)) & set(tags_in(two.tags))
    alike = blob_of(FORMAT, Chunk(CHUNK.key, memoryview(bytes(3 * 4096))))
    assert len(set(tags_in(FORMAT.parse(CHUNK.key, memoryview(alike)).tags))) == 3, "equal segments, other numbers"
    # Where randomness fails, as in a machine that was copied while it ran, keys still differ from chunk to chunk.
    of_segments, payload = Authenticator(KEY).of_segments, memoryview(bytes(100))
    assert of_segments(bytes(32), bytes(32), payload, 4096) != of_segments(bytes(32), b"k" * 32, payload, 4096)


def tags_in(joined: bytes) -> list[bytes]:
    return [joined[at : at + 16] for at in range(0, len(joined), 16)]


# -- keys ------------------------------------------------------------------------------------------------


def test_the_derivation_is_the_documented_one() -> None:
    def derived(purpose: bytes) -> bytes:
        return hmac.new(KEY, b"lmkv authentication " + purpose, "sha256").digest()

    header, payload = BLOB[: FORMAT.header_bytes(len(CHUNK.payload))], bytes(CHUNK.payload)
    salt = header[132 + 12 + 64 :][:32]
    of_file = AESGCM(hmac.new(derived(b"segment"), salt + CHUNK.key, "sha256").digest())
    parts = (payload[at : at + 4096] for at in (0, 4096, 8192))
    tags = [of_file.encrypt(struct.pack("<QI", number, 0), b"", part) for number, part in enumerate(parts)]
    assert struct.unpack_from("<H", header, 10) == (3,)
    assert header[132 + 12 + 64 + 32 :][: 3 * 16] == b"".join(tags)
    assert header[-36:-4] == hmac.new(derived(b"header"), header[:-36], "sha256").digest()
    assert header[-4:] == struct.pack("<I", zlib.crc32(header[:-4]))
    assert Authenticator(KEY).identifier == derived(b"identifier").hex()


@pytest.mark.parametrize("key", [b"", b"short", b"k" * 31])
def test_a_short_key_is_refused(tmp_path: Path, key: bytes) -> None:
    raised(ConfigError, "32 bytes", LocalDiskBackend, tmp_path, NAMESPACE, authentication_key=key)


def test_without_cryptography_it_says_what_to_install(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "cryptography.hazmat.primitives.ciphers.aead", None)
    missing = r"need the package cryptography: .*\bauth\b"
    raised(ConfigError, missing, LocalDiskBackend, tmp_path, NAMESPACE, authentication_key=KEY)
    assert LocalDiskBackend(tmp_path, NAMESPACE).contains([]) == []


def test_no_repr_has_the_key(tmp_path: Path) -> None:
    backend = LocalDiskBackend(tmp_path, NAMESPACE, authentication_key=b"secret" * 6)
    assert "secret" not in repr((Authenticator(b"secret" * 6), backend, backend._files))


def test_without_a_key_nothing_changes() -> None:
    """The same bytes as before there were keys, and no more of them."""
    plain = ChunkFormat(NAMESPACE, segment_bytes=4096)
    assert struct.unpack_from("<H", blob_of(plain, CHUNK), 10) == (1,)
    assert plain.header_bytes(NBYTES) == codec.header_bytes(NBYTES, 4096, 512)
    assert plain.parse(CHUNK.key, memoryview(blob_of(plain, CHUNK))).tags == b""


def test_checksums_can_be_checked_without_the_key() -> None:
    """As `lmkv inspect --verify` does."""
    header = codec.parse_header(memoryview(BLOB))
    codec.verify_segments(header, CHUNK.payload)
    broken = bytearray(CHUNK.payload)
    broken[5000] ^= 1
    raised(FormatError, "segment 1 ", codec.verify_segments, header, memoryview(broken))


def test_keys_of_one_namespace_make_other_files_than_those_of_another(tmp_path: Path) -> None:
    key, mine = new_key(), LocalDiskBackend(tmp_path, NAMESPACE, authentication_key=KEY)
    assert mine.write(chunk_of(100, key)).status is WriteStatus.STORED
    assert LocalDiskBackend(tmp_path, OTHER_NAMESPACE, authentication_key=OTHER_KEY).contains([key]) == [False]


# -- engines ---------------------------------------------------------------------------------------------

TOKENS, BLOCK_IDS = range(16), [0, 1, 2, 3]


def settings_of(tier: str, folder: Path) -> dict[str, object]:
    if tier == "objects":
        pytest.importorskip("lmkv.backends.remote.objects", exc_type=ConfigError)
        return {"remote_url": f"file://{folder}/bucket", "remote_timeout": LIMIT}
    if tier == "shared_memory":
        return {"shared_memory": str(folder / "kv"), "max_shared_memory_size": 0.1}
    return {"local_disk": str(folder / "kv"), "max_local_disk_size": 0.1, "disk_min_free": 0}


def open_engine(folder: Path, tier: str = "disk", **settings: object) -> Engine:
    tensors = [torch.arange(32 * 4 * 16).float().reshape(32, 4, 2, 8)]
    below = settings_of(tier, folder)
    config = Config(chunk_size=16, max_local_cpu_size=0.001, **below, **settings)  # type: ignore[arg-type]
    engine = Engine.open(tensors, block_size=4, model="keyed", config=config)
    assert engine.wait_indexed(LIMIT)
    return engine


@pytest.mark.parametrize("tier", ["disk", "shared_memory", "objects"])
def test_engines_with_other_keys_never_meet(tmp_path: Path, tier: str) -> None:
    (tmp_path / "key").write_bytes(b"k" * 32 + b"\n")
    with open_engine(tmp_path, tier, authentication_key="k" * 32) as engine:
        assert engine.store(TOKENS, BLOCK_IDS) == 16
        assert engine.drain(LIMIT)
    for settings, found in (
        ({}, 0),
        ({"authentication_key": "K" * 32}, 0),
        ({"authentication_key": "k" * 33}, 0),
        ({"authentication_key": "k" * 32}, 16),
        ({"authentication_key_file": str(tmp_path / "key")}, 16),
    ):
        with open_engine(tmp_path, tier, **settings) as engine:
            assert engine.lookup(TOKENS, timeout=LIMIT) == found, settings
            assert engine.retrieve(TOKENS, BLOCK_IDS) == found
            assert engine.stats().store.tiers[1].read_failures == 0
