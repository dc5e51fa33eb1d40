"""Tail keys and origins: equal exactly where everything up to the last token is."""

from __future__ import annotations

import hashlib

from hypothesis import given, strategies as st

from lmkv.chunks.hashing import KeyChain, TailKey, token_bytes

ROOT, CHUNK = bytes(range(32)), 4
token_lists = st.lists(st.integers(0, 3), max_size=11)
extras = st.dictionaries(st.integers(0, 2), st.sampled_from([bytes(32), bytes([1]) * 32]), max_size=2)


def chain_of(tokens: list[int], extra: dict[int, bytes], root: bytes = ROOT) -> KeyChain:
    chain = KeyChain(root, CHUNK, extra)
    chain.extend(tokens)
    return chain


def relevant(tokens: list[int], extra: dict[int, bytes]) -> tuple[tuple[int, ...], tuple[tuple[int, bytes], ...]]:
    """All that the KV of the last token depends on."""
    chunks = -(-len(tokens) // CHUNK)
    return tuple(tokens), tuple(sorted((at, value) for at, value in extra.items() if at < chunks))


@given(left=token_lists, right=token_lists, extra=extras, other=extras)
def test_tails_are_equal_where_all_tokens_and_extras_are(
    left: list[int], right: list[int], extra: dict[int, bytes], other: dict[int, bytes]
) -> None:
    one, two = chain_of(left, extra).tail(left), chain_of(right, other).tail(right)
    if one is None or two is None:
        assert (one is None, two is None) == (len(left) % CHUNK == 0, len(right) % CHUNK == 0)
        return
    assert (one == two) == (relevant(left, extra) == relevant(right, other))
    assert one.tokens == len(left) % CHUNK


@given(tokens=token_lists, extra=extras)
def test_a_tail_is_no_chunk_of_any_chain_and_changes_none(tokens: list[int], extra: dict[int, bytes]) -> None:
    chain = chain_of(tokens, extra)
    tail, longer = chain.tail(tokens), chain_of([*tokens, 0, 0, 0, 0], extra)
    assert tail not in longer.keys
    chain.extend([*tokens, 0, 0, 0, 0])
    assert chain.keys == longer.keys


@given(left=token_lists, right=token_lists, extra=extras, other=extras, at=st.integers(0, 2))
def test_origins_are_equal_where_all_before_and_the_chunks_extras_are(
    left: list[int], right: list[int], extra: dict[int, bytes], other: dict[int, bytes], at: int
) -> None:
    if min(len(left), len(right)) < at * CHUNK:
        return
    one, two = chain_of(left, extra).origin(at), chain_of(right, other).origin(at)
    before = [relevant(tokens[: at * CHUNK], known) for tokens, known in ((left, extra), (right, other))]
    assert (one == two) == (before[0] == before[1] and extra.get(at) == other.get(at))


def test_a_tail_is_the_definition() -> None:
    tokens = [1, 2, 3, 4, 5]
    tail = chain_of(tokens, {}).tail(tokens)
    assert tail == hashlib.sha256(ROOT + token_bytes(tokens)).digest()
    assert isinstance(tail, TailKey)
    assert chain_of(tokens, {}, bytes(32)).tail(tokens) != tail
    assert chain_of([], {}).origin(0) == ROOT
