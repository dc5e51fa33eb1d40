"""LoRA adapters that change under one name: what another configuration scales is another adapter."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

import pytest

from tests.vllm.families import Family, llama, write_adapter
from tests.vllm.harness import Engine, external_hits, generated, over_disk, parameters, prompt

LENGTH = 600
IDS = prompt(120, LENGTH)


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return Family(llama).write(tmp_path_factory.mktemp("base"))


def with_adapters(base: Path, folder: Path, **options: Any) -> AbstractContextManager[Engine]:
    return over_disk(base, folder, enable_lora=True, max_lora_rank=8, max_loras=1, **options)


def ask(running: Engine, adapter: Path, number: int = 1, ids: list[int] = IDS) -> tuple[list[int], int]:
    """The answer with an adapter, and the tokens that were loaded for it."""
    asked, params = [{"prompt_token_ids": ids}], parameters(**{"lmkv.report": True})
    [output] = running.llm.generate(asked, params, lora_request=lora(adapter, number), use_tqdm=False)
    return generated([output])[0], external_hits(output)


def lora(adapter: Path, number: int = 1, **more: Any) -> Any:
    from vllm.lora.request import LoRARequest

    return LoRARequest("a", number, str(adapter), **more)


def scale(adapter: Path, alpha: int) -> None:
    file = adapter / "adapter_config.json"
    file.write_text(json.dumps({**json.loads(file.read_text()), "lora_alpha": alpha}))


def test_another_scale_is_another_adapter(base: Path, tmp_path: Path) -> None:
    """After a restart, and under another number in the same process."""
    adapter = write_adapter(tmp_path / "adapter", seed=1)
    with with_adapters(base, tmp_path / "kv") as first:
        before, _ = ask(first, adapter)
    scale(adapter, 64)
    with with_adapters(base, tmp_path / "kv") as second:
        after, hit = ask(second, adapter)
        assert hit == 0
        assert after != before
        second.forget_local()
        assert ask(second, adapter) == (after, LENGTH - 1)
        second.forget_local()
        scale(adapter, 8)
        again, hit = ask(second, adapter, number=2)
        assert (again, hit) == (before, LENGTH - 1), "what the first engine has stored"
        second.assert_nothing_leaked()


def test_an_adapter_that_is_replaced_after_vllm_has_loaded_it(base: Path, tmp_path: Path) -> None:
    """Before its first request: what vLLM computes is neither the old files' nor the new ones'."""
    adapter, trained = write_adapter(tmp_path / "adapter", seed=1), write_adapter(tmp_path / "trained", seed=2)
    with with_adapters(base, tmp_path / "kv") as first:
        preload(first, adapter)
        for file in trained.iterdir():
            file.rename(adapter / file.name)
        old, hit = ask(first, adapter)
        first.forget_local()
        assert ask(first, adapter) == (old, 0), "vLLM may drop it, and read the new files"
    with with_adapters(base, tmp_path / "kv") as restarted:
        new, hit = ask(restarted, adapter)
        assert hit == 0
        assert new != old


def preload(running: Engine, adapter: Path, **more: Any) -> None:
    assert running.llm.llm_engine.add_lora(lora(adapter, **more))


def test_an_adapter_that_was_loaded_before_its_first_request_hits(base: Path, tmp_path: Path) -> None:
    adapter = write_adapter(tmp_path / "adapter", seed=1)
    with with_adapters(base, tmp_path / "kv") as first:
        before, _ = ask(first, adapter)
    with with_adapters(base, tmp_path / "kv") as second:
        preload(second, adapter)
        assert ask(second, adapter) == (before, LENGTH - 1)
        second.assert_nothing_leaked()


def test_an_adapter_that_vllm_has_dropped_and_read_again(base: Path, tmp_path: Path) -> None:
    """Other files by then: requests for it are computed, by whichever vLLM has."""
    adapter, other = write_adapter(tmp_path / "adapter", seed=1), write_adapter(tmp_path / "other", seed=3)
    trained = write_adapter(tmp_path / "trained", seed=2)
    with with_adapters(base, tmp_path / "kv", max_cpu_loras=1) as running:
        old, _ = ask(running, adapter)
        running.forget_local()
        assert ask(running, adapter) == (old, LENGTH - 1)
        for file in trained.iterdir():
            file.rename(adapter / file.name)
        ask(running, other, number=2)
        running.forget_local()
        new, hit = ask(running, adapter)
        assert hit == 0
        assert new != old


def switch(running: Engine, adapter: Path, trained: Path) -> int:
    """Another adapter of the same name and number, loaded in place; returns the number."""
    take(adapter, trained)
    preload(running, adapter, load_inplace=True)
    return 1


def replace(running: Engine, adapter: Path, trained: Path) -> int:
    take(adapter, trained)
    running.llm.llm_engine.remove_lora(1)
    return 1


def renumber(running: Engine, adapter: Path, trained: Path) -> int:
    take(adapter, trained)
    return 2


def take(adapter: Path, trained: Path) -> None:
    for file in trained.iterdir():
        shutil.copyfile(file, adapter / f".{file.name}")
        (adapter / f".{file.name}").rename(adapter / file.name)


@pytest.mark.parametrize("change", [switch, replace, renumber])
def test_what_vllm_has_cached_under_the_name_of_an_adapter_is_not_anothers(
    base: Path, tmp_path: Path, change: Callable[[Engine, Path, Path], int]
) -> None:
    """vLLM's prefix cache knows adapters by their names alone."""
    adapter, trained = write_adapter(tmp_path / "adapter", seed=1), write_adapter(tmp_path / "trained", seed=2)
    with with_adapters(base, tmp_path / "other") as alone:
        right, _ = ask(alone, trained)
    with with_adapters(base, tmp_path / "kv", max_cpu_loras=2) as running:
        assert ask(running, adapter)[0] != right
        number = change(running, adapter, trained)
        assert ask(running, adapter, number)[0] == right
        running.forget_local()
        assert ask(running, adapter, number)[0] == right
    with with_adapters(base, tmp_path / "kv") as restarted:
        assert ask(restarted, adapter) == (right, LENGTH - 1)


def test_an_adapter_that_a_call_changes_in_place_is_another_one(base: Path, tmp_path: Path) -> None:
    def change(network: Any) -> None:
        for layer in network.modules():
            for weight in getattr(layer, "lora_b_stacked", ()):
                weight.mul_(-2)

    adapter = write_adapter(tmp_path / "adapter", seed=1)
    with with_adapters(base, tmp_path / "kv") as running:
        before, _ = ask(running, adapter)
        running.llm.apply_model(change)
        after, hit = ask(running, adapter)
        assert hit == 0
        assert after != before
        longer, _ = ask(running, adapter, ids=[*IDS, *IDS[:300]])
    with with_adapters(base, tmp_path / "kv") as restarted:
        assert ask(restarted, adapter) == (before, LENGTH - 1)
        found, hit = ask(restarted, adapter, ids=[*IDS, *IDS[:300]])
        assert hit <= LENGTH
        assert found != longer


def begun(running: Engine, adapter: Path, number: int, tokens: int) -> Callable[[int], list[int]]:
    return running.begin(IDS, tokens, lora(adapter, number))


def test_a_request_with_another_adapter_leaves_a_running_ones_where_it_is(base: Path, tmp_path: Path) -> None:
    """vLLM has room for one adapter: it would read the first one again, whose files are gone."""
    adapter, other = write_adapter(tmp_path / "adapter", seed=1), write_adapter(tmp_path / "other", seed=2)
    with with_adapters(base, tmp_path / "kv", max_cpu_loras=1) as running:
        first = begun(running, adapter, 1, 30)
        first(2)
        adapter.rename(tmp_path / "gone")
        second = begun(running, other, 2, 8)
        first(30)
        second(8)


def test_what_runs_while_its_adapter_is_replaced_stores_nothing_more(base: Path, tmp_path: Path) -> None:
    """In place, as `load_lora_adapter` has it: chunks of both would be stored as those of the first one."""
    adapter, other = write_adapter(tmp_path / "adapter", seed=1), write_adapter(tmp_path / "other", seed=2)
    with with_adapters(base, tmp_path / "kv") as running:
        across = begun(running, adapter, 1, 600)
        across(1)
        preload(running, other, load_inplace=True)
        across(600)
        follow = [*IDS, *across(600)]
    with with_adapters(base, tmp_path / "kv") as restarted:
        assert 0 < ask(restarted, adapter, ids=follow)[1] < LENGTH


def test_a_number_that_means_another_adapter_now(base: Path, tmp_path: Path) -> None:
    adapter, other = write_adapter(tmp_path / "adapter", seed=1), write_adapter(tmp_path / "other", seed=2)
    third = write_adapter(tmp_path / "third", seed=3)
    with with_adapters(base, tmp_path / "kv", max_cpu_loras=1) as running:
        ask(running, adapter, number=1)
        ask(running, third, number=2)
        has_other, _ = ask(running, other, number=1)
        running.forget_local()
        # vLLM goes by the number, and computes with the other one.
        assert ask(running, adapter, number=1) == (has_other, 0)
        running.forget_local()
        assert ask(running, other, number=1) == (has_other, LENGTH - 1)
