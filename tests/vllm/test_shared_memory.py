"""vLLM servers on a node over one folder in memory: what one has stored the others load."""

from __future__ import annotations

from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

import pytest

from lmkv.testing import ManualClock
from tests.kit import LIMIT, eventually
from tests.vllm.harness import TELLS_SOURCES, Engine, engine, prompt
from tests.vllm.server import Server, complete, serving_together

LENGTH = 1500


def test_what_one_stores_the_other_loads_and_has_when_that_one_is_killed(
    model: Path, memory_path: Path, tmp_path: Path
) -> None:
    options = {
        "shared_memory": f"file://{memory_path}",
        "max_shared_memory_size": 0.5,
        "max_local_cpu_size": 0.25,
        "prefetch_deadline": LIMIT,
        "load_or_recompute": False,
    }

    def files() -> int:
        return len(list(memory_path.rglob("*.kv1")))

    with serving_together(*(Server(model, tmp_path / f"{name}.log", options) for name in ("one", "two"))) as (one, two):
        for number, ids in enumerate([prompt(100, LENGTH), prompt(101, LENGTH)], 1):
            first = complete(one.url, ids)
            eventually(lambda number=number: files() == 6 * number, "six new files")
            if number == 2:
                one.kill()
            second = complete(two.url, ids)
            assert second.kv_transfer_params["lmkv"]["sources"] == {"cpu": 0, "shared_memory": LENGTH - 1}
            assert second.choices[0].text == first.choices[0].text
        from_host = two.metric("vllm:prompt_tokens_cached_by_source_total", source="host")
        assert from_host == (2 * (LENGTH - 1) if TELLS_SOURCES else 0)
        assert [line for line in two.log_text().splitlines() if "lmkv" in line and "WARNING" in line] == []


def over_memory(model: Path, folder: Path, **options: Any) -> AbstractContextManager[Engine]:
    """An engine for which no time passes, over a folder in memory."""
    extra = {"shared_memory": f"file://{folder}", "max_shared_memory_size": 0.5, "max_local_cpu_size": 0.25}
    return engine(model, clock=ManualClock(), extra={**extra, **options.pop("extra", {})}, **options)


def hits(output: Any) -> dict[str, int]:
    return dict(output.kv_transfer_params["lmkv"]["sources"])


@pytest.mark.parametrize(
    "options", [{}, {"extra": {"load_mode": "async"}}, {"kv_load_failure_policy": "fail"}], ids=str
)
def test_a_hit_passes_through_host_memory(model: Path, memory_path: Path, options: dict[str, Any]) -> None:
    ids = prompt(103, LENGTH)
    with over_memory(model, memory_path) as first:
        cold = first.run([ids])[0]
        assert first.store.drain(LIMIT)
    with over_memory(model, memory_path, **options) as second:
        warm = second.run([ids])[0]
        assert hits(warm) == {"cpu": 0, "shared_memory": LENGTH - 1}
        assert warm.outputs[0].token_ids == cold.outputs[0].token_ids
        assert second.store.stats().tiers[0].hits == 6
        second.assert_nothing_leaked()


@pytest.mark.parametrize("how", ["lost", "damaged"])
def test_what_cannot_be_read_is_computed(model: Path, memory_path: Path, how: str) -> None:
    ids = prompt(104, LENGTH)
    with over_memory(model, memory_path) as first:
        cold = first.run([ids])[0]
        assert first.store.drain(LIMIT)
    with over_memory(model, memory_path) as second:
        assert second.store.drain(LIMIT)
        for path in sorted(memory_path.rglob("*.kv1"))[::2]:
            if how == "lost":
                path.unlink()
            else:
                data = bytearray(path.read_bytes())
                data[len(data) // 2] ^= 1
                path.write_bytes(data)
        found = []
        # Each request finds at least one more of the three that are gone.
        for _ in range(4):
            warm = second.run([ids])[0]
            assert warm.outputs[0].token_ids == cold.outputs[0].token_ids
            found.append(sum(hits(warm).values()))
            assert second.store.drain(LIMIT)
            second.forget_local()
        assert found[0] < LENGTH - 1 == found[-1]
        second.assert_nothing_leaked()
