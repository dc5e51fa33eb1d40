"""Hypothesis strategies for keys, payloads and chunks."""

from __future__ import annotations

from hypothesis import strategies as st

from lmkv.protocols import Chunk, ChunkKey

MAX_TOKEN = 2**32 - 1


def keys() -> st.SearchStrategy[ChunkKey]:
    return st.binary(min_size=32, max_size=32)


def payloads(max_bytes: int = 20_000) -> st.SearchStrategy[memoryview]:
    """Return a strategy for read-only payloads, many of which have lengths near page boundaries."""
    near_pages = st.sampled_from([1, 4095, 4096, 4097, 8191, 8192, 8193]).filter(lambda n: n <= max_bytes)
    lengths = st.one_of(st.integers(1, max_bytes), near_pages)
    return st.tuples(lengths, st.binary(min_size=1, max_size=64)).map(_repeated)


def tokens(max_count: int = 300) -> st.SearchStrategy[bytes]:
    """Return a strategy for token ids, encoded as little-endian uint32."""
    ids = st.lists(st.integers(0, MAX_TOKEN), max_size=max_count)
    return ids.map(lambda values: b"".join(value.to_bytes(4, "little") for value in values))


def chunks(max_bytes: int = 20_000) -> st.SearchStrategy[Chunk]:
    parents = st.one_of(st.just(b""), keys())
    return st.builds(Chunk, keys(), payloads(max_bytes), parents, tokens())


def _repeated(drawn: tuple[int, bytes]) -> memoryview:
    length, seed = drawn
    return memoryview((seed * (length // len(seed) + 1))[:length])
