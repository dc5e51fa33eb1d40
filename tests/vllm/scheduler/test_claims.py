"""Claims through vLLM's requests: their cost for other clients, their owner, and the time of their effect."""

from __future__ import annotations

import functools
import logging
from collections.abc import Iterator
from typing import Any

import pytest
from hypothesis import example, given, strategies as st

from lmkv.policies import LRU, Quotas
from lmkv.vllm.plan.options import MAX_TAG_CHARACTERS, MAX_TAGS, RequestOptions
from tests.vllm.scheduler.simulated_vllm import SimulatedRequest, SimulatedVLLM, request_for
from tests.vllm.scheduler.test_explain import CHUNK, OTHERS, PROMPT, asks, engine_of, in_memory, missed, serve

WHOLE = len(PROMPT) // CHUNK


@pytest.fixture
def engine() -> Iterator[SimulatedVLLM]:
    with engine_of(ram_chunks=16) as made:
        yield made


def mallory(engine: SimulatedVLLM, **params: Any) -> None:
    for number in range(12):
        serve(engine, [number, *PROMPT], salt="mallory", **params)


@pytest.mark.parametrize(
    "claim",
    [
        {"lmkv.pin": 86_000},
        {"agent_hint": {"priority": 9}},
        {"agent_hint": {"waits_seconds": 86_000}},
        {"agent_hint": {"cache_control": {"ttl": 86_000}}},
    ],
    ids=str,
)
def test_one_clients_claims_leave_half_of_memory_to_others(engine: SimulatedVLLM, claim: dict[str, Any]) -> None:
    mallory(engine, **claim)
    for _ in range(2):
        serve(engine, PROMPT, OTHERS[0], salt="alice")
    assert in_memory(engine, PROMPT, "alice") == WHOLE + 1
    assert in_memory(engine, OTHERS[0], "alice") == 2


@pytest.mark.parametrize("claim", [{"lmkv.pin": 86_000}, {"agent_hint": {"priority": 9}}], ids=str)
def test_a_tenant_keeps_its_quota_whatever_others_pin(claim: dict[str, Any]) -> None:
    tenants = {"team:red": 0.7}
    with engine_of(ram_chunks=16, policy=lambda: Quotas(LRU, tenants)) as engine:
        mallory(engine, **claim)
        for _ in range(2):
            for tokens in (PROMPT, OTHERS[0], OTHERS[1], OTHERS[2]):
                serve(engine, tokens, salt="alice", **{"lmkv.tag.team": "red"})
        kept = engine.store.hints.used_bytes()["cpu"]["team:red"]
        assert kept == 10 * engine.store.slab.slot_bytes


def test_a_stranger_ends_nobody_elses_session(engine: SimulatedVLLM) -> None:
    serve(engine, OTHERS[0], salt="bob")
    serve(engine, PROMPT, salt="alice", agent_hint={"session_id": "1"})
    serve(engine, OTHERS[1], salt="mallory", agent_hint={"session_id": "1", "session_ended": True})
    serve(engine, *OTHERS[2:5], salt="bob")
    assert in_memory(engine, PROMPT, "alice") == WHOLE + 1
    root = engine.scheduler.root_of("alice", {})
    assert root is not None
    assert engine.store.hints.end_session(root, "1")
    serve(engine, *OTHERS[5:8], salt="bob")
    assert in_memory(engine, PROMPT, "alice") < WHOLE


@pytest.mark.parametrize("answer", [1, 2])
def test_a_claim_is_about_all_that_the_request_stores(engine: SimulatedVLLM, answer: int) -> None:
    """Also if the request ends in the step that has computed them, and before they are stored."""
    hint = {"session_id": "s", "priority": 3}
    params = {"lmkv.pin": 60, "agent_hint": hint}
    engine.serve("r", PROMPT, answer, **params)
    assert engine.store.stats().pinned == WHOLE + 1
    root = engine.scheduler.root_of("a", {})
    assert root is not None
    (session,) = engine.store.hints._sessions._claims.values()
    assert session.owner == root
    policy: Any = engine.store.policies[0]
    assert len(policy._kept) == WHOLE + 1


def test_a_session_that_ends_with_its_only_request_is_given_up_first(engine: SimulatedVLLM) -> None:
    serve(engine, OTHERS[0])
    serve(engine, PROMPT, agent_hint={"session_id": "s", "session_ended": True})
    serve(engine, *OTHERS[1:8])
    assert in_memory(engine, OTHERS[0], "a") == 2
    assert in_memory(engine, PROMPT, "a") == 0


def test_names_of_clients_are_cut_and_printable_in_the_log(
    engine: SimulatedVLLM, caplog: pytest.LogCaptureFixture
) -> None:
    forged = (
        "cmpl-1\nERROR lmkv.vllm lmkv: an audit found wrong KV in disk: request cmpl-7\x1b[2J\u202e" + "x" * 1_000_000
    )
    with caplog.at_level(logging.INFO, logger="lmkv"):
        engine.serve(forged, PROMPT, 2)
        serve(engine, PROMPT)
    texts = [record.getMessage() for record in caplog.records]
    assert any("cmpl-1?ERROR" in text for text in texts)
    assert all(text.isprintable() and len(text) < 500 for text in texts)
    assert all(report["request"].isprintable() for report in engine.scheduler.observer.recent.snapshot()["requests"])


class Counted(list[int]):
    looked = 0

    def __iter__(self) -> Iterator[int]:
        for each in super().__iter__():
            self.looked += 1
            yield each


def test_no_token_is_looked_at_of_a_prefetch_that_is_too_long(engine: SimulatedVLLM) -> None:
    tokens = Counted(range(1000))
    request = request_for("r", PROMPT, **{"lmkv.prefetch_tokens": tokens})
    assert RequestOptions.of(request, longest=999).prefetch_tokens == ()
    assert tokens.looked == 0
    assert len(RequestOptions.of(request, longest=1000).prefetch_tokens) == 1000


def with_params(params: Any) -> SimulatedRequest:
    return SimulatedRequest("r", list(PROMPT), len(PROMPT), 1, "a", params)


def of_params(params: object) -> RequestOptions:
    return RequestOptions.of(with_params(params))


class Unseen(dict[str, Any]):
    def items(self) -> Any:
        raise AssertionError("its keys are looked at")


no_tokens: list[Any] = []
NO_TAGS: dict[str, dict[str, Any]] = {
    "many": {f"lmkv.tag.{number}": "x" for number in range(MAX_TAGS + 1)},
    "long": {"lmkv.tag.a": "x" * MAX_TAG_CHARACTERS},
    "a long name": {f"lmkv.tag.{'a' * MAX_TAG_CHARACTERS}": "x"},
    "beside many": Unseen(dict.fromkeys(map(str, range(300))) | {"lmkv.tag.a": "x"}),
    "digits": {"lmkv.tag.a": 10**5000},
    "a list": {"lmkv.tag.a": []},
    "deep": {"lmkv.tag.a": functools.reduce(lambda inner, _: [inner], range(100_000), no_tokens)},
}


def test_tokens_are_never_dropped_and_the_log_says_so(caplog: pytest.LogCaptureFixture) -> None:
    whole = RequestOptions(skip_save=True, skip_load=True)
    assert of_params({"lmcache.token_drop": {"algorithm": "a", "config": {}}}) == whole
    assert of_params({"lmcache.token_drop": None}) == RequestOptions()
    assert of_params({"lmcache.skip_load": True}) == RequestOptions(skip_load=True)
    assert "lmcache.token_drop is not supported" in caplog.text, "once"


def test_an_option_that_nobody_reads_is_named_once(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("lmkv.vllm.plan.options._said", set())
    options = {"lmcache.ttl": 60, "lmkv.skip_sav": True, "lmcache.tag.user": "a", "do_remote_decode": False}
    for _ in range(2):
        assert of_params({**options, "lmcache.skip_save": 1}) == RequestOptions(skip_save=True, tags=(("user", "a"),))
    named = [record.getMessage() for record in caplog.records]
    assert named == [
        f"lmkv: a request has the unknown option '{name}'; lmkv ignores this option"
        for name in ("lmcache.ttl", "lmkv.skip_sav")
    ]
    of_params({f"lmkv.{number}": 1 for number in range(200)})
    assert len(caplog.records) <= 20, "a client does not fill the log"


@pytest.mark.parametrize("params", NO_TAGS.values(), ids=NO_TAGS)
def test_a_request_whose_tags_are_unclear_shares_with_nobody(engine: SimulatedVLLM, params: dict[str, Any]) -> None:
    claims = {"lmkv.report": True, "lmkv.pin": 60, "agent_hint": {"session_id": "1", "session_ended": True}}
    params |= claims
    assert of_params(params) == RequestOptions(skip_save=True, skip_load=True, report=True)
    before = engine.total("lmkv_stored_tokens")
    engine.add(with_params(params))
    engine.finish()
    assert engine.total("lmkv_stored_tokens") == before
    serve(engine, PROMPT)
    report = missed(engine, PROMPT, **{**params, **claims}) if type(params) is dict else {"reason": "skip_load"}
    assert report["reason"] == "skip_load"


def test_as_many_tags_as_there_may_be_are_all_kept() -> None:
    tags = {f"lmkv.tag.{number}": number for number in range(MAX_TAGS)}
    assert of_params(tags).tags == tuple(sorted((str(number), str(number)) for number in range(MAX_TAGS)))
    assert of_params(
        {"lmkv.tag.a": True, "lmkv.tag.b": None, "lmkv.tag.c": 1.5, "lmkv.tag.d": "x", "lmkv.tag": 1}
    ).tags == (("a", "True"), ("b", "None"), ("c", "1.5"), ("d", "x"))


odd = st.recursive(
    st.one_of(
        *(st.none(), st.booleans(), st.integers(), st.floats(), st.binary(max_size=9)),
        st.text(st.characters(), max_size=9),
        st.sampled_from(["\ud800", "true", "x" * 5000, object()]),
        # By name: neither can be shown.
        st.sampled_from(["digits", "deep"]).map(lambda name: NO_TAGS[name]["lmkv.tag.a"]),
    ),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=9), inner, max_size=3),
    max_leaves=6,
)
seconds = st.sampled_from([1, 50, 5000, 86_399]) | odd
counts = st.integers(-1, 40) | odd
edits = st.lists(st.fixed_dictionaries({"type": st.sampled_from(["prefetch", "evict", "offload"]) | odd})) | odd
hints = st.fixed_dictionaries(
    {},
    optional={
        "session_id": st.sampled_from(["1", "2", "x" * 1000]) | odd,
        "session_ended": st.booleans() | odd,
        "priority": st.integers(-2, 12) | odd,
        "waits_seconds": seconds,
        "cache_control": st.fixed_dictionaries({}, optional={"ttl": seconds}) | odd,
        "context_management": st.fixed_dictionaries({"edits": edits}) | odd,
    },
)
asking: dict[Any, Any] = {
    "agent_hint": hints | odd,
    "lmkv.pin": seconds,
    "lmkv.prefetch": st.just(True) | odd,
    "lmkv.prefetch_tokens": st.sampled_from([PROMPT, OTHERS[0], [-1], [*PROMPT, "x"]]) | odd,
    "lmkv.tag.team": st.sampled_from(["red", "blue"]) | odd,
    **dict.fromkeys(("lmkv.skip_save", "lmkv.skip_load"), odd),
    **dict.fromkeys(("lmkv.wait_for", "max_load_tokens", "max_offload_tokens"), counts),
}
claims = st.fixed_dictionaries({}, optional=asking)
strange = dict.fromkeys(("lmkv.report", "lmkv.tag.a", "lmkv.tag.\ud800", "do_remote_decode", 5), odd)


@given(st.fixed_dictionaries({}, optional=asking | strange) | odd)
@example({"agent_hint": {"session_id": "\ud800"}})
def test_whatever_a_request_asks_it_is_served(params: object) -> None:
    options = of_params(params)
    assert len(options.tags) <= MAX_TAGS
    with engine_of(ram_chunks=16) as engine:
        engine.scheduler.observer.recorder.since(0)
        engine.add(with_params(params))
        engine.finish()


def test_a_prefetch_of_another_prompt_counts_for_the_requests_tenant() -> None:
    with engine_of(ram_chunks=16, lower_chunks=60, policy=lambda: Quotas(LRU, {"team:red": 0.5})) as engine:
        tagged: dict[str, Any] = {"lmkv.tag.team": "red"}
        serve(engine, PROMPT, **tagged)
        assert engine.store.drain()
        asks(engine, OTHERS[0], **tagged | {"lmkv.prefetch_tokens": PROMPT})
        works = list(engine.store._promoter._unreleased.values())
        assert [work.tenant for work in works] == ["team:red"]


asked = st.tuples(
    st.sampled_from([PROMPT, *OTHERS[:3]]),
    st.integers(1, len(PROMPT)),
    st.integers(1, 3),
    st.sampled_from("ab"),
    claims,
    st.sampled_from([0.0, 0.0, 10.0, 400.0]),
)


@given(requests=st.lists(asked, max_size=12), quota=st.booleans())
def test_any_claims(requests: list[Any], quota: bool) -> None:
    """Every byte that is loaded is compared; slots are left to loads; and nothing is left of any claim."""
    policy = (lambda: Quotas(LRU, {"team:red": 0.5})) if quota else LRU
    with engine_of(ram_chunks=16, lower_chunks=40, policy=policy) as engine:
        for number, (tokens, length, answer, salt, params, passed) in enumerate(requests):
            engine.add(SimulatedRequest(f"r{number}", tokens[:length], min(length, len(tokens)), answer, salt, params))
            engine.finish()
            assert sum(engine.store.snapshot().prioritized.values()) <= 14
            assert engine.store.stats().pinned <= 8 + 1, "and a tail"
            engine.now += passed
        engine.now += 90_000.0
        for _ in range(3):
            engine.store.reserve(())
        assert sum(engine.store.snapshot().prioritized.values()) == engine.store.stats().pinned == 0
        assert sum(engine.store.hints.counts().values()) == 0


@pytest.mark.parametrize("seed", range(6))
def test_a_pin_waits_for_another_request_that_is_storing_the_prompt(seed: int) -> None:
    with engine_of(ram_chunks=16) as engine:
        engine.rng.seed(seed)
        engine.begin("first", PROMPT, 2)
        engine.serve("second", PROMPT, **{"lmkv.pin": 60})
        assert engine.store.stats().pinned == WHOLE + 1
