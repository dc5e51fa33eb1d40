"""Two vLLM servers on a node over one folder in memory: what one has stored the other loads."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from tests.kit import LIMIT, eventually
from tests.vllm.harness import TELLS_SOURCES, prompt
from tests.vllm.server import SERVED_NAME, Server, serving_together

LENGTH = 1500


def ask(server: Server, ids: list[int]) -> Any:
    from openai import OpenAI

    with OpenAI(base_url=f"{server.url}/v1", api_key="none", timeout=5 * LIMIT, max_retries=0) as client:
        return client.completions.create(
            model=SERVED_NAME,
            prompt=ids,
            max_tokens=8,
            temperature=0,
            extra_body={"kv_transfer_params": {"lmkv.report": True}},
        )


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
            first = ask(one, ids)
            eventually(lambda number=number: files() == 6 * number, "six new files")
            if number == 2:
                one.kill()
            second = ask(two, ids)
            assert second.kv_transfer_params["lmkv"]["sources"] == {"cpu": 0, "shared_memory": LENGTH - 1}
            assert second.choices[0].text == first.choices[0].text
        from_host = two.metric("vllm:prompt_tokens_cached_by_source_total", source="host")
        assert from_host == (2 * (LENGTH - 1) if TELLS_SOURCES else 0)
        assert [line for line in two.log_text().splitlines() if "lmkv" in line and "WARNING" in line] == []
