"""Chains of chunk keys: laws for any tokens, sizes, extras and splits; fixed keys; what is looked at and refused."""

from __future__ import annotations

import hashlib
import os
import struct
import subprocess
import sys
from array import array
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, overload

import numpy as np
import pytest
import torch
from hypothesis import example, given, strategies as st

import lmkv
from lmkv.chunks.hashing import KeyChain, chunk_keys, token_bytes
from lmkv.errors import UsageError
from tests.tables import every, raised

ROOT = bytes(range(32))
EXTRA = bytes(reversed(range(32)))
TOKENS = [0, 1, 255, 256, 65_536, 2**31, 2**32 - 1, 7, 8, 9, 10]
"""Two chunks of four, and a tail."""

token_ids = st.one_of(st.integers(0, 3), st.integers(0, 2**32 - 1))
token_lists = st.lists(token_ids, max_size=80)
chunk_sizes = st.integers(1, 12)
digests = st.binary(min_size=32, max_size=32)
extras_maps = st.dictionaries(st.integers(0, 12), digests, max_size=4)


def naive_keys(
    tokens: Sequence[int], root: bytes, chunk_size: int, extras: dict[int, bytes] | None = None
) -> list[bytes]:
    """The definition: every key hashed from its (new) root's first token on, nothing carried over."""
    keys: list[bytes] = []
    first = 0
    for chunk in range(len(tokens) // chunk_size):
        if extras and chunk in extras:
            before = keys[-1] if keys else root
            root = hashlib.sha256(b"lmkv extras\0" + before + extras[chunk]).digest()
            first = chunk * chunk_size
        span = tokens[first : (chunk + 1) * chunk_size]
        keys.append(hashlib.sha256(root + struct.pack(f"<{len(span)}I", *span)).digest())
    return keys


class ReadOnlyList(Sequence[int]):
    """A sequence that is no list but whose slice is one, as vLLM's; remembers the slices asked for."""

    def __init__(self, tokens: list[int]) -> None:
        self.tokens = tokens
        self.slices: list[tuple[int, int]] = []

    def __len__(self) -> int:
        return len(self.tokens)

    @overload
    def __getitem__(self, index: int) -> int: ...
    @overload
    def __getitem__(self, index: slice) -> list[int]: ...
    def __getitem__(self, index: int | slice) -> int | list[int]:
        assert isinstance(index, slice), "token by token is too slow"
        self.slices.append((index.start, index.stop))
        return self.tokens[index]


FORMS: list[Callable[[list[int]], Any]] = [
    *(tuple, ReadOnlyList, lambda tokens: array("I", tokens), lambda tokens: array("q", tokens)),
    *(lambda tokens, dtype=dtype: np.array(tokens, dtype=dtype) for dtype in ("i8", "u4", ">u8")),
    lambda tokens: np.array(tokens, dtype=np.int64).repeat(3)[::3],
    lambda tokens: torch.tensor(tokens, dtype=torch.int64),
    lambda tokens: torch.tensor(tokens, dtype=torch.int64).repeat_interleave(2)[::2],
    lambda tokens: [np.int64(token) for token in tokens],
]


def test_golden_keys() -> None:
    assert [key.hex() for key in chunk_keys(TOKENS, ROOT, 4)] == [
        "ea840d835025824b9212a4d4f2d125587faccf3fec765b8153d346c95b654b4b",
        "3c3d947a0e809416de3c20bcaccc94cd8c2ebe3df257999f1a25563af06ff46c",
    ]
    assert [key.hex() for key in chunk_keys(TOKENS, ROOT, 4, {1: EXTRA})] == [
        "ea840d835025824b9212a4d4f2d125587faccf3fec765b8153d346c95b654b4b",
        "2ea30da62297d4374038ed19ebc874fbd7eaa49c7714322977c5620c1f44d8c8",
    ]


@given(token_lists, digests, chunk_sizes, extras_maps)
@example(TOKENS, ROOT, 4, {})
@example(TOKENS, ROOT, 4, {0: EXTRA})
@example(TOKENS, ROOT, 4, {1: EXTRA})
@example(TOKENS, ROOT, 4, {0: EXTRA, 1: ROOT})
@example(TOKENS, ROOT, 4, {9: EXTRA})
def test_keys_are_the_definition(tokens: list[int], root: bytes, chunk_size: int, extras: dict[int, bytes]) -> None:
    assert chunk_keys(tokens, root, chunk_size, extras) == naive_keys(tokens, root, chunk_size, extras)


def test_another_process_computes_the_same_keys() -> None:
    program = """if True:
        from lmkv.chunks.hashing import chunk_keys
        from lmkv.chunks.namespace import Namespace
        space = Namespace(
            model="m", dtype="bfloat16", chunk_size=4, block_size=2, extra={"b": "2", "a": "1", "c": "3"}
        )
        root = space.root("salt", ("name", "path"), {"x": "1", "y": b"2", "z": "3"})
        for key in chunk_keys(range(12), root, 4, {1: root, 2: space.digest}):
            print(key.hex())
    """
    environment = os.environ | {"PYTHONPATH": str(Path(lmkv.__file__).parents[1])}
    for seed in ("0", "1", "random"):
        environment["PYTHONHASHSEED"] = seed
        command = [sys.executable, "-c", program]
        done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=500, check=True)
        assert done.stdout.split() == [
            "cc4e54fda5355092f97149d4cf7d5d6a5ff506b2ad30abc9fdb62febc57d96a9",
            "f5ab8cdd50e54498803346a5ca8eb2ebf894ff836cc65c1636c0754df2df1610",
            "fea0106f161dbefd74d0e40d71b9721bbcc333550ea6845cf6ff5fa5843c28bc",
        ]


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
@example(TOKENS, ROOT, 4, {}, [11, 5])
@example(list(range(16)), ROOT, 4, {0: EXTRA, 2: ROOT}, [*range(17)])
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
    assert chain.keys == naive_keys(tokens, root, chunk_size, extras)


@given(tokens=token_lists, chunk_size=chunk_sizes, first=st.integers(0, 80))
@example([], 4, 0)
@example(TOKENS, 4, 0)
def test_the_kind_of_sequence_does_not_matter(tokens: list[int], chunk_size: int, first: int) -> None:
    for number, form in enumerate(FORMS):
        given_tokens = form(tokens)
        chain = KeyChain(ROOT, chunk_size)
        chain.extend(given_tokens[0:first])
        chain.extend(given_tokens)
        assert chain.keys == naive_keys(tokens, ROOT, chunk_size), number
        assert token_bytes(given_tokens) == struct.pack(f"<{len(tokens)}I", *tokens), number


def test_every_width_of_integer_agrees() -> None:
    small = [0, 1, 2, 127, 126, 3, 4, 5]
    for dtype in (np.int8, np.uint8, np.int16, np.uint16, np.int32, np.uint64):
        assert chunk_keys(np.array(small, dtype=dtype), ROOT, 4) == chunk_keys(small, ROOT, 4)
    assert chunk_keys(range(3, 20), ROOT, 4) == chunk_keys(list(range(3, 20)), ROOT, 4)


def test_a_big_endian_machine_gives_the_same_keys(monkeypatch: pytest.MonkeyPatch) -> None:
    """As if the tokens were byte-swapped: what such a machine holds in memory for the swapped values."""
    swapped = [int.from_bytes(token.to_bytes(4, "big"), "little") for token in TOKENS]
    monkeypatch.setattr(sys, "byteorder", "big" if sys.byteorder == "little" else "little")
    assert chunk_keys(swapped, ROOT, 4) == naive_keys(TOKENS, ROOT, 4)
    assert token_bytes(np.array(swapped)) == struct.pack(f"<{len(TOKENS)}I", *TOKENS)


def test_extend_asks_only_for_new_complete_chunks() -> None:
    chain, tokens = KeyChain(ROOT, 4), ReadOnlyList(list(range(9)))
    chain.extend(tokens)
    tokens.tokens += [9, 10]
    chain.extend(tokens)
    tokens.tokens += [11, 12]
    chain.extend(tokens)
    chain.extend(tokens)
    assert tokens.slices == [(0, 8), (8, 12)]
    assert chain.keys == naive_keys(range(13), ROOT, 4)


def test_parent_is_the_key_before() -> None:
    chain = KeyChain(ROOT, 4)
    assert chain.parent(0) == b""
    chain.extend(TOKENS)
    assert [chain.parent(at) for at in range(3)] == [b"", *chain.keys]
    for outside in (-1, 3):
        raised(UsageError, "chain of 2", chain.parent, outside)


@given(st.data(), chunk_sizes)
def test_a_bad_token_is_named_with_its_position(data: st.DataObject, chunk_size: int) -> None:
    tokens: list[Any] = data.draw(st.lists(token_ids, min_size=1, max_size=40))
    at = data.draw(st.integers(0, len(tokens) - 1))
    chain = KeyChain(bytes(32), chunk_size)
    chain.extend(tokens[: data.draw(st.integers(0, at))])
    bad, good = (
        data.draw(st.integers(max_value=-1) | st.integers(min_value=2**32) | st.floats() | st.text()),
        tokens[at],
    )
    tokens[at] = bad
    if at < len(tokens) // chunk_size * chunk_size:
        raised(UsageError, f"at position {at} ", chain.extend, tokens)
        tokens[at] = good
    chain.extend(tokens)
    assert chain.keys == chunk_keys([*tokens[:at], good, *tokens[at + 1 :]], bytes(32), chunk_size)


def test_a_bad_token_of_any_kind_is_named_in_a_sequence_of_any_kind() -> None:
    for bad in (-1, 2**32, 2**70, 1.0, None, "7", float("nan")):
        for kind in (list, tuple, ReadOnlyList):
            assert repr(bad) in raised(UsageError, "position 6 ", chunk_keys, kind([*range(6), bad, 7]), ROOT, 4)
    for array_of in (np.array, torch.tensor):
        raised(UsageError, "position 2 ", chunk_keys, array_of([0, 1, -5, 3]), ROOT, 4)
        raised(UsageError, "position 2 ", chunk_keys, array_of([0, 1, 2**32, 3]), ROOT, 4)
    for make in (list, tuple, np.array):
        chain = KeyChain(ROOT, 4)
        chain.extend(make([*range(4)]))
        raised(UsageError, "position 5 ", chain.extend, make([*range(5), -1, 6, 7]))
        assert chunk_keys(make([*range(8), -1]), ROOT, 4) == naive_keys(range(8), ROOT, 4), "in the tail"


def test_what_holds_no_tokens_is_refused() -> None:
    given: list[Any] = [
        *("12345678", b"12345678", bytearray(8), array("d", range(8)), np.array(8), torch.zeros(8)),
        *(np.zeros(8, dtype=dtype) for dtype in (float, bool, object)),
        *(torch.zeros(8, dtype=dtype) for dtype in (torch.bfloat16, torch.bool)),
        *(np.zeros((2, 4), dtype=int), torch.zeros((1, 8), dtype=torch.int64)),
    ]
    every([(chunk_keys, tokens, ROOT, 4) for tokens in given] + [(token_bytes, tokens) for tokens in given], no_tokens)


def no_tokens(call: Callable[..., object], *arguments: object) -> None:
    raised(UsageError, r"integer|ints|one dimension", call, *arguments)


def test_a_chain_that_cannot_be_is_refused() -> None:
    for named, arguments in (
        *(("root", (b"short", 4)), ("root", ("x" * 32, 4)), ("chunk_size", (ROOT, 0)), ("chunk_size", (ROOT, -4))),
        *((r"extras\[2\]", (ROOT, 4, {2: b"short"})), ("negative", (ROOT, 4, {-1: EXTRA}))),
    ):
        raised(UsageError, named, KeyChain, *arguments)
