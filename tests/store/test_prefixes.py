"""PrefixIndex against a search through all chunks, and what of a slot lower tiers get."""

from __future__ import annotations

import random

from hypothesis import given, strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from lmkv.chunks.hashing import StateKey, TailKey, token_bytes
from lmkv.chunks.layout import KVLayout, LayerPages
from lmkv.store.entries import Payloads, PrefixIndex, shares

ORIGINS = [b"a", b"b"]
token_lists = st.lists(st.sampled_from([0, 1, 256, 2**32 - 1]), min_size=1, max_size=6)


def common(left: list[int], right: list[int]) -> int:
    count = 0
    for one, other in zip(left, right, strict=False):
        if one != other:
            break
        count += 1
    return count


class Machine(RuleBasedStateMachine):
    @initialize()
    def start(self) -> None:
        self.index = PrefixIndex()
        self.model: dict[bytes, tuple[bytes, list[int]]] = {}

    @rule(origin=st.sampled_from(ORIGINS), tokens=token_lists)
    def add(self, origin: bytes, tokens: list[int]) -> None:
        key = origin + token_bytes(tokens)
        if key not in self.model:
            self.index.add(origin, token_bytes(tokens), key)
            self.model[key] = origin, tokens

    @precondition(lambda self: self.model)
    @rule(data=st.data())
    def discard(self, data: st.DataObject) -> None:
        key = data.draw(st.sampled_from(sorted(self.model)))
        origin, tokens = self.model.pop(key)
        self.index.discard(origin, token_bytes(tokens), key)

    @rule(origin=st.sampled_from(ORIGINS), tokens=token_lists)
    def longest(self, origin: bytes, tokens: list[int]) -> None:
        key, count = self.index.longest(origin, token_bytes(tokens))
        counts = [common(found, tokens) for other, found in self.model.values() if other == origin]
        assert count == max(counts, default=0)
        assert count == (common(self.model[key][1], tokens) if count else 0)

    @rule(origin=st.sampled_from(ORIGINS), tokens=token_lists)
    def shorter(self, origin: bytes, tokens: list[int]) -> None:
        for key in self.index.shorter(origin, token_bytes(tokens)):
            other, found = self.model[key]
            assert (other, tokens[: len(found)]) == (origin, found)
            assert len(found) < len(tokens)

    @invariant()
    def keeps_nothing_of_what_was_discarded(self) -> None:
        chunks = self.index._chunks.values()
        assert sum(map(len, chunks)) == len(self.model)
        assert all(chunks)


TestMachine = Machine.TestCase

layouts = st.builds(
    lambda ranks, pages: KVLayout(8, tuple(LayerPages(3, count) for count in pages), ranks),
    st.integers(1, 3),
    st.lists(st.sampled_from([1, 2, 4, 8]), min_size=1, max_size=4),
)


@given(layout=layouts, tokens=st.integers(1, 8), seed=st.integers(0, 99))
def test_a_tails_payload_is_its_pages_and_comes_back_to_their_places(layout: KVLayout, tokens: int, seed: int) -> None:
    payloads, key = Payloads(layout.slot_bytes, layout.spans), TailKey.of(bytes(32), tokens)
    slot = memoryview(bytearray(random.Random(seed).randbytes(layout.slot_bytes)))
    payload = payloads.gather(key, slot)
    pages = [-(-tokens * layer.pages_per_chunk // 8) * layer.page_bytes for layer in layout.layers]
    assert len(payload) == payloads.nbytes(key) == sum(pages) * layout.num_ranks
    buffer = payloads.buffer(key, slot)
    buffer[:] = payload
    back = memoryview(bytearray(layout.slot_bytes))
    payloads.scatter(key, buffer, back)
    kept = {at for span in layout.spans(tokens) for at in range(span.start, span.stop)}
    assert all(back[at] == (slot[at] if at in kept else 0) for at in range(layout.slot_bytes))


def test_a_whole_chunk_is_its_slot() -> None:
    payloads, slot = Payloads(16, lambda tokens: [slice(0, 1)]), memoryview(bytearray(16))
    assert payloads.gather(bytes(32), slot) is slot
    assert payloads.buffer(bytes(32), slot) is slot
    assert payloads.nbytes(bytes(32)) == 16


def test_tails_have_a_smaller_share_of_a_larger_memory() -> None:
    for slots, tails, states in ((1, 1, 1), (24, 3, 16), (80, 10, 53), (512, 32, 341), (3200, 100, 2133)):
        found = shares(slots)
        assert (found[TailKey].limit, found[StateKey].limit) == (tails, states)
