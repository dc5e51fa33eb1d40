"""Laws of chunk keys, for any tokens, chunk size, extras and split of the input."""

from __future__ import annotations

import hashlib
import struct
from array import array
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from attrs import evolve
from hypothesis import example, given, strategies as st

from lmkv.chunks.hashing import KeyChain, chunk_keys, token_bytes
from lmkv.chunks.namespace import Namespace, canonical
from lmkv.errors import UsageError

token_ids = st.one_of(st.integers(0, 3), st.integers(0, 2**32 - 1))
token_lists = st.lists(token_ids, max_size=80)
chunk_sizes = st.integers(1, 12)
digests = st.binary(min_size=32, max_size=32)
extras_maps = st.dictionaries(st.integers(0, 12), digests, max_size=4)

# Characters that an encoding might use for itself, and what UTF-8 treats specially.
texts = st.text(st.sampled_from("\0\1\nabns:;=,\\é\ud800\udc00😀"), max_size=5) | st.text(max_size=5)
values = st.recursive(
    st.none() | st.integers() | texts | st.binary(max_size=5),
    lambda inner: st.lists(inner, max_size=3).map(tuple) | st.dictionaries(texts, inner, max_size=3),
    max_leaves=6,
)

FORMS: dict[str, Callable[[list[int]], Any]] = {
    "tuple": tuple,
    "array I": lambda tokens: array("I", tokens),
    "array q": lambda tokens: array("q", tokens),
    "numpy int64": lambda tokens: np.array(tokens, dtype=np.int64),
    "numpy uint32": lambda tokens: np.array(tokens, dtype=np.uint32),
    "numpy strided": lambda tokens: np.array(tokens, dtype=np.int64).repeat(3)[::3],
    "torch int64": lambda tokens: torch.tensor(tokens, dtype=torch.int64),
    "torch strided": lambda tokens: torch.tensor(tokens, dtype=torch.int64).repeat_interleave(2)[::2],
}


def naive_keys(tokens: list[int], root: bytes, chunk_size: int, extras: dict[int, bytes]) -> list[bytes]:
    """The definition: every key hashed from its (new) root's first token on, nothing carried over."""
    keys: list[bytes] = []
    first = 0
    for chunk in range(len(tokens) // chunk_size):
        if chunk in extras:
            before = keys[-1] if keys else root
            root = hashlib.sha256(b"lmkv extras\0" + before + extras[chunk]).digest()
            first = chunk * chunk_size
        span = tokens[first : (chunk + 1) * chunk_size]
        keys.append(hashlib.sha256(root + b"".join(struct.pack("<I", token) for token in span)).digest())
    return keys


@given(token_lists, digests, chunk_sizes, extras_maps)
def test_keys_are_the_definition(tokens: list[int], root: bytes, chunk_size: int, extras: dict[int, bytes]) -> None:
    assert chunk_keys(tokens, root, chunk_size, extras) == naive_keys(tokens, root, chunk_size, extras)


@given(token_lists, st.lists(token_ids, max_size=20), digests, chunk_sizes)
def test_an_equal_prefix_gives_equal_keys_and_a_tail_never_matters(
    tokens: list[int], more: list[int], root: bytes, chunk_size: int
) -> None:
    keys = chunk_keys(tokens, root, chunk_size)
    assert len(keys) == len(tokens) // chunk_size
    assert chunk_keys(tokens + more, root, chunk_size)[: len(keys)] == keys
    assert chunk_keys(tokens[: len(keys) * chunk_size], root, chunk_size) == keys


@given(st.data(), digests, chunk_sizes, extras_maps)
def test_a_changed_token_changes_its_key_and_all_after_it_and_none_before(
    data: st.DataObject, root: bytes, chunk_size: int, extras: dict[int, bytes]
) -> None:
    tokens = data.draw(st.lists(token_ids, min_size=1, max_size=80))
    at = data.draw(st.integers(0, len(tokens) - 1))
    other = data.draw(token_ids.filter(lambda token: token != tokens[at]))
    before = chunk_keys(tokens, root, chunk_size, extras)
    after = chunk_keys([*tokens[:at], other, *tokens[at + 1 :]], root, chunk_size, extras)
    changed = at // chunk_size
    assert after[:changed] == before[:changed]
    assert not set(after[changed:]) & set(before[changed:])


@given(token_lists, digests, chunk_sizes, extras_maps, st.lists(st.integers(0, 80), max_size=12))
def test_any_split_of_the_input_gives_the_same_keys(
    tokens: list[int], root: bytes, chunk_size: int, extras: dict[int, bytes], lengths: list[int]
) -> None:
    chain = KeyChain(root, chunk_size, extras)
    longest = 0
    for length in lengths:
        chain.extend(tokens[:length])
        longest = max(longest, min(length, len(tokens)))
        assert len(chain.keys) == longest // chunk_size
    chain.extend(tokens)
    assert chain.keys == chunk_keys(tokens, root, chunk_size, extras)


@pytest.mark.parametrize("form", FORMS)
@given(tokens=token_lists, chunk_size=chunk_sizes, first=st.integers(0, 80))
def test_the_kind_of_sequence_does_not_matter(form: str, tokens: list[int], chunk_size: int, first: int) -> None:
    root = bytes(32)
    given_tokens = FORMS[form](tokens)
    chain = KeyChain(root, chunk_size)
    chain.extend(given_tokens[:first])
    chain.extend(given_tokens)
    assert chain.keys == naive_keys(tokens, root, chunk_size, {})
    assert token_bytes(given_tokens) == struct.pack(f"<{len(tokens)}I", *tokens)


@given(st.data(), chunk_sizes)
def test_a_bad_token_is_named_with_its_position(data: st.DataObject, chunk_size: int) -> None:
    tokens: list[Any] = data.draw(st.lists(token_ids, min_size=1, max_size=40))
    at = data.draw(st.integers(0, len(tokens) - 1))
    hashed_before = data.draw(st.integers(0, at))
    chain = KeyChain(bytes(32), chunk_size)
    chain.extend(tokens[:hashed_before])
    tokens[at] = data.draw(st.integers(max_value=-1) | st.integers(min_value=2**32) | st.floats() | st.text())
    if at < len(tokens) // chunk_size * chunk_size:
        with pytest.raises(UsageError, match=f"at position {at} "):
            chain.extend(tokens)
    else:
        chain.extend(tokens)
        assert len(chain.keys) == len(tokens) // chunk_size


@given(token_lists, chunk_sizes, st.data())
def test_extras_share_keys_before_their_chunk_and_none_from_it_on(
    tokens: list[int], chunk_size: int, data: st.DataObject
) -> None:
    at = data.draw(st.integers(0, len(tokens) // chunk_size))
    one, other = data.draw(st.lists(digests, min_size=2, max_size=2, unique=True))
    plain = chunk_keys(tokens, bytes(32), chunk_size)
    marked = [chunk_keys(tokens, bytes(32), chunk_size, {at: extra}) for extra in (one, other)]
    assert plain[:at] == marked[0][:at] == marked[1][:at]
    rest = [key for keys in (plain, *marked) for key in keys[at:]]
    assert len(set(rest)) == 3 * (len(plain) - at)


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


namespaces = st.builds(
    Namespace,
    model=texts,
    dtype=texts,
    chunk_size=st.integers(1, 3),
    block_size=st.integers(1, 3),
    revision=texts,
    kv_cache_dtype=texts,
    layout=texts,
    ranks=texts,
    extra=st.dictionaries(texts, texts, max_size=2),
)


@given(namespaces, namespaces, texts)
def test_namespaces_never_share_a_digest_or_root(one: Namespace, other: Namespace, salt: str) -> None:
    assert (one.digest == other.digest) == (one == other)
    assert (one.root(salt) == other.root(salt)) == (one == other)


@given(namespaces, st.permutations(["model", "dtype", "revision", "kv_cache_dtype", "layout", "ranks"]))
def test_exchanging_two_fields_changes_the_digest(space: Namespace, names: list[str]) -> None:
    first, second = names[:2]
    swapped = evolve(space, **{first: getattr(space, second), second: getattr(space, first)})
    assert (swapped.digest == space.digest) == (getattr(space, first) == getattr(space, second))
