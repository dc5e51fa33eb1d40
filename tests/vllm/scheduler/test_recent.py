"""What the agent API tells of the last requests is what they really found, and nothing of their prompts."""

from __future__ import annotations

import pytest

from lmkv.agent.client import Client
from lmkv.agent.service import ADVICE, Prompt
from lmkv.cli.top import shortened
from lmkv.errors import printable
from lmkv.vllm.scheduler.observer import RecentRequests
from lmkv.vllm.scheduler.telemetry import REASONS
from tests.agent.serving import TOKEN, service_of_scheduler, serving
from tests.vllm.scheduler.simulated_vllm import SimulatedVLLM
from tests.vllm.scheduler.test_explain import CHUNK, OTHERS, PROMPT, engine_of


def serve(engine: SimulatedVLLM, name: str, tokens: list[int], salt: str = "a") -> None:
    engine.serve(name, tokens, 2, salt)


def test_each_request_is_there_with_what_it_found(engine: SimulatedVLLM) -> None:
    serve(engine, "cold", PROMPT)
    serve(engine, "warm", PROMPT)
    warm, cold = engine.scheduler.observer.recent.snapshot()["requests"]
    assert (cold["request"], cold["hit_tokens"], cold["sources"], cold["tokens"]) == ("cold", 0, {}, len(PROMPT))
    assert cold["missed"] == {"reason": "not_stored", "tokens": len(PROMPT) - 1}
    assert (warm["hit_tokens"], warm["sources"]) == (len(PROMPT) - 1, {"cpu": len(PROMPT) - 1})
    assert "missed" not in warm
    assert warm["load_bytes"] > 0
    assert not warm["running"]


def test_one_that_runs_is_there_too(engine: SimulatedVLLM) -> None:
    engine.begin("runs", PROMPT, 5)
    engine.step()
    (report,) = engine.scheduler.observer.recent.snapshot()["requests"]
    assert report["running"]
    engine.finish()
    (after,) = engine.scheduler.observer.recent.snapshot()["requests"]
    assert after == report | {"running": False}


def test_the_totals_are_those_of_the_metrics(engine: SimulatedVLLM) -> None:
    for number, tokens in enumerate([PROMPT, *OTHERS, PROMPT, PROMPT[: 2 * CHUNK]]):
        serve(engine, str(number), tokens)
    found = engine.scheduler.observer.recent.snapshot()
    assert found["lookup_tokens"] == sum(engine.total("lmkv_lookup_tokens").values()) > 0
    assert found["hit_tokens"] == sum(engine.total("lmkv_hit_tokens").values()) > 0


def test_only_the_last_are_kept(engine: SimulatedVLLM) -> None:
    engine.scheduler.observer.recent = RecentRequests(size=3)
    for number in range(5):
        serve(engine, str(number), PROMPT)
    assert [each["request"] for each in engine.scheduler.observer.recent.snapshot()["requests"]] == ["4", "3", "2"]


def test_ids_that_clients_choose_do_no_harm(engine: SimulatedVLLM) -> None:
    for name in ("\ud800", "x" * 10_000):
        serve(engine, name, PROMPT)
    long, odd = engine.scheduler.observer.recent.snapshot()["requests"]
    assert (odd["request"], odd["running"]) == ("?", False)
    assert (long["request"], long["running"]) == ("x" * 199 + "…", False)
    assert shortened("\x1b]0;mine\x07") == "?]0;mine?"


@pytest.mark.parametrize("start", ["x" * 300, "x" * 10_000], ids=["long", "longer"])
def test_long_ids_that_begin_alike_are_several_requests(engine: SimulatedVLLM, start: str) -> None:
    for end in "abc":
        serve(engine, f"{start}{end}", PROMPT)
    found = engine.scheduler.observer.recent.snapshot()
    assert len(found["requests"]) == 3
    assert found["lookup_tokens"] == sum(engine.total("lmkv_lookup_tokens").values()) > 0
    assert sum(map(len, found["ids"])) < 20_000


def test_nothing_of_a_prompt_or_of_other_salts_is_told(engine: SimulatedVLLM) -> None:
    serve(engine, "first", PROMPT)
    serve(engine, "second", PROMPT, salt="b")
    second, _ = engine.scheduler.observer.recent.snapshot()["requests"]
    assert second["missed"]["reason"] == "not_stored"
    known = {"request", "time", "running", "tokens", "vllm_tokens", "hit_tokens", "sources", "missed"}
    assert set(second) == known | {"wait_seconds", "load_bytes", "load_seconds"}


@pytest.mark.parametrize("name", ["tenant/7", "a?b#c%2F", "früh", "two\nlines", "x" * 300])
def test_a_request_is_explained_whatever_its_client_calls_it(engine: SimulatedVLLM, name: str) -> None:
    serve(engine, f"{name}-0-1a2b3c4d", PROMPT)
    with serving(service_of_scheduler(engine.scheduler, CHUNK)) as (server,), Client(server.url, TOKEN) as client:
        assert client.explain(name)["request"] == printable(f"{name}-0-1a2b3c4d")
        assert "ids" not in client.requests()


def test_an_evicted_prompt_is_explained_with_its_tier_and_time() -> None:
    with engine_of(ram_chunks=6) as small:
        serve(small, "cmpl-first-0-1a2b3c4d", PROMPT)
        for number, tokens in enumerate(OTHERS):
            serve(small, str(number), tokens)
        small.now += 100.0
        serve(small, "cmpl-again-0-1a2b3c4d", PROMPT)
        service = service_of_scheduler(small.scheduler, CHUNK)
        explained = service.explain("cmpl-again-0")
        assert explained is not None
        assert explained["missed"]["tier"] == "cpu"
        assert f"{len(PROMPT) - 1} tokens were missed: evicted from cpu 10" in explained["explanation"]
        assert service.explain("cmpl-again") is not None
        assert [service.explain(other) for other in ("cmpl-aga", "cmpl", "cmpl-again-0-1a2b3c4", ".*")] == [None] * 4


@pytest.mark.parametrize("prompt", [None, Prompt(tokens=PROMPT, cache_salt="a")], ids=["everything", "a prompt"])
def test_what_a_caller_has_deleted_was_not_evicted(engine: SimulatedVLLM, prompt: Prompt | None) -> None:
    service = service_of_scheduler(engine.scheduler, CHUNK)
    serve(engine, "first", PROMPT)
    assert service.clear(prompt)["deleted_chunks"] > 0
    serve(engine, "again", PROMPT)
    explained = service.explain("again")
    assert explained is not None
    assert explained["missed"]["reason"] == "not_stored"
    assert "evicted" not in explained["explanation"]


def test_a_call_with_several_prompts_and_answers_has_a_part_for_each(engine: SimulatedVLLM) -> None:
    """Named as vLLM does: the number of the answer, the id, the number of the prompt, eight letters."""
    ids = [f"{answer}cmpl-many-{prompt}-1a2b3c4d" for prompt in (0, 1) for answer in ("1_", "0_")]
    for number, name in enumerate([*ids, "0_chatcmpl-one-9f8e7d6c", "1_chatcmpl-one-9f8e7d6c"]):
        serve(engine, name, PROMPT[: len(PROMPT) - number])
    service = service_of_scheduler(engine.scheduler, CHUNK)
    explained = service.explain("cmpl-many")
    assert explained is not None
    parts = [part["request"] for part in explained["parts"]]
    assert parts == [f"{answer}cmpl-many-{prompt}-1a2b3c4d" for prompt in (0, 1) for answer in ("0_", "1_")]
    assert explained["request"] == parts[0]
    assert all(part["explanation"] for part in explained["parts"])
    one = service.explain("chatcmpl-one")
    assert one is not None
    assert [part["request"][:2] for part in one["parts"]] == ["0_", "1_"]
    prompt = service.explain("cmpl-many-1")
    assert prompt is not None
    assert len(prompt["parts"]) == 2
    exact = service.explain("1_chatcmpl-one-9f8e7d6c")
    assert exact is not None
    assert "parts" not in exact
    with serving(service) as (server,), Client(server.url, TOKEN) as client:
        assert [part["engine"] for part in client.explain("cmpl-many")["parts"]] == [0] * 4


def test_of_two_calls_with_one_id_the_later_is_explained(engine: SimulatedVLLM) -> None:
    serve(engine, "mine-0-11111111", PROMPT)
    serve(engine, "mine-0-22222222", PROMPT)
    explained = service_of_scheduler(engine.scheduler, CHUNK).explain("mine")
    assert explained is not None
    assert (explained["request"], "parts" in explained) == ("mine-0-22222222", False)


def test_every_reason_has_its_advice() -> None:
    assert {*ADVICE} == set(REASONS)
