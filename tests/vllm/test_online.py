"""vLLM's OpenAI server with lmkv, as users run it: processes, HTTP, metrics, logs; and a killed server."""

from __future__ import annotations

import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.kit import LIMIT, eventually
from tests.pages import extracted
from tests.terminal import assert_top_follows
from tests.vllm.harness import BLOCK, TELLS_SOURCES, prompt
from tests.vllm.server import SERVED_NAME, Server, child_environment, complete, serving

LENGTH, HIT = 1500, 1499
EXAMPLES = Path(__file__).parents[2] / "examples"
LOOKUP = "lmkv: request {} has {} tokens: lmkv found {} and loads {}"


@pytest.fixture(scope="module")
def disk(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("kv")


def options(disk: Path) -> dict[str, Any]:
    return {
        "max_local_cpu_size": 0.25,
        "local_disk": f"file://{disk}",
        "max_local_disk_size": 1.0,
        "disk_min_free": 0.0,
        "prefetch_deadline": LIMIT,
        "load_or_recompute": False,
        "agent_listen": "127.0.0.1:0",
        "agent_token": "letmein",
    }


@pytest.fixture(scope="module")
def server(model: Path, disk: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    log = tmp_path_factory.mktemp("log") / "server.log"
    with serving(model, log, **options(disk)) as running:
        yield running


def ask(server: Server, ids: list[int], *, params: dict[str, Any] | None = None, **body: Any) -> Any:
    return complete(server.url, ids, params=params or {}, **body)


def report(answer: Any) -> dict[str, Any]:
    found: dict[str, Any] = answer.kv_transfer_params["lmkv"]
    return found


def printed_by(script: Path, *arguments: str, **env: str) -> str:
    done = subprocess.run(
        [sys.executable, script, *arguments],
        env=child_environment(**env),
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    assert (done.returncode, done.stderr) == (0, "")
    return done.stdout


TEMPLATE = 50
"""More tokens than the chat's template adds."""


def text_of(seed: int, characters: int) -> str:
    """Letters, of which the model's tokenizer makes a token each."""
    return "".join(chr(ord("a") + token % 26) for token in prompt(seed, characters))


def overwrite(server: Server, seed: int) -> None:
    """Fill vLLM's KV space, of little more than two prompts, with others."""
    for number in range(4):
        ask(server, prompt(10_000 + 10 * seed + number, 1900))


def test_a_repeated_prompt_hits_when_vllm_has_forgotten_it(server: Server) -> None:
    ids = prompt(60, LENGTH)
    cold = ask(server, ids)
    overwrite(server, 60)
    before = (
        server.metric("vllm:external_prefix_cache_hits_total"),
        server.metric("vllm:prompt_tokens_cached_by_source_total", source="host"),
    )
    warm = ask(server, ids)

    assert cold.usage.prompt_tokens_details.cached_tokens == 0
    assert warm.usage.prompt_tokens_details.cached_tokens == HIT
    assert warm.choices[0].text == cold.choices[0].text
    assert server.metric("vllm:external_prefix_cache_hits_total") == before[0] + HIT
    from_host = server.metric("vllm:prompt_tokens_cached_by_source_total", source="host") - before[1]
    assert from_host == (HIT if TELLS_SOURCES else 0)


def test_the_body_asks_and_the_answer_reports(server: Server) -> None:
    ids = prompt(61, LENGTH)
    assert report(ask(server, ids))["hit_tokens"] == 0
    overwrite(server, 61)
    found = report(ask(server, ids))
    assert (found["hit_tokens"], found["sources"]) == (HIT, {"cpu": HIT})
    assert found["load_bytes"] == -(-HIT // BLOCK) * BLOCK * 4096
    assert found["load_seconds"] > 0
    overwrite(server, 62)
    assert report(ask(server, ids, params={"lmkv.skip_load": True}))["hit_tokens"] == 0


def test_salts_in_the_body_never_share(server: Server) -> None:
    ids = prompt(62, LENGTH)
    for salt in ("tenant-a", "tenant-b"):
        assert report(ask(server, ids, cache_salt=salt))["hit_tokens"] == 0
    overwrite(server, 63)
    assert report(ask(server, ids))["hit_tokens"] == 0
    assert report(ask(server, ids, cache_salt="tenant-b"))["hit_tokens"] == HIT


def test_chats_hit_too(server: Server) -> None:
    from openai import OpenAI

    text = text_of(63, LENGTH - TEMPLATE)

    def chat() -> Any:
        with OpenAI(base_url=f"{server.url}/v1", api_key="none", timeout=120, max_retries=0) as client:
            return client.chat.completions.create(
                model=SERVED_NAME,
                messages=[{"role": "user", "content": text}],
                max_tokens=8,
                temperature=0,
                extra_body={"kv_transfer_params": {"lmkv.report": True}},
            )

    cold = chat()
    overwrite(server, 64)
    warm = chat()
    assert (report(cold)["hit_tokens"], report(warm)["hit_tokens"]) == (0, warm.usage.prompt_tokens - 1)
    assert warm.choices[0].message.content == cold.choices[0].message.content


def test_lookups_and_stores_are_in_the_servers_log(server: Server) -> None:
    ids = prompt(64, LENGTH + 1)
    ask(server, ids)
    overwrite(server, 65)
    ask(server, ids)
    length = LENGTH + 1

    def line(hit: int) -> str:
        return LOOKUP.format(r"\S+", length, hit, hit)

    eventually(lambda: bool(re.search(line(length - 1), server.log_text())), line(length - 1))
    info = [line for line in server.log_text().splitlines() if "lmkv: request" in line]
    assert all(" INFO " in line for line in info)
    assert any(re.search(line(0), text) for text in info)
    assert any(re.search(rf"request \S+: stored \d+ of {length} tokens", text) for text in info)


@pytest.mark.parametrize("text", ["a file", "the manual page of bash", "the help of Python"])
def test_query_twice_runs_against_the_server(server: Server, text: str, tmp_path: Path) -> None:
    """Of the characters and the chat's template a token each; the three texts have another beginning."""
    path = {} if text == "the manual page of bash" else {"PATH": str(tmp_path)}  # without man
    sizes = ["--characters", "1500", "--between", "4", "--max-tokens", "8"]
    if text == "a file":
        (tmp_path / "text").write_text(text_of(66, 2000))
        sizes += ["--file", str(tmp_path / "text")]
    printed = printed_by(EXAMPLES / "query_twice.py", "--base-url", f"{server.url}/v1", *sizes, **path)
    asked = re.search(rf"^{SERVED_NAME}, a prompt of (.*) tokens: ", printed, re.MULTILINE)
    warm = re.search(r"^Warm TTFT: \d+\.\d{3} s, (.*) tokens not computed$", printed, re.MULTILINE)
    assert asked, printed
    assert warm, printed
    total, loaded = (int(found[1].replace(",", "")) for found in (asked, warm))
    assert 1500 < total < 1700
    assert (total - 1) // 256 * 256 <= loaded < total
    assert re.search(r"^Cold TTFT: \d+\.\d{3} s, \d{1,2} tokens not computed$", printed, re.MULTILINE)
    assert re.search(r"^TTFT improvement: -?\d+\.\d{3} s \(\d+\.\dx faster\)$", printed, re.MULTILINE)
    assert "Answers are equal: yes" in printed


def test_top_shows_what_the_engine_does(server: Server) -> None:
    assert_top_follows(server.agent, "letmein", lambda: ask(server, prompt(68, LENGTH)))


def test_a_query_is_cold_again_with_another_beginning(server: Server, tmp_path: Path) -> None:
    (tmp_path / "text").write_text(text_of(67, 1500))
    query = ["--base-url", f"{server.url}/v1", "--file", str(tmp_path / "text"), "--max-tokens", "1"]

    def cold(*more: str) -> int:
        printed = printed_by(EXAMPLES / "query_twice.py", *query, *more)
        found = re.search(r"^Cold TTFT: .* s, (.*) tokens not computed$", printed, re.MULTILINE)
        assert found, printed
        return int(found[1].replace(",", ""))

    assert cold() < 100
    assert cold() >= 1280
    assert cold("--prefix", "again") < 100


def test_a_killed_server_hits_disk_when_it_is_started_again(
    server: Server, model: Path, disk: Path, tmp_path: Path
) -> None:
    ids = prompt(65, LENGTH)
    extracted("tutorial.md", tmp_path)
    before = len(list(disk.rglob("*.kv1")))
    cold = ask(server, ids)
    assert printed_by(tmp_path / "prefetch.py", server.url) == "loaded from {}\n"
    eventually(lambda: len(list(disk.rglob("*.kv1"))) >= before + 5 + 7, "twelve new files")
    server.kill()
    with serving(model, tmp_path / "second.log", **options(disk)) as second:
        assert printed_by(tmp_path / "prefetch.py", second.url) == "loaded from {'cpu': 1799}\n"
        warm = ask(second, ids)
        assert report(warm)["sources"] == {"cpu": 0, "disk": HIT}
        assert warm.choices[0].text == cold.choices[0].text
        from_disk = second.metric("vllm:prompt_tokens_cached_by_source_total", source="disk")
        assert from_disk == (HIT if TELLS_SOURCES else 0)
