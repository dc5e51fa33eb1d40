"""Namespaces and roots: fixed digests, and that no two descriptions share one."""

from __future__ import annotations

import hashlib
import itertools
import pickle
from typing import Any

import pytest
from attrs import evolve, fields
from attrs.exceptions import FrozenInstanceError
from hypothesis import example, given, strategies as st

from lmkv.chunks.hashing import KEY_BYTES
from lmkv.chunks.namespace import FORMAT_VERSION, Namespace, canonical
from lmkv.errors import UsageError
from tests.tables import every, raised

PLAIN = Namespace(model="m", dtype="bfloat16", chunk_size=256, block_size=16)


def framed(tag: bytes, content: bytes) -> bytes:
    return tag + len(content).to_bytes(8, "little") + content


def text(value: str) -> bytes:
    return framed(b"s", value.encode())


def number(value: int) -> bytes:
    return framed(b"i", str(value).encode())


def test_the_digest_is_the_documented_hash() -> None:
    """The encoding written out by hand: whoever changes it has to raise FORMAT_VERSION."""
    texts = {"model": "m", "dtype": "bfloat16", "revision": "", "kv_cache_dtype": "auto", "layout": ""}
    texts["ranks"] = "tp1/pp1"
    numbers = {"chunk_size": 256, "block_size": 16, "format": 1}
    items = [text(name) + text(value) for name, value in texts.items()]
    items += [text(name) + number(value) for name, value in numbers.items()] + [text("extra") + framed(b"t", b"")]
    encoded = b"lmkv namespace\0" + framed(b"m", b"".join(sorted(items)))
    assert PLAIN.digest == hashlib.sha256(encoded).digest()


def test_golden_digests() -> None:
    assert FORMAT_VERSION == 1
    assert PLAIN.digest.hex() == "eb1ea7b34dd4b2b32571d1939809f20a9d875a5aad679c5c83049601c29df128"
    assert (
        PLAIN.root("salt", ("name", "path"), {"mm": b"\x00", "z": "é"}).hex()
        == "c8f2bd5d37b25c04de5ce28885dd8002d9cd35aca17d342897d26663ffa52188"
    )


CHANGED: dict[str, Any] = {
    "model": "m2", "revision": "r", "dtype": "float16", "kv_cache_dtype": "fp8", "chunk_size": 128, "block_size": 32,
    "layout": "NHD", "ranks": "tp2/pp1", "extra": {"isa": "avx512"},
}  # fmt: skip


def test_every_field_changes_the_digest() -> None:
    assert {field.name for field in fields(Namespace)} == {*CHANGED}
    assert [name for name, value in CHANGED.items() if evolve(PLAIN, **{name: value}).digest == PLAIN.digest] == []
    assert evolve(PLAIN, revision="2").root(cache_salt="x") != PLAIN.root(cache_salt="x")


def test_the_order_of_extra_does_not_matter() -> None:
    one, other = (evolve(PLAIN, extra=dict(items)) for items in ([("a", "1"), ("b", "2")], [("b", "2"), ("a", "1")]))
    assert one == other
    assert one.digest == other.digest
    assert one.extra == (("a", "1"), ("b", "2"))
    assert PLAIN.root(extra={"a": "1", "b": b"2"}) == PLAIN.root(extra={"b": b"2", "a": "1"})


def test_the_format_version_changes_the_digest(monkeypatch: pytest.MonkeyPatch) -> None:
    before = PLAIN.digest
    monkeypatch.setattr("lmkv.chunks.namespace.FORMAT_VERSION", FORMAT_VERSION + 1)
    assert evolve(PLAIN).digest != before


def test_a_namespace_is_a_frozen_value() -> None:
    again = pickle.loads(pickle.dumps(PLAIN))
    assert again == PLAIN
    assert again.digest == PLAIN.digest
    assert hash(evolve(PLAIN)) == hash(PLAIN)
    with pytest.raises(FrozenInstanceError):
        PLAIN.model = "other"  # type: ignore[misc]


def test_a_field_of_another_type_is_refused_by_name() -> None:
    bad: dict[str, list[Any]] = {
        "model": [None], "revision": [b"bytes"], "dtype": [16], "chunk_size": [0, True], "block_size": ["16"],
        "extra": [{"a": 1}, {1: "a"}],
    }  # fmt: skip
    every(
        [(name, value) for name, values in bad.items() for value in values],
        lambda name, value: raised(UsageError, name, evolve, PLAIN, **{name: value}),
    )


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
    assert PLAIN.root() == PLAIN.root(None, None, {}) == PLAIN.digest


def test_what_has_no_canonical_encoding_is_refused() -> None:
    for value in (1.0, True, ["a"], object(), {"a": {1.5}}, ("a", [])):
        raised(UsageError, "a chunk key is made of", canonical, value)


# -- any values, requests and namespaces -----------------------------------------------------------------------

# Characters that an encoding might use for itself, and what UTF-8 treats specially.
texts = st.text(st.sampled_from("\0\1\nabns:;=,\\é\ud800\udc00😀"), max_size=5) | st.text(max_size=5)
values = st.recursive(
    st.none() | st.integers() | texts | st.binary(max_size=5),
    lambda inner: st.lists(inner, max_size=3).map(tuple) | st.dictionaries(texts, inner, max_size=3),
    max_leaves=6,
)


@given(values, values)
@example("a", b"a")
@example((), {})
@example(("a", "b"), {"a": "b"})
@example(1, "1")
@example({"a": "b", "c": "d"}, {"a": "bc", "": "d"})
@example("\ud83d\ude00", "😀")
def test_the_canonical_encoding_is_injective(one: object, other: object) -> None:
    assert (canonical(one) == canonical(other)) == (one == other)


@given(values)
def test_the_canonical_encoding_can_be_read_back(value: object) -> None:
    """The strongest form of injectivity: an independent decoder returns the value, types included."""
    decoded, rest = decode(canonical(value))
    assert rest == b""
    assert decoded == value


def decode(data: bytes) -> tuple[Any, bytes]:
    tag, length = data[:1], int.from_bytes(data[1:9], "little")
    content, rest = data[9 : 9 + length], data[9 + length :]
    if tag == b"n":
        return None, rest
    if tag == b"i":
        return int(content), rest
    if tag == b"s":
        return content.decode("utf-8", "surrogatepass"), rest
    if tag == b"b":
        return content, rest
    items: list[Any] = []
    while content:
        item, content = decode(content)
        items.append(item)
    return (tuple(items) if tag == b"t" else dict(zip(items[::2], items[1::2], strict=True))), rest


root_arguments = st.fixed_dictionaries(
    {},
    optional={
        "cache_salt": st.none() | texts,
        "lora": st.none() | st.tuples(texts, texts),
        "extra": st.dictionaries(texts, texts | st.binary(max_size=5), max_size=2),
    },
)
DEFAULTS: dict[str, Any] = {"cache_salt": None, "lora": None, "extra": {}}


@given(root_arguments, root_arguments)
@example({"cache_salt": ""}, {})
@example({"cache_salt": "x"}, {"lora": ("x", "")})
@example({"lora": ("ab", "c")}, {"lora": ("a", "bc")})
@example({"cache_salt": "x"}, {"extra": {"cache_salt": "x"}})
@example({"extra": {"a": "b"}}, {"extra": {"a": b"b"}})
def test_roots_are_equal_only_for_equal_requests(one: dict[str, Any], other: dict[str, Any]) -> None:
    space = Namespace(model="m", dtype="d", chunk_size=4, block_size=4)
    same = DEFAULTS | one == DEFAULTS | other
    assert (space.root(**one) == space.root(**other)) == same


counts, extras = st.integers(1, 3), st.dictionaries(texts, texts, max_size=2)
namespaces = st.builds(
    Namespace, model=texts, dtype=texts, chunk_size=counts, block_size=counts, revision=texts, kv_cache_dtype=texts,
    layout=texts, ranks=texts, extra=extras,
)  # fmt: skip


@given(namespaces, namespaces, texts)
@example(evolve(PLAIN, model="ab"), evolve(PLAIN, model="a", revision="b"), "")
@example(evolve(PLAIN, model="ab"), evolve(PLAIN, model="", revision="ab"), "")
@example(evolve(PLAIN, model="ab\0"), evolve(PLAIN, model="ab", revision="\0"), "")
def test_namespaces_never_share_a_digest_or_root(one: Namespace, other: Namespace, salt: str) -> None:
    assert (one.digest == other.digest) == (one == other)
    assert (one.root(salt) == other.root(salt)) == (one == other)


@given(namespaces, st.permutations(["model", "dtype", "revision", "kv_cache_dtype", "layout", "ranks"]))
def test_exchanging_two_fields_changes_the_digest(space: Namespace, names: list[str]) -> None:
    first, second = names[:2]
    swapped = evolve(space, **{first: getattr(space, second), second: getattr(space, first)})
    assert (swapped.digest == space.digest) == (getattr(space, first) == getattr(space, second))
