"""Under a chunk's name lies something else: in every lower tier, before engines that load it.

It is never served and ends nobody. Once the chunk is stored again it is served again. Each kind lies under the name of
a chunk of its own prompt.
"""

from __future__ import annotations

import struct
import zlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from redis import Redis

from lmkv import Config, Engine
from tests.kit import LIMIT
from tests.servers import RedisServer, needs_package, redis_server
from tests.test_engine import BLOCK, CHUNK, Model, blocks_of, tokens

needs_package("obstore", "pip install 'lmkv[s3]'")
needs_package("cryptography", "pip install 'lmkv[auth]'")


class Place:
    """A lower tier of files, and what lies in it by name."""

    def __init__(self, folder: Path, **options: Any) -> None:
        self.model = Model()
        self.folder, self.options = folder, options

    def all(self) -> dict[str, bytes]:
        files = [path for path in self.folder.rglob("*") if path.is_file() and _is_chunk(path)]
        return {str(path): path.read_bytes() for path in sorted(files)}

    def put(self, name: str, value: bytes) -> None:
        Path(name).write_bytes(value)

    def engine(self, model: str = "mine", **options: Any) -> Engine:
        config = Config(chunk_size=CHUNK, max_local_cpu_size=0.001, **self.options | options)
        engine = Engine.open(self.model.tensors, block_size=BLOCK, block_axis=1, model=model, config=config)
        assert engine.wait_indexed(LIMIT)
        return engine

    def store(self, engine: Engine, prompt: list[int]) -> dict[str, bytes]:
        """What is new in the tier."""
        before = self.all()
        blocks = blocks_of(len(prompt))
        self.model.compute(prompt, blocks)
        assert engine.store(prompt, blocks, wait=LIMIT) == len(prompt)
        assert engine.drain(LIMIT)
        return {name: value for name, value in self.all().items() if name not in before}

    def load(self, engine: Engine, prompt: list[int]) -> int:
        """How many tokens came back; all of them are right."""
        self.model.lose()
        blocks = blocks_of(len(prompt))
        count = engine.retrieve(prompt, blocks)
        self.model.check(prompt, blocks, count)
        return count


def _is_chunk(path: Path) -> bool:
    return len(path.name.removesuffix(".kv1")) == 64 and path.parent.name != "quarantine"


class RedisPlace(Place):
    def __init__(self, server: RedisServer) -> None:
        super().__init__(server.folder, remote_url=server.url)
        self.client: Any = Redis(port=server.port)

    def all(self) -> dict[str, bytes]:
        return {name.decode(): self.client.get(name) for name in sorted(self.client.keys())}

    def put(self, name: str, value: bytes) -> None:
        self.client.set(name, value)


@pytest.fixture(params=["local_disk", "shared_memory", "file", "redis"])
def place(request: pytest.FixtureRequest, tmp_path: Path, memory_path: Path) -> Iterator[Place]:
    match request.param:
        case "local_disk":
            yield Place(tmp_path, local_disk=str(tmp_path / "kv"), max_local_disk_size=0.01, disk_min_free=0)
        case "shared_memory":
            yield Place(memory_path, shared_memory=str(memory_path / "kv"), max_shared_memory_size=0.01)
        case "file":
            yield Place(tmp_path, remote_url=f"file://{tmp_path}/kv")
        case _:
            with redis_server("redis", tmp_path) as server:
                yield RedisPlace(server)


def changed(value: bytes, at: int, form: str, number: int) -> bytes:
    """With another number in its header, whose checksum is right again."""
    data = bytearray(value)
    (header,) = struct.unpack_from("<I", value, 12)
    struct.pack_into(form, data, at, number)
    struct.pack_into("<I", data, header - 4, zlib.crc32(data[: header - 4]))
    return bytes(data)


def damaged(own: bytes, other: bytes) -> dict[str, bytes]:
    (header,) = struct.unpack_from("<I", own, 12)
    flipped = bytearray(own)
    flipped[header + 5] ^= 4
    return {
        "nothing": b"",
        "cut in its header": own[:100],
        "cut in its payload": own[: header + 1],
        "longer": own + bytes(4096),
        "a flipped bit": bytes(flipped),
        "another chunk": other,
        "another header": other[:header] + own[header:],
        "another payload": own[:header] + other[header:],
        "an older version": changed(own, 8, "<H", 0),
        "another namespace": changed(own, 36, "<Q", 0),
        "another length": changed(own, 16, "<Q", len(own) - header - 1),
        "an endless length": changed(own, 16, "<Q", (1 << 64) - 1),
        "endless tokens": changed(own, 32, "<I", (1 << 32) - 1),
        "an unknown flag": changed(own, 10, "<H", own[10] | 32),
    }


@pytest.mark.parametrize("authenticated", [False, True], ids=["plain", "authenticated"])
def test_what_lies_under_a_name_is_the_chunk_or_a_miss(place: Place, tmp_path: Path, authenticated: bool) -> None:
    keys = {letter: tmp_path / letter for letter in "ab"}
    for letter, path in keys.items():
        path.write_text(letter * 64)
    others: list[dict[str, Any]] = [{"model": "another"}, {"authentication_key_file": str(keys["b"])}]
    if authenticated:
        place.options["authentication_key_file"] = str(keys["a"])
        others.append({"authentication_key_file": None})
    planted = {}  # what: the prompt, and the value that is put under the name of one of its chunks
    for other, options in enumerate(others):
        with place.engine(**options) as engine:
            for index in range(2):
                prompt = tokens(2 * CHUNK, len(planted))
                planted[f"other {other}, {index}"] = prompt, list(place.store(engine, prompt).values())[index]
    with place.engine() as engine:
        own = [*place.store(engine, tokens(2 * CHUNK, len(planted))).values()]
        for kind in damaged(*own):
            prompt = tokens(2 * CHUNK, len(planted) + 1)
            (name, value), (_, beside) = place.store(engine, prompt).items()
            planted[kind] = prompt, damaged(value, beside)[kind]
            place.put(name, planted[kind][1])
        for kind in [kind for kind in planted if kind.startswith("other")]:
            name = min(place.store(engine, planted[kind][0]))
            place.put(name, planted[kind][1])
    with place.engine() as engine:
        for kind, (prompt, _) in planted.items():
            assert place.load(engine, prompt) < len(prompt), kind
            place.store(engine, prompt)
        assert engine.stats().store.tiers[1].read_failures >= len(planted) - len(others) * 2
    with place.engine() as engine:
        for kind, (prompt, _) in planted.items():
            assert place.load(engine, prompt) == len(prompt), f"{kind}: it was stored again"
