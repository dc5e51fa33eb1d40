"""The agent API in a real engine: what it finds is what requests hit."""

from __future__ import annotations

import logging
import os
from pathlib import Path
from typing import Any

import httpx
import pytest

from lmkv.agent.client import Client
from tests.kit import LIMIT, eventually
from tests.vllm.harness import engine, external_hits
from tests.vllm.server import SERVED_NAME, Server, serving_together

TEXT = "The same words are before every question. " * 40
"""A token per byte."""


def test_a_prompt_is_prefetched_from_disk_before_its_request(
    model: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    extra = {
        "local_disk": str(tmp_path / "kv"),
        "max_local_disk_size": 1.0,
        "max_local_cpu_size": 0.125,
        "disk_min_free": 0.0,
        "agent_listen": "127.0.0.1:0",
        "agent_token": "letmein",
    }
    logging.getLogger("lmkv").propagate = True
    with caplog.at_level("INFO", "lmkv"), engine(model, extra=extra, skip_tokenizer_init=False) as first:
        url = next(line.split()[-1] for line in caplog.messages if "the agent API is at" in line)
        ids = first.llm.get_tokenizer().encode(TEXT)
        with Client(url, "letmein") as client:
            assert client.lookup(TEXT) == {"total_tokens": len(ids), "hit_tokens": 0, "sources": {}}
            cold = first.run([ids])[0]
            assert first.store.drain(LIMIT)
            assert client.lookup(TEXT)["hit_tokens"] == len(ids) - 1, "as a request does"
            # As if it had been evicted.
            first.store.drop(first.connector.sides.scheduler.keys_of(ids, None, {}))
            first.forget_local()
            assert client.lookup(ids)["sources"] == {"disk": len(ids) - 1}
            assert client.prefetch(TEXT, wait=LIMIT)["ready_tokens"] == len(ids)
            warm = first.run([ids])[0]
            assert external_hits(warm) == len(ids) - 1
            assert warm.kv_transfer_params["lmkv"]["sources"] == {"cpu": len(ids) - 1}
            assert warm.outputs[0].token_ids == cold.outputs[0].token_ids
            latest, earlier = client.requests()["requests"]
            assert latest["sources"] == {"cpu": len(ids) - 1}
            assert earlier["missed"] == {"reason": "not_stored", "tokens": len(ids) - 1}
            explained = client.explain(warm.request_id)
            assert f"lmkv loaded {len(ids) - 1:,} from cpu" in explained["explanation"]
            assert client.stats()["hit_tokens"] == len(ids) - 1
            messages = [{"role": "user", "content": TEXT}]
            total = client.lookup(messages)["total_tokens"]
            assert total > len(TEXT)
            assert client.lookup(messages, chat_template_kwargs={"add_generation_prompt": True})["total_tokens"] > total
            with pytest.raises(httpx.HTTPStatusError, match=r"400 .*max_length, padding"):
                client.lookup(messages, chat_template_kwargs={"padding": "max_length", "max_length": 50_000_000})
            with pytest.raises(
                httpx.HTTPStatusError, match=r"400 .* tokens, and this engine takes .* \(max_model_len\)"
            ):
                client.lookup(TEXT * 100)
            client.clear()
            assert external_hits(first.again([ids])[0]) == 0
    with pytest.raises(httpx.ConnectError), Client(url, "letmein") as client:
        client.stats()


@pytest.mark.nightly("fleet")
def test_one_address_answers_for_both_engines_of_a_server(model: Path, tmp_path: Path) -> None:
    path = f"/tmp/lmkv-{os.getpid()}-engines.sock"
    options = {"local_disk": str(tmp_path / "kv"), "max_local_cpu_size": 0.125, "disk_min_free": 0.0}
    options |= {"max_local_disk_size": 1.0, "agent_listen": f"unix:{path}"}
    made = Server(model, tmp_path / "log", options, engines=2)

    def complete(engine: int) -> Any:
        body = {"model": SERVED_NAME, "prompt": TEXT, "max_tokens": 1}
        headers = {"X-data-parallel-rank": str(engine)}
        answer = httpx.post(f"{server.url}/v1/completions", json=body, headers=headers, timeout=LIMIT)
        return answer.raise_for_status().json()

    with serving_together(made) as (server,), Client(f"unix:{path}") as client:
        eventually(lambda: len(client.stats().get("engines", ())) == 2, "the second engine's announcement")
        complete(0)
        eventually(
            lambda: client.lookup(TEXT, engine=1)["sources"] == {"disk": len(TEXT) - 1}, "the chunks on the disk"
        )
        ready = client.prefetch(TEXT, wait=LIMIT, engine=1)
        assert ready["ready_tokens"] == len(TEXT)
        answer = complete(1)
        explained = client.explain(answer["id"])
        assert (explained["engine"], explained["sources"]) == (1, {"cpu": len(TEXT) - 1})
        assert [each["engine"] for each in client.requests()["requests"]] == [1, 0]
        assert client.clear()["deleted_chunks"] > 0
        assert client.lookup(TEXT)["hit_tokens"] == 0
    for left in Path("/tmp").glob(f"{Path(path).name}*"):
        # vLLM does not wait long for an engine's end; the next start would replace it.
        left.unlink()
