"""examples/agent_prefetch.py, against real servers that forget the conversation in each turn, on disk and in Redis."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from lmkv.agent.client import Client
from tests.kit import LIMIT
from tests.pages import ROOT
from tests.servers import redis_server
from tests.vllm.harness import prompt
from tests.vllm.server import Server, serving
from tests.vllm.test_examples import run

CHUNK_BYTES = 1 << 20
TURN = re.compile(r"^turn \d +(with|without): TTFT \d+\.\d{3} s, tokens loaded: (.*)$", re.MULTILINE)
SEARCH = {"type": "function", "function": {"description": "Searches.", "name": "search"}}


@pytest.fixture(params=["disk", pytest.param("redis", marks=pytest.mark.nightly("fleet"))])
def below(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[tuple[str, dict[str, Any]]]:
    """The name of a tier, and its settings."""
    if request.param == "disk":
        yield "disk", {"local_disk": str(tmp_path / "kv"), "max_local_disk_size": 1.0, "disk_min_free": 0.0}
    else:
        with redis_server("valkey", tmp_path) as redis:
            yield "redis", {"remote_url": redis.url}


@pytest.fixture
def server(model: Path, tmp_path: Path, below: tuple[str, dict[str, Any]]) -> Iterator[Server]:
    """With room for a few prompts of others, or for the conversation, in host memory and in vLLM.

    In half of host memory the writes of two prompts may wait: a store that is slow for a moment loses none of them.
    """
    sizes = {"max_local_cpu_size": 24 * CHUNK_BYTES / 2**30, "prefetch_deadline": LIMIT, "load_or_recompute": False}
    agent = {"agent_listen": "127.0.0.1:0", "agent_token": "letmein"}
    with serving(model, tmp_path / "server.log", **sizes, **agent, **below[1]) as running:
        yield running


def text_of(characters: int) -> str:
    """Letters, of which the model's tokenizer makes a token each."""
    return "".join(chr(ord("a") + token % 26) for token in prompt(68, characters))


def test_an_agent_finds_in_host_memory_what_it_has_prefetched(
    server: Server, below: tuple[str, dict[str, Any]], tmp_path: Path
) -> None:
    """Without the prefetch it is still where it was."""
    (tmp_path / "text").write_text(text_of(900))
    where = ["--base-url", f"{server.url}/v1", "--agent", server.agent, "--token", "letmein", "--wait"]
    what = ["--file", tmp_path / "text", "--folder", ROOT / "docs", "--turns", "2", "--others", "6"]
    printed = run(ROOT / "examples" / "agent_prefetch.py", *where, *map(str, what))
    turns = TURN.findall(printed)
    assert [name for name, _ in turns] == ["without", "with"] * 2, printed
    for name, loaded in turns:
        found = {tier: int(tokens.replace(",", "")) for tokens, tier in re.findall(r"([\d,]+) from (\w+)", loaded)}
        assert sum(found.values()) >= 1024, printed
        assert (below[0] in found) == (name == "without"), printed
        assert name == "without" or {*found} == {"cpu"}, printed
    assert re.search(r"^Median TTFT without prefetch: .* s, with: .* s \(.*x faster\)$", printed, re.MULTILINE)
    same_tokens(server)


def same_tokens(server: Server) -> None:
    """A chat with tools and calls of them has the tokens that its request would have."""
    call = {"id": "1", "type": "function", "function": {"name": "search", "arguments": '{"b":1,   "a":"\\u00fc"}'}}
    messages = [
        {"role": "user", "content": "Search"},
        {"role": "assistant", "content": None, "tool_calls": [call]},
        {"role": "tool", "tool_call_id": "1", "content": "found"},
    ]
    asked = {"messages": messages, "tools": [SEARCH]}
    ids = server.post("/tokenize", model="small", add_generation_prompt=False, **asked)["tokens"]
    with Client(server.agent, "letmein") as client:
        assert client.lookup(messages, tools=[SEARCH])["total_tokens"] == len(ids)
