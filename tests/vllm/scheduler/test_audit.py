"""Audits: hits that are computed all the same and compared. Each fault is made in the bytes that are really stored."""

from __future__ import annotations

import random
from collections.abc import Sequence
from typing import Any

import pytest

from lmkv.chunks.hashing import state_keys
from lmkv.protocols import ChunkKey, Presence
from lmkv.vllm.plan.block_map import Group
from lmkv.vllm.scheduler.audit import Sampler
from tests.vllm.scheduler.simulated_vllm import SimulatedRequest, SimulatedVLLM, Table, request_for

TOKENS = list(range(44))
CHUNK = 8
CHUNKS = len(TOKENS) // CHUNK


def engine(rng: random.Random | int = 0, **options: Any) -> SimulatedVLLM:
    return SimulatedVLLM(rng, **{"ram_chunks": 60, "local_hits": 0.0, "audit_rate": 1.0, **options})


def alarm(caplog: pytest.LogCaptureFixture) -> str:
    """The one line that an audit has in the log."""
    [line] = [record.getMessage() for record in caplog.records if "audit" in record.getMessage()]
    return line


def ask(running: SimulatedVLLM, name: str, tokens: Sequence[int] = TOKENS) -> SimulatedRequest:
    """A request with this prompt, from its arrival to its end. It must not find what vLLM has itself."""
    running.forget()
    return running.serve(name, tokens)


def filled(rng: random.Random | int = 0, **options: Any) -> SimulatedVLLM:
    """An engine that has stored the prompt."""
    made = engine(rng, **options)
    ask(made, "stores")
    return made


def keys(running: SimulatedVLLM, tokens: Sequence[int] = TOKENS) -> list[ChunkKey]:
    return running.scheduler.keys_of(tokens, "a", {})[: len(tokens) // CHUNK]


def damage(running: SimulatedVLLM, key: ChunkKey, rank: int = 0) -> None:
    """Make this chunk's bytes of one rank those of another one, as a race or a wrong key does."""
    slab = running.store.slab
    segment = slab.array[running.store.snapshot().held[key].slot]
    size = len(running.groups) * 2 * 2 * 32
    segment[rank * size : rank * size + size] = segment[rank * size : rank * size + size][::-1].copy()


def where(running: SimulatedVLLM, found: Sequence[ChunkKey]) -> list[Presence]:
    return running.store.catalog.lookup(found)


def total(running: SimulatedVLLM, name: str) -> int:
    return int(sum(running.total(name).values()))


def test_an_honest_hit_is_computed_compared_and_kept() -> None:
    with filled() as running:
        audited = ask(running, "audited")
        assert audited.loaded == 0
        assert total(running, "lmkv_audited_hits") == 1
        assert total(running, "lmkv_audited_tokens") == len(TOKENS) - 1
        assert running.total("lmkv_audited_chunks") == {("cpu",): CHUNKS + 1}, "the tail, too"
        assert running.total("lmkv_missed_requests")["audited",] == 1
        assert total(running, "lmkv_wrong_chunks") == 0
        assert where(running, keys(running)) == [Presence.READY] * CHUNKS


def test_without_a_rate_nothing_is_compared() -> None:
    with filled(audit_rate=0.0) as running:
        assert ask(running, "loads").loaded == len(TOKENS) - 1
        assert total(running, "lmkv_audited_hits") == 0
        assert not running.scheduler.audit.on


@pytest.mark.parametrize("lower", [0, 60])
@pytest.mark.parametrize("ranks", [1, 2])
@pytest.mark.parametrize("device", [False, True])
def test_a_wrong_chunk_goes_with_all_that_follows_it(
    lower: int, ranks: int, device: bool, caplog: pytest.LogCaptureFixture
) -> None:
    """On the last rank alone, too; in every tier; and a chunk that another prompt has behind it."""
    other = [*TOKENS[:24], *range(30, 46)]
    with filled(lower_chunks=lower, ranks=ranks, device=device) as running:
        running.scheduler.audit.sampler.rate = 0.0
        ask(running, "stores another end", other)
        assert where(running, keys(running, other)) == [Presence.READY] * 5
        damage(running, keys(running)[2], rank=ranks - 1)
        running.scheduler.audit.sampler.rate = 1.0
        ask(running, "audited")
        line = alarm(caplog)
        assert "wrong KV in cpu: request audited, tokens 16 to 23, 2 layers (layer 0, layer 1)" in line
        assert f"on ranks [{ranks - 1}]" in line
        assert running.total("lmkv_wrong_chunks") == {("cpu",): 1}
        running.scheduler.audit.sampler.rate = 0.0
        assert ask(running, "goes on", other).loaded <= 24, "chunks that were computed from the wrong one are gone"
        ask(running, "stores it again")
        assert ask(running, "loads it again").loaded == len(TOKENS) - 1


def test_where_vllm_had_the_beginning_that_may_be_what_is_wrong() -> None:
    with filled() as running:
        damage(running, keys(running)[4])
        running.local_hits = 1.0
        ask(running, "audited")
        running.local_hits = 0.0
        assert total(running, "lmkv_wrong_chunks") == 1
        assert where(running, keys(running)) == [Presence.MISS] * CHUNKS, "nor does it store its own KV"


def test_what_was_stored_behind_a_wrong_chunk_is_deleted_in_a_lower_tier_that_was_listed() -> None:
    """The engine that finds it has not stored it, and knows no parent of it."""
    other = [*TOKENS[:24], *range(30, 46)]
    with filled(lower_chunks=60, audit_rate=0.0) as before:
        ask(before, "stores another end", other)
        assert where(before, keys(before, other)) == [Presence.READY] * 5
        before.store.drop(keys(before, other)[3:])
        assert where(before, keys(before, other))[3:] == [Presence.LOWER] * 2
        damage(before, keys(before)[2])
        before.scheduler.audit.on, before.scheduler.audit.sampler.rate = True, 1.0
        ask(before, "audited")
        assert where(before, keys(before, other))[3:] == [Presence.LOWER] * 2, "nobody knows yet that they follow it"
        assert ask(before, "goes on", other).loaded == 0
        before.scheduler.audit.sampler.rate = 0.0
        assert ask(before, "now loads its own", other).loaded == len(other) - 1


@pytest.mark.parametrize("groups", [[Group(8), Group(8, state=1)], [Group(4), Group(4, window=8)]])
def test_states_and_windows_are_compared(groups: list[Table]) -> None:
    with filled(groups=groups) as running:
        ask(running, "audited")
        assert total(running, "lmkv_audited_chunks") == CHUNKS
        assert total(running, "lmkv_audited_states") == (1 if running.states else 0)
        assert total(running, "lmkv_wrong_chunks") == 0


def test_a_wrong_state_is_found_though_its_kv_is_right() -> None:
    with filled(groups=[Group(8), Group(8, state=1)]) as running:
        state = state_keys(keys(running)[-1], 1)[0]
        assert where(running, [state]) == [Presence.READY]
        slot = running.store.snapshot().held[state].slot
        running.store.slab.array[slot, :64] = running.store.slab.array[slot, :64][::-1].copy()
        ask(running, "audited")
        assert total(running, "lmkv_wrong_chunks") == 1
        running.scheduler.audit.sampler.rate = 0.0
        assert ask(running, "loads").loaded < len(TOKENS) // CHUNK * CHUNK


def test_a_wrong_chunk_disables_loads_if_that_is_wanted() -> None:
    with filled(audit_action="disable") as running:
        damage(running, keys(running)[0])
        ask(running, "audited")
        assert running.scheduler.audit.loads_off
        running.scheduler.audit.sampler.rate = 0.0
        again = running.serve("computes", TOKENS, **{"lmkv.report": True})
        assert again.loaded == 0
        assert running.total("lmkv_missed_requests")["switched_off",] == 1
        running.now += 10
        running.finish()
        assert running.total("lmkv_loads_off") == {(): 1.0}


def test_a_chunk_that_was_evicted_meanwhile_is_not_compared() -> None:
    with filled() as running:
        running.forget()
        request = request_for("audited", TOKENS)
        assert running.scheduler.get_num_new_matched_tokens(request, 0) == (0, False)
        running.store.delete(running.scheduler.keys_of(TOKENS, "a", {}))
        running.add(request)
        running.finish()
        assert total(running, "lmkv_audited_hits") == 1
        assert total(running, "lmkv_audited_chunks") == 0


def test_a_host_memory_without_room_compares_what_it_can() -> None:
    with filled(ram_chunks=CHUNKS + 1) as running:
        ask(running, "audited")
        assert 0 < total(running, "lmkv_audited_chunks") <= CHUNKS
        assert total(running, "lmkv_wrong_chunks") == 0


def test_only_whole_chunks_of_the_prompt_itself_are_compared() -> None:
    with filled() as running:
        ask(running, "begins like it", TOKENS[:20])
        assert total(running, "lmkv_audited_chunks") == 2


@pytest.mark.parametrize("tokens", [range(44), range(6)])
def test_a_wrong_tail_is_found_in_its_whole_pages(tokens: range, caplog: pytest.LogCaptureFixture) -> None:
    """Also that of a prompt without a whole chunk."""
    with engine() as running:
        ask(running, "stores", tokens)
        *_, tail = running.scheduler.keys_of(tokens, "a", {})
        damage(running, tail)
        ask(running, "audited", tokens)
        line = alarm(caplog)
        begins = len(tokens) // CHUNK * CHUNK
        assert f"wrong KV in cpu: request audited, tokens {begins} to {begins + 3}" in line
        assert where(running, [tail]) == [Presence.MISS]
        running.scheduler.audit.sampler.rate = 0.0
        ask(running, "stores it again", tokens)
        assert ask(running, "loads it", tokens).loaded == len(tokens) - 1


def test_where_draft_layers_look_ahead_nothing_is_audited() -> None:
    """Equal chunks differ there: the KV of a chunk's end depends on what followed when it was stored."""
    with filled(lookahead=1) as running:
        assert ask(running, "loads").loaded > 0
        assert total(running, "lmkv_audited_hits") == 0


def test_the_rate_is_that_of_the_hits() -> None:
    draw = random.Random(0)
    sampler = Sampler(0.01, draw.random)
    assert 850 < sum(sampler() for _ in range(100_000)) < 1150
    assert not any(Sampler(0.0)() for _ in range(1000))
    assert all(Sampler(1.0)() for _ in range(1000))


class Chunked(random.Random):
    """Steps of one chunk, but prompts of more tokens than `whole` at once."""

    whole = 1000

    def randint(self, a: int, b: int) -> int:
        return b if b > self.whole else min(b, CHUNK)


LONG = list(range(164))


def begun(running: SimulatedVLLM) -> SimulatedRequest:
    """A request that is audited, and has compared three of its chunks."""
    ask(running, "stores", LONG)
    running.forget()
    request = running.begin("slow", LONG)
    while request.computed < 3 * CHUNK:
        running.step()
    running.forget()
    assert isinstance(running.rng, Chunked)
    running.rng.whole = 150
    return request


def large() -> SimulatedVLLM:
    return engine(Chunked(0), num_blocks=200, ram_chunks=120)


def test_what_was_computed_before_a_reset_is_not_compared_with_what_is_stored_after_it() -> None:
    """The weights may be others now: the later chunk differs though it is right."""
    with large() as running:
        slow = begun(running)
        running.scheduler.reset()
        running.begin("stores anew", LONG)
        running.step()
        last = keys(running, LONG)[-1]
        while where(running, [last]) != [Presence.READY]:
            running.step()
        assert slow.computed < len(LONG) - 2 * CHUNK
        damage(running, last)
        running.finish()
        assert total(running, "lmkv_wrong_chunks") == 0
        assert where(running, [last]) == [Presence.READY]


def test_a_request_that_may_have_read_a_wrong_chunk_accuses_no_other() -> None:
    with large() as running:
        slow, found = begun(running), keys(running, LONG)
        damage(running, found[2])
        # Else it would be loaded, which is audited in another way.
        running.scheduler.audit._computed.clear()
        running.begin("finds it", LONG, 8)
        while where(running, [found[-1]]) != [Presence.MISS]:
            running.step()
        while where(running, [found[-1]]) != [Presence.READY]:
            running.step()
        assert slow.computed < len(LONG) - 2 * CHUNK
        damage(running, found[-1])
        running.finish()
        assert total(running, "lmkv_wrong_chunks") == 1
        assert where(running, [found[-1]]) == [Presence.READY]


def test_a_hit_that_vllm_has_itself_by_then_may_be_what_is_wrong() -> None:
    """It was drawn while vLLM had nothing of it, and waited until vLLM had all."""
    prompt = TOKENS[:41]
    with engine(prefix_caching=True) as running:
        ask(running, "stores", prompt)
        request = request_for("audited", prompt)
        running.scheduler.on_new_request(request)
        assert running.scheduler.get_num_new_matched_tokens(request, 0) == (0, False)
        damage(running, keys(running, prompt)[4])
        running.waiting.append(request)
        assert running.shares
        running.finish()
        assert request.loaded == 40, "vLLM had it"
        assert total(running, "lmkv_wrong_chunks") == 1
        assert where(running, keys(running, prompt)) == [Presence.MISS] * CHUNKS


def test_states_are_compared_though_the_request_stores_nothing() -> None:
    with filled(groups=[Group(8), Group(8, state=1)]) as running:
        running.forget()
        running.serve("audited", TOKENS, **{"lmkv.skip_save": True})
        assert total(running, "lmkv_audited_chunks") == CHUNKS
        assert total(running, "lmkv_audited_states") == 1
