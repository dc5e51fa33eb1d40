"""lmkv among vLLM's other connectors: whoever has a hit loads it, all of them store, and none breaks another."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from tests.kit import eventually
from tests.servers import free_port, needs_package
from tests.vllm.harness import BLOCK, Engine, engine, external_hits, prompt
from tests.vllm.test_kv_events import RAM, block_hashes, publishing, subscriber

LMKV = {"kv_connector": "LMKVConnector", "kv_role": "kv_both", "kv_load_failure_policy": "recompute"}
LENGTH = 1500
STORED_BY_EXAMPLE = (LENGTH - 1) // BLOCK * BLOCK
"""Tokens of such a prompt that vLLM's ExampleConnector offers: whole blocks before the last token."""


def lmkv(**extra: Any) -> dict[str, Any]:
    return {**LMKV, "kv_connector_extra_config": {"max_local_cpu_size": 0.25, **extra}}


def example(folder: Path) -> dict[str, Any]:
    folder.mkdir()
    return {
        "kv_connector": "ExampleConnector",
        "kv_role": "kv_both",
        "kv_connector_extra_config": {"shared_storage_path": str(folder)},
    }


class Several(Engine):
    """An engine with several connectors, of which lmkv's is number `place`."""

    place = 0

    @property
    def connector(self) -> Any:
        # vLLM 0.29 has no public name for them.
        return self.scheduler.connector._connectors[self.place]

    @property
    def worker(self) -> Any:
        from vllm.distributed.kv_transfer import get_kv_transfer_group

        return get_kv_transfer_group()._connectors[self.place]._worker


@contextmanager
def several(model: Path, *children: dict[str, Any], **options: Any) -> Iterator[Several]:
    """An engine whose connectors are `children`, with the whole prompt in one step, as ExampleConnector wants it."""
    transfer = {"kv_connector_extra_config": {"connectors": list(children)}}
    options = {"max_num_batched_tokens": 2048, "disable_hybrid_kv_cache_manager": True, **options}
    with engine(model, "MultiConnector", transfer=transfer, **options) as running:
        found = Several(running.llm)
        found.place = children.index(next(child for child in children if child["kv_connector"] == "LMKVConnector"))
        yield found


def both(model: Path, folder: Path, first: str, **options: Any) -> Any:
    children = [lmkv(), example(folder)]
    return several(model, *(children if first == "lmkv" else reversed(children)), **options)


def cached(output: Any) -> int:
    """Tokens of the prompt that vLLM did not compute, whoever had them."""
    return int(output.num_cached_tokens)


def answer(output: Any) -> list[int]:
    return list(output.outputs[0].token_ids)


def test_a_second_one_of_lmkv_caches_nothing_and_says_so(model: Path, caplog: pytest.LogCaptureFixture) -> None:
    """Both would answer a request that asks for its report, and vLLM ends where two connectors do."""
    ids = prompt(169, LENGTH)
    with caplog.at_level("WARNING", "lmkv"), several(model, lmkv(), lmkv(chunk_size=64)) as running:
        cold = running.run([ids])[0]
        warm = running.again([ids])[0]
        assert (external_hits(cold), external_hits(warm)) == (0, LENGTH - 1)
        assert answer(warm) == answer(cold)
        running.assert_nothing_leaked()
    said = [record.getMessage() for record in caplog.records if "another LMKVConnector" in record.getMessage()]
    assert len(said) == 2, "the scheduler's side and the worker's"


@pytest.mark.runner_v2
@pytest.mark.parametrize("first", ["lmkv", "example"])
def test_a_repeated_prompt_is_loaded_by_the_first_connector(
    model: Path, tmp_path: Path, expected: dict[int, list[int]], first: str
) -> None:
    prompts = {seed: prompt(seed, LENGTH) for seed in range(4)}
    with both(model, tmp_path / "example", first) as running:
        for seed, ids in prompts.items():
            cold = running.run([ids])[0]
            assert (answer(cold), cached(cold)) == (expected[seed], 0)
        assert len(list((tmp_path / "example").iterdir())) == len(prompts), "both have stored"
        warm = running.again(list(prompts.values()))
        assert list(map(answer, warm)) == [expected[seed] for seed in prompts]
        by_lmkv = LENGTH - 1 if first == "lmkv" else 0
        assert list(map(external_hits, warm)) == [by_lmkv] * len(prompts)
        assert list(map(cached, warm)) == [by_lmkv or STORED_BY_EXAMPLE] * len(prompts)
        running.assert_nothing_leaked()


@pytest.mark.parametrize("first", ["lmkv", "example"])
@pytest.mark.parametrize("keeps", ["lmkv", "example"])
def test_what_only_one_of_them_has_is_loaded_by_that_one_and_stored_by_the_other(
    model: Path, tmp_path: Path, expected: dict[int, list[int]], first: str, keeps: str
) -> None:
    ids, folder = prompt(0, LENGTH), tmp_path / "example"
    with both(model, folder, first) as running:
        running.run([ids])
        running.forget_local()
        if keeps == "lmkv":
            shutil.rmtree(folder)
        else:
            assert running.store.clear() == 6
        warm = running.run([ids])[0]
        assert answer(warm) == expected[0]
        assert external_hits(warm) == (LENGTH - 1 if keeps == "lmkv" else 0)
        assert cached(warm) == (LENGTH - 1 if keeps == "lmkv" else STORED_BY_EXAMPLE)
        assert running.store.stats().primary.chunks == 6
        stored = running.again([ids], params={"lmkv.skip_load": True})[0]
        assert (answer(stored), cached(stored)) == (expected[0], STORED_BY_EXAMPLE)
        running.assert_nothing_leaked()


@pytest.mark.runner_v2
def test_a_failed_load_is_recomputed_and_leaves_the_other_connector_alone(
    model: Path, tmp_path: Path, expected: dict[int, list[int]]
) -> None:
    """One prompt whose load by lmkv fails, in a batch with one that the other connector loads."""
    mine, theirs = prompt(0, LENGTH), prompt(1, LENGTH)

    with both(model, tmp_path / "example", "lmkv") as running:
        running.run([mine])
        running.run([theirs], params={"lmkv.skip_save": True})
        running.forget_local()
        with running.failing():
            failed, loaded = running.run([mine, theirs])
        assert [answer(failed), answer(loaded)] == [expected[0], expected[1]]
        assert (external_hits(failed), external_hits(loaded)) == (0, 0)
        assert cached(loaded) == STORED_BY_EXAMPLE
        again = running.again([mine, theirs])
        assert list(map(answer, again)) == [expected[0], expected[1]]
        assert list(map(external_hits, again)) == [LENGTH - 1] * 2, "both were stored anew"
        running.forget_local()
        # The failure did not spoil the other connector's chunks either.
        others = running.run([mine, theirs], params={"lmkv.skip_load": True})
        assert list(map(answer, others)) == [expected[0], expected[1]]
        assert list(map(cached, others)) == [STORED_BY_EXAMPLE] * 2
        running.assert_nothing_leaked()


def test_events_pass_through(model: Path, tmp_path: Path) -> None:
    children = [lmkv(), example(tmp_path / "example")]
    ids = prompt(2, LENGTH)
    with several(model, *children, **publishing(tmp_path)) as running, subscriber(tmp_path) as events:
        running.run([ids], max_tokens=1)
        blocks = set(block_hashes(running, ids))
        eventually(lambda: events.read().places == {RAM: blocks})


def test_with_nixl_a_repeated_prompt_is_loaded_by_lmkv(
    model: Path, expected: dict[int, list[int]], monkeypatch: pytest.MonkeyPatch
) -> None:
    needs_package("nixl", "pip install --no-deps nixl nixl-cu13")
    nixl = {
        "kv_connector": "NixlConnector",
        "kv_role": "kv_both",
        "kv_buffer_device": "cpu",
        "kv_connector_extra_config": {"backends": ["UCX"]},
    }
    # Nothing but this host's loopback.
    monkeypatch.setenv("UCX_TLS", "tcp,self")
    monkeypatch.setenv("UCX_NET_DEVICES", "lo")
    monkeypatch.setenv("VLLM_NIXL_SIDE_CHANNEL_HOST", "127.0.0.1")
    monkeypatch.setenv("VLLM_NIXL_SIDE_CHANNEL_PORT", str(free_port()))
    prompts = {seed: prompt(seed, LENGTH) for seed in range(4)}
    with several(model, lmkv(), nixl) as running:
        answers = running.repeats(list(prompts.values()), [LENGTH - 1] * len(prompts))
        assert answers == [expected[seed] for seed in prompts]
