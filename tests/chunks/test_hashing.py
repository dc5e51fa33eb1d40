"""Chains of chunk keys: fixed keys, what is looked at, and what is refused."""

from __future__ import annotations

import hashlib
import os
import struct
import subprocess
import sys
from array import array
from collections.abc import Sequence
from pathlib import Path
from typing import Any, overload

import numpy as np
import pytest
import torch

import lmkv
from lmkv.chunks.hashing import KeyChain, chunk_keys, token_bytes
from lmkv.errors import UsageError

ROOT = bytes(range(32))
EXTRA = bytes(reversed(range(32)))
TOKENS = [0, 1, 255, 256, 65_536, 2**31, 2**32 - 1, 7, 8, 9, 10]
"""Two chunks of four, and a tail."""


def naive_keys(
    tokens: Sequence[int], root: bytes, chunk_size: int, extras: dict[int, bytes] | None = None
) -> list[bytes]:
    """The definition, hashed anew for each chunk and without streaming."""
    keys: list[bytes] = []
    first = 0
    for chunk in range(len(tokens) // chunk_size):
        if extras and chunk in extras:
            before = keys[-1] if keys else root
            root = hashlib.sha256(b"lmkv extras\0" + before + extras[chunk]).digest()
            first = chunk
        span = tokens[first * chunk_size : (chunk + 1) * chunk_size]
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


def test_golden_keys() -> None:
    assert [key.hex() for key in chunk_keys(TOKENS, ROOT, 4)] == [
        "ea840d835025824b9212a4d4f2d125587faccf3fec765b8153d346c95b654b4b",
        "3c3d947a0e809416de3c20bcaccc94cd8c2ebe3df257999f1a25563af06ff46c",
    ]
    assert [key.hex() for key in chunk_keys(TOKENS, ROOT, 4, {1: EXTRA})] == [
        "ea840d835025824b9212a4d4f2d125587faccf3fec765b8153d346c95b654b4b",
        "2ea30da62297d4374038ed19ebc874fbd7eaa49c7714322977c5620c1f44d8c8",
    ]


@pytest.mark.parametrize("extras", [{}, {0: EXTRA}, {1: EXTRA}, {0: EXTRA, 1: ROOT}, {9: EXTRA}])
def test_keys_are_the_definition(extras: dict[int, bytes]) -> None:
    assert chunk_keys(TOKENS, ROOT, 4, extras) == naive_keys(TOKENS, ROOT, 4, extras)


@pytest.mark.parametrize("seed", ["0", "1", "random"])
def test_another_process_computes_the_same_keys(seed: str) -> None:
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
    done = subprocess.run(
        [sys.executable, "-c", program],
        env=os.environ | {"PYTHONHASHSEED": seed, "PYTHONPATH": str(Path(lmkv.__file__).parents[1])},
        capture_output=True,
        text=True,
        timeout=500,
        check=True,
    )
    assert done.stdout.split() == [
        "cc4e54fda5355092f97149d4cf7d5d6a5ff506b2ad30abc9fdb62febc57d96a9",
        "f5ab8cdd50e54498803346a5ca8eb2ebf894ff836cc65c1636c0754df2df1610",
        "fea0106f161dbefd74d0e40d71b9721bbcc333550ea6845cf6ff5fa5843c28bc",
    ]


@pytest.mark.parametrize(
    "tokens",
    [
        tuple(TOKENS),
        array("I", TOKENS),
        array("q", TOKENS),
        ReadOnlyList(TOKENS),
        np.array(TOKENS),
        np.array(TOKENS, dtype=np.uint32),
        np.array(TOKENS, dtype=">u8"),
        np.repeat(np.array(TOKENS), 2)[::2],
        torch.tensor(TOKENS),
        [np.int64(token) for token in TOKENS],
    ],
    ids=lambda tokens: f"{type(tokens).__name__} {getattr(tokens, 'dtype', '')}",
)
def test_the_kind_of_sequence_does_not_matter(tokens: Any) -> None:
    assert chunk_keys(tokens, ROOT, 4) == chunk_keys(TOKENS, ROOT, 4)
    assert token_bytes(tokens) == struct.pack(f"<{len(TOKENS)}I", *TOKENS)


@pytest.mark.parametrize("dtype", [np.int8, np.uint8, np.int16, np.uint16, np.int32, np.uint64])
def test_every_width_of_integer_agrees(dtype: type[np.integer[Any]]) -> None:
    small = [0, 1, 2, 127, 126, 3, 4, 5]
    assert chunk_keys(np.array(small, dtype=dtype), ROOT, 4) == chunk_keys(small, ROOT, 4)


def test_a_range_is_a_sequence_of_tokens() -> None:
    assert chunk_keys(range(3, 20), ROOT, 4) == chunk_keys(list(range(3, 20)), ROOT, 4)


@pytest.mark.parametrize("empty", [[], (), array("I"), np.array([], dtype=np.int64), torch.tensor([]).long()])
def test_no_tokens_give_no_keys(empty: Any) -> None:
    assert chunk_keys(empty, ROOT, 4) == []
    assert token_bytes(empty) == b""


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


def test_a_shorter_sequence_changes_nothing() -> None:
    chain = KeyChain(ROOT, 4)
    chain.extend(TOKENS)
    chain.extend(TOKENS[:5])
    assert chain.keys == naive_keys(TOKENS, ROOT, 4)


def test_parent_is_the_key_before() -> None:
    chain = KeyChain(ROOT, 4)
    assert chain.parent(0) == b""
    chain.extend(TOKENS)
    assert [chain.parent(at) for at in range(3)] == [b"", *chain.keys]
    for outside in (-1, 3):
        with pytest.raises(UsageError, match="chain of 2"):
            chain.parent(outside)


def test_extras_change_their_chunk_and_all_after_it() -> None:
    tokens = list(range(40))
    plain = chunk_keys(tokens, ROOT, 4)
    marked = chunk_keys(tokens, ROOT, 4, {3: EXTRA})
    assert marked[:3] == plain[:3]
    assert not set(marked[3:]) & set(plain)
    assert not set(chunk_keys(tokens, ROOT, 4, {3: ROOT})[3:]) & set(marked)


def test_extras_apply_when_their_chunk_arrives_later() -> None:
    chain = KeyChain(ROOT, 4, {0: EXTRA, 2: ROOT})
    for length in range(17):
        chain.extend(list(range(length)))
    assert chain.keys == naive_keys(range(16), ROOT, 4, {0: EXTRA, 2: ROOT})


@pytest.mark.parametrize("bad", [-1, 2**32, 2**70, 1.0, None, "7", float("nan")])
@pytest.mark.parametrize("kind", [list, tuple, ReadOnlyList])
def test_a_bad_token_is_named_with_its_position(bad: Any, kind: Any) -> None:
    tokens = [*range(6), bad, 7]
    with pytest.raises(UsageError, match=r"position 6 ") as caught:
        chunk_keys(kind(tokens), ROOT, 4)
    assert repr(bad) in str(caught.value)


@pytest.mark.parametrize("tokens", [np.array([0, 1, -5, 3]), torch.tensor([0, 1, 2**32, 3])], ids=type)
def test_a_bad_token_in_an_array_is_named_with_its_position(tokens: Any) -> None:
    with pytest.raises(UsageError, match="position 2 "):
        chunk_keys(tokens, ROOT, 4)


def test_the_position_counts_from_the_start_of_the_sequence() -> None:
    for make in (list, np.array):
        chain = KeyChain(ROOT, 4)
        chain.extend(make(list(range(4))))
        with pytest.raises(UsageError, match="position 5 "):
            chain.extend(make([*range(5), -1, 6, 7]))


def test_a_bad_token_leaves_the_chain_as_it_was() -> None:
    chain = KeyChain(ROOT, 4)
    chain.extend(list(range(4)))
    with pytest.raises(UsageError):
        chain.extend([*range(8), -1, 9, 10, 11])
    chain.extend(list(range(12)))
    assert chain.keys == naive_keys(range(12), ROOT, 4)


@pytest.mark.parametrize("kind", [list, tuple, np.array])
def test_a_bad_token_in_the_tail_does_not_matter(kind: Any) -> None:
    assert chunk_keys(kind([*range(8), -1]), ROOT, 4) == naive_keys(range(8), ROOT, 4)


@pytest.mark.parametrize(
    "tokens",
    [
        "12345678",
        b"12345678",
        bytearray(8),
        np.zeros(8),
        np.zeros(8, dtype=bool),
        np.zeros(8, dtype=object),
        np.zeros((2, 4), dtype=int),
        np.array(8),
        torch.zeros(8),
        torch.zeros(8, dtype=torch.bfloat16),
        torch.zeros(8, dtype=torch.bool),
        torch.zeros((1, 8), dtype=torch.int64),
        array("d", range(8)),
    ],
    ids=lambda tokens: f"{type(tokens).__name__} {getattr(tokens, 'dtype', '')}",
)
def test_what_holds_no_tokens_is_refused(tokens: Any) -> None:
    with pytest.raises(UsageError, match=r"integer|ints|one dimension"):
        chunk_keys(tokens, ROOT, 4)
    with pytest.raises(UsageError, match=r"integer|ints|one dimension"):
        token_bytes(tokens)


@pytest.mark.parametrize(
    ("arguments", "named"),
    [
        ((b"short", 4), "root"),
        (("x" * 32, 4), "root"),
        ((ROOT, 0), "chunk_size"),
        ((ROOT, -4), "chunk_size"),
        ((ROOT, 4, {2: b"short"}), r"extras\[2\]"),
        ((ROOT, 4, {-1: EXTRA}), "negative"),
    ],
)
def test_a_chain_that_cannot_be_is_refused(arguments: Any, named: str) -> None:
    with pytest.raises(UsageError, match=named):
        KeyChain(*arguments)
