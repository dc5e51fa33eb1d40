"""Namespaces and roots: fixed digests, and that no two descriptions share one."""

from __future__ import annotations

import hashlib
import itertools
import pickle
from typing import Any

import pytest
from attrs import evolve, fields
from attrs.exceptions import FrozenInstanceError

from lmkv.chunks.hashing import KEY_BYTES
from lmkv.chunks.namespace import FORMAT_VERSION, Namespace, canonical
from lmkv.errors import UsageError

PLAIN = Namespace(model="m", dtype="bfloat16", chunk_size=256, block_size=16)


def framed(tag: bytes, content: bytes) -> bytes:
    return tag + len(content).to_bytes(8, "little") + content


def text(value: str) -> bytes:
    return framed(b"s", value.encode())


def number(value: int) -> bytes:
    return framed(b"i", str(value).encode())


def test_the_digest_is_the_documented_hash() -> None:
    """The encoding written out by hand: whoever changes it has to raise FORMAT_VERSION."""
    items = [
        text("model") + text("m"),
        text("dtype") + text("bfloat16"),
        text("chunk_size") + number(256),
        text("block_size") + number(16),
        text("revision") + text(""),
        text("kv_cache_dtype") + text("auto"),
        text("layout") + text(""),
        text("ranks") + text("tp1/pp1"),
        text("extra") + framed(b"t", b""),
        text("format") + number(1),
    ]
    encoded = b"lmkv namespace\0" + framed(b"m", b"".join(sorted(items)))
    assert PLAIN.digest == hashlib.sha256(encoded).digest()


def test_golden_digests() -> None:
    assert FORMAT_VERSION == 1
    assert PLAIN.digest.hex() == "eb1ea7b34dd4b2b32571d1939809f20a9d875a5aad679c5c83049601c29df128"
    assert (
        PLAIN.root("salt", ("name", "path"), {"mm": b"\x00", "z": "é"}).hex()
        == "c8f2bd5d37b25c04de5ce28885dd8002d9cd35aca17d342897d26663ffa52188"
    )


@pytest.mark.parametrize(
    "change",
    [
        {"model": "m2"},
        {"revision": "r"},
        {"dtype": "float16"},
        {"kv_cache_dtype": "fp8"},
        {"chunk_size": 128},
        {"block_size": 32},
        {"layout": "NHD"},
        {"ranks": "tp2/pp1"},
        {"extra": {"isa": "avx512"}},
    ],
    ids=lambda change: next(iter(change)),
)
def test_every_field_changes_the_digest(change: dict[str, Any]) -> None:
    assert evolve(PLAIN, **change).digest != PLAIN.digest


def test_the_changes_above_cover_every_field() -> None:
    assert len(fields(Namespace)) == 9


def test_the_format_version_changes_the_digest(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("lmkv.chunks.namespace.FORMAT_VERSION", FORMAT_VERSION + 1)
    assert evolve(PLAIN).digest != PLAIN.digest


def test_the_order_of_extra_does_not_matter() -> None:
    one = evolve(PLAIN, extra={"a": "1", "b": "2"})
    other = evolve(PLAIN, extra={"b": "2", "a": "1"})
    assert one == other
    assert one.digest == other.digest
    assert one.extra == (("a", "1"), ("b", "2"))


def test_moving_text_between_fields_changes_the_digest() -> None:
    splits = [("ab", ""), ("a", "b"), ("", "ab"), ("ab\0", ""), ("ab", "\0")]
    digests = {evolve(PLAIN, model=model, revision=revision).digest for model, revision in splits}
    assert len(digests) == len(splits)


def test_a_namespace_is_a_frozen_value() -> None:
    again = pickle.loads(pickle.dumps(PLAIN))
    assert again == PLAIN
    assert again.digest == PLAIN.digest
    assert hash(evolve(PLAIN)) == hash(PLAIN)
    with pytest.raises(FrozenInstanceError):
        PLAIN.model = "other"  # type: ignore[misc]


@pytest.mark.parametrize(
    ("name", "bad"),
    [
        ("model", None),
        ("revision", b"bytes"),
        ("dtype", 16),
        ("chunk_size", 0),
        ("chunk_size", True),
        ("block_size", "16"),
        ("extra", {"a": 1}),
        ("extra", {1: "a"}),
    ],
)
def test_a_field_of_another_type_is_refused_by_name(name: str, bad: Any) -> None:
    with pytest.raises(UsageError, match=name):
        evolve(PLAIN, **{name: bad})


def test_a_plain_request_has_the_digest_for_a_root() -> None:
    assert PLAIN.root() == PLAIN.digest
    assert PLAIN.root(None, None, {}) == PLAIN.digest
    assert len(PLAIN.root()) == KEY_BYTES


def test_no_two_requests_share_a_root() -> None:
    """One string in every role, empty strings, and strings that spell out separators or other encodings."""
    nasty = ["", "x", "x\0", "None", "s\x01\0\0\0\0\0\0\0x", "cache_salt", "lora", "é", "\ud800"]
    roots = [PLAIN.root()]
    roots += [PLAIN.root(cache_salt=word) for word in nasty]
    roots += [PLAIN.root(lora=pair) for pair in itertools.product(nasty, nasty)]
    roots += [PLAIN.root(extra={key: word}) for key, word in itertools.product(nasty, nasty)]
    roots += [PLAIN.root(extra={word: word.encode("utf-8", "surrogatepass")}) for word in nasty]
    roots += [PLAIN.root(cache_salt="x", lora=("x", "x")), PLAIN.root(extra={"x": "x", "x\0": "x"})]
    assert len(set(roots)) == len(roots)
    assert {len(root) for root in roots} == {KEY_BYTES}


def test_roots_of_different_namespaces_differ() -> None:
    other = evolve(PLAIN, revision="2")
    assert other.root(cache_salt="x") != PLAIN.root(cache_salt="x")


def test_the_order_of_a_roots_extra_does_not_matter() -> None:
    assert PLAIN.root(extra={"a": "1", "b": b"2"}) == PLAIN.root(extra={"b": b"2", "a": "1"})


@pytest.mark.parametrize("value", [1.0, True, ["a"], object(), {"a": {1.5}}, ("a", [])])
def test_what_has_no_canonical_encoding_is_refused(value: object) -> None:
    with pytest.raises(UsageError, match="a key cannot be made of"):
        canonical(value)
