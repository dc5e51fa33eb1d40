"""Prefill and decode on servers of their own, behind the example's proxy, with a folder in memory between them."""

from __future__ import annotations

import fcntl
import subprocess
import sys
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any
from urllib.request import urlopen

import pytest
from attrs import frozen

from lmkv.backends.disk import folder as usage
from tests.kit import LIMIT, eventually, raised
from tests.servers import free_port, redis_server
from tests.vllm.harness import prompt
from tests.vllm.server import SERVED_NAME, Server, child_environment, complete, serving_together

PROXY = Path(__file__).parents[2] / "examples" / "prefill_decode_proxy.py"
LENGTH = 1500


LONG = 5 * LIMIT
"""Seconds that 8,000 tokens on both servers never take, on however busy a machine."""


@frozen
class Pair:
    prefill: Server
    decode: Server
    proxy: str
    proxy_log: Path
    folder: Path

    def files(self) -> int:
        return len(list(self.folder.rglob("*.kv1")))


@pytest.fixture(scope="module")
def pair(model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Pair]:
    logs = tmp_path_factory.mktemp("log")
    with TemporaryDirectory(prefix="lmkv-test-", dir="/dev/shm") as folder:
        options = {
            "shared_memory": f"file://{folder}",
            "max_shared_memory_size": 0.5,
            "max_local_cpu_size": 0.25,
            "prefetch_deadline": LIMIT,
            "load_or_recompute": False,
        }
        prefill = Server(model, logs / "prefill", options, "kv_producer")
        decode = Server(model, logs / "decode", options, "kv_consumer")
        with serving_together(prefill, decode), proxying(prefill, decode, logs / "proxy") as url:
            yield Pair(prefill, decode, url, logs / "proxy", Path(folder))


@contextmanager
def proxying(prefill: Server, decode: Server, log: Path) -> Iterator[str]:
    """The example's proxy; its URL."""
    port = free_port()
    url = f"http://localhost:{port}"
    command = [sys.executable, PROXY, "--prefill", prefill.url, "--decode", decode.url, "--port", str(port)]
    command += ["--prefill-timeout", str(LONG)]
    with log.open("wb") as sink:
        process = subprocess.Popen(command, stdout=sink, stderr=sink, env=child_environment())
    try:
        eventually(lambda: process.poll() is not None or serves(url), "an answer of the proxy")
        yield url
    finally:
        process.terminate()
        process.wait(LIMIT)


def serves(url: str) -> bool:
    try:
        with urlopen(f"{url}/v1/models", timeout=LIMIT) as answer:
            return SERVED_NAME in answer.read().decode()
    except OSError:
        return False


def hit(answer: Any) -> int:
    return int(answer.kv_transfer_params["lmkv"]["hit_tokens"])


@pytest.mark.parametrize("length", [LENGTH, 5 * 256, 100])
def test_the_decode_server_computes_one_token_of_the_prompt(pair: Pair, length: int) -> None:
    ids = prompt(80 + length, length)
    answer = complete(pair.proxy, ids)
    assert answer.kv_transfer_params["lmkv"]["sources"] == {"cpu": 0, "shared_memory": length - 1}
    assert answer.usage.prompt_tokens_details.cached_tokens == length - 1
    assert answer.choices[0].text == complete(pair.prefill.url, ids).choices[0].text


def test_chunks_that_are_written_after_the_prefill_servers_answer_are_waited_for(pair: Pair) -> None:
    """Somebody has the lock on the count of the folder's bytes, for which each write waits a while."""
    ids = prompt(79, LENGTH)
    with (pair.folder / usage.USAGE_FILE).open("rb") as count:
        fcntl.flock(count, fcntl.LOCK_EX)
        answer = complete(pair.proxy, ids)
    assert hit(answer) == LENGTH - 1
    assert answer.choices[0].text == complete(pair.prefill.url, ids).choices[0].text


def test_many_at_a_time(pair: Pair) -> None:
    prompts = [prompt(90 + number, 700) for number in range(8)]
    with ThreadPoolExecutor(len(prompts)) as pool:
        answers = list(pool.map(lambda ids: complete(pair.proxy, ids), prompts))
    # Hits of its first run: after a preemption vLLM's own cache has a part of it.
    assert [answer.usage.prompt_tokens_details.cached_tokens for answer in answers] == [699] * len(prompts)
    for ids, answer in zip(prompts, answers, strict=True):
        assert answer.choices[0].text == complete(pair.prefill.url, ids).choices[0].text


def test_a_chat_streams_through_the_proxy(pair: Pair) -> None:
    from openai import OpenAI

    text = "".join(chr(ord("a") + token % 26) for token in prompt(81, 1000))
    with OpenAI(base_url=f"{pair.proxy}/v1", api_key="none", timeout=LONG, max_retries=0) as client:
        asked: Any = {"model": SERVED_NAME, "messages": [{"role": "user", "content": text}], "temperature": 0}
        events = list(
            client.chat.completions.create(
                **asked, max_completion_tokens=8, stream=True, stream_options={"include_usage": True}
            )
        )
    words = [event.choices[0].delta.content or "" for event in events if event.choices]
    usage = events[-1].usage
    assert len(words) > 2, "word by word"
    assert usage.completion_tokens == 8
    assert usage.prompt_tokens_details.cached_tokens == usage.prompt_tokens - 1
    with OpenAI(base_url=f"{pair.prefill.url}/v1", api_key="none", timeout=LONG, max_retries=0) as client:
        alone = client.chat.completions.create(**asked, max_completion_tokens=8)
    assert "".join(words) == alone.choices[0].message.content


def test_errors_come_from_the_decode_server(pair: Pair) -> None:
    from openai import BadRequestError

    raised(BadRequestError, "2048", lambda: complete(pair.proxy, prompt(82, 3000)))


def test_without_the_prefill_server_the_decode_server_computes(pair: Pair) -> None:
    stored, unknown = prompt(83, LENGTH), prompt(84, LENGTH)
    before = pair.files()
    expected = [
        complete(pair.prefill.url, stored),
        complete(pair.prefill.url, unknown, params={"lmkv.skip_save": True}),
    ]
    eventually(lambda: pair.files() == before + 6, "six new files")
    pair.prefill.kill()
    answers = [complete(pair.proxy, stored), complete(pair.proxy, unknown)]
    assert [hit(answer) for answer in answers] == [LENGTH - 1, 0], "what was stored outlives the server"
    assert [answer.choices[0].text for answer in answers] == [answer.choices[0].text for answer in expected]
    assert pair.proxy_log.read_text().count("the decode server computes the prompt") >= 2


@pytest.mark.nightly("fleet")
def test_a_long_prompt_over_a_remote_store(model: Path, tmp_path: Path) -> None:
    with redis_server("valkey", tmp_path) as store:
        options = {
            "remote_url": store.url,
            "remote_timeout": LIMIT,
            "max_local_cpu_size": 0.25,
            "prefetch_deadline": LIMIT,
            "load_or_recompute": False,
        }
        prefill = Server(model, tmp_path / "prefill", options, "kv_producer", 8192)
        decode = Server(model, tmp_path / "decode", options, "kv_consumer", 8192)
        with serving_together(prefill, decode), proxying(prefill, decode, tmp_path / "proxy") as url:
            ids = prompt(95, 8000)
            answer = complete(url, ids)
            assert hit(answer) == 7999
            # Chunks that were prefetched while the rest was being written count for host memory by then.
            sources = answer.kv_transfer_params["lmkv"]["sources"]
            assert sources["redis"] > 0
            assert sources["cpu"] + sources["redis"] == 7999
            assert answer.choices[0].text == complete(prefill.url, ids).choices[0].text
