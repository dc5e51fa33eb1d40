"""`lmkv lookup`, `prefetch`, `pin`, `unpin`, `clear --url` and `top` against real services, as a user calls them."""

from __future__ import annotations

import http.server
import json
import os
import re
import socket
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import ExitStack, closing
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from hypothesis import example, given, strategies as st
from typer.testing import CliRunner

from lmkv.agent.server import AgentServer
from lmkv.cli.app import app
from lmkv.store.tiered import TieredStore
from lmkv.vllm.assemble import clear_namespace
from tests.agent.rude import RudePeer, as_http, as_json
from tests.agent.serving import (
    NAMESPACE,
    TOKEN,
    put,
    service_of,
    service_of_scheduler,
    serving,
    short_socket,
    store_over,
)
from tests.agent.test_fuzz_peers import REPORT, STATS, answers, nearly
from tests.terminal import assert_top_follows
from tests.vllm.scheduler.simulated_vllm import SimulatedRequest
from tests.vllm.scheduler.test_explain import CHUNK, OTHERS, PROMPT, engine_of

TEXT = "the 24 bytes of a prompt"


def run(*words: object, typed: str | None = None, **environment: str) -> Any:
    env = {"COLUMNS": "80", "LMKV_AGENT_TOKEN": TOKEN, "LMKV_AGENT_TOKEN_FILE": None, "LMKV_CONFIG_FILE": None}
    return CliRunner().invoke(app, [str(word) for word in words], input=typed, env={**env, **environment})


def says(*words: object, **given: Any) -> str:
    done = run(*words, **given)
    assert done.exit_code == 0, done.output
    assert max(map(len, done.stdout.splitlines())) <= 80
    return str(done.stdout.strip())


def refused(*words: object, code: int = 1, **given: Any) -> str:
    done = run(*words, **given)
    assert done.exit_code == code, done.output
    assert not done.stdout
    return " ".join(line.strip("│ ") for line in done.stderr.splitlines())


@pytest.fixture
def store(tmp_path: Path) -> Iterator[TieredStore]:
    with store_over(tmp_path / "kv") as store:
        yield store


@pytest.fixture
def url(store: TieredStore) -> Iterator[str]:
    with serving(service_of(store)) as (server,):
        yield server.url


def test_lookup_takes_texts_standard_input_and_tokens(store: TieredStore, url: str) -> None:
    assert says("lookup", TEXT, "--url", url) == "0 of 24 tokens would be loaded"
    put(store, TEXT)
    found = "23 of 24 tokens would be loaded: 23 from cpu"
    assert says("lookup", TEXT, "--url", url) == found
    assert says("lookup", "--url", url, typed=TEXT) == found
    assert says("lookup", "-", "--url", url, typed=TEXT) == found
    for tokens in (",".join(map(str, TEXT.encode())), str(list(TEXT.encode()))):
        assert says("lookup", "--tokens", tokens, "--url", url) == found
    answer = json.loads(says("lookup", TEXT, "--url", url, "--json"))
    assert answer == {"total_tokens": 24, "hit_tokens": 23, "sources": {"cpu": 23}}


def test_salts_and_tags_are_the_requests(store: TieredStore, url: str) -> None:
    put(store, TEXT, "tenant", team="a")
    apart = ("--cache-salt", "tenant", "--tag", "team=a")
    assert says("lookup", TEXT, *apart, "--url", url).startswith("23 of 24")
    assert says("lookup", TEXT, "--url", url).startswith("0 of 24")
    assert "NAME=VALUE" in refused("lookup", TEXT, "--tag", "team", "--url", url, code=2)


def test_prefetch_pin_and_unpin(store: TieredStore, url: str) -> None:
    store.drop(put(store, TEXT))
    assert says("prefetch", TEXT, "--url", url, "--wait", 60) == "24 of 24 stored tokens are in host memory"
    assert says("pin", TEXT, "--url", url, "--seconds", 30) == "24 tokens are pinned for 30 s"
    assert store.stats().pinned == 6
    assert says("unpin", TEXT, "--url", url) == "6 chunks are unpinned"


def test_clear_deletes_a_prompt_or_asks_first(store: TieredStore, url: str) -> None:
    put(store, TEXT)
    put(store, "another!")
    assert says("clear", "--url", url, "--text", TEXT) == "deleted 6 chunks"
    assert run("clear", "--url", url, typed="n\n").exit_code == 1
    assert store.stats().primary.chunks == 2
    assert run("clear", "--url", url, "--yes", "--cache-salt", "tenant").exit_code == 1
    assert store.stats().primary.chunks == 2
    assert json.loads(says("clear", "--url", url, "--yes", "--json")) == {"deleted_chunks": 2}
    assert "a folder, or a server" in refused("clear", code=2)


def test_clear_deletes_a_namespace(store: TieredStore) -> None:
    put(store, TEXT)
    clear = partial(clear_namespace, store.clear, NAMESPACE.digest, None)
    with serving(service_of(store, clear_namespace=clear)) as (server,):
        words = ("clear", "--url", server.url, "--namespace")
        own = NAMESPACE.digest.hex()[:12]
        asked = run(*words, own, typed="n\n")
        assert (asked.exit_code, f"all chunks of namespace {own}" in asked.output) == (1, True)
        assert "the digits 0123456789 must match exactly one namespace, and match 0" in refused(
            *words, "0123456789", "--yes"
        )
        assert says(*words, own, "--yes") == "deleted 6 chunks"


def test_clear_leaves_no_option_aside(store: TieredStore, url: str, tmp_path: Path) -> None:
    put(store, TEXT)
    for words in (
        (tmp_path / "kv", "--text", TEXT),
        (tmp_path / "kv", "--engine", 0),
        ("--url", url, "--namespace", "a", "--text", TEXT),
    ):
        assert "a prompt" in refused("clear", *words, "--yes", code=2)
    assert [tier.chunks for tier in store.stats().tiers] == [6, 6]


def test_several_engines_have_a_line_each(store: TieredStore, tmp_path: Path) -> None:
    put(store, TEXT)
    with ExitStack() as stack:
        other = stack.enter_context(store_over(tmp_path / "other"))
        servers: list[AgentServer] = stack.enter_context(serving(service_of(store), service_of(other)))
        url = servers[0].url
        lines = ["engine 0: 23 of 24 tokens would be loaded: 23 from cpu", "engine 1: 0 of 24 tokens would be loaded"]
        assert says("lookup", TEXT, "--url", url).splitlines() == lines
        assert says("lookup", TEXT, "--url", url, "--engine", 1) == "0 of 24 tokens would be loaded"
        servers[1].close()
        assert "engine 1: unavailable: ConnectError" in run("lookup", TEXT, "--url", url).stdout
        assert "unavailable" in says("top", "--url", url)


def test_top_shows_tiers_once_where_nobody_watches(store: TieredStore, url: str) -> None:
    put(store, TEXT)
    shown = says("top", "--url", url)
    assert {"cpu", "disk"} <= {line.split()[0] for line in shown.splitlines() if line.strip()}
    assert "no request has been scheduled yet" in shown
    assert "\x1b" not in shown
    seen = json.loads(run("top", "--url", url, "--json").stdout)
    assert seen["stats"]["tiers"][0]["chunks"] == 6


def test_top_is_live_on_a_terminal(store: TieredStore, url: str) -> None:
    put(store, TEXT)
    assert_top_follows(url, TOKEN, lambda: put(store, "another prompt"))


def test_top_shows_what_requests_missed() -> None:
    with closing(engine_of(ram_chunks=6)) as engine:
        for number, tokens in enumerate([PROMPT, PROMPT, *OTHERS, PROMPT]):
            engine.add(SimulatedRequest(f"chatcmpl-{number:032}", list(tokens), len(tokens), 1, "a"))
            engine.finish()
        with serving(service_of_scheduler(engine.scheduler, CHUNK)) as (server,):
            shown = says("top", "--url", server.url).splitlines()
    rows = [line.split() for line in shown if "chatcmpl" in line]
    assert len(rows) == len(OTHERS) + 3
    last, warm = rows[0], rows[-2]
    assert last[1:5] == ["chatcmpl-00…00000010", str(len(PROMPT)), "0", "0"]
    assert " ".join(last[5:]).startswith("evicted from cpu")
    assert warm[2:] == [str(len(PROMPT)), "0", str(len(PROMPT) - 1)]


def test_top_says_what_more_memory_would_save() -> None:
    with closing(engine_of(ram_chunks=6)) as engine, serving(service_of_scheduler(engine.scheduler, CHUNK)) as servers:
        url = servers[0].url
        assert says("top", "--advise", "--url", url) == "Only 0 requests were sampled so far: ask again later."
        assert "hit rate by size" not in says("top", "--url", url)
        for number in range(60):
            tokens = OTHERS[number % 6]
            engine.add(SimulatedRequest(f"r{number}", list(tokens), len(tokens), 1, "a"))
            engine.finish()
        sentences = " ".join(says("top", "--advise", "--url", url).split())
        shown = says("top", "--url", url).splitlines()
    sizes = next(index for index, line in enumerate(shown) if line.startswith("hit rate by size"))
    assert shown[sizes].split()[4:] == ["half", "of", "it", "as", "it", "is", "twice", "four", "times"]
    half, now, twice, most = (int(share.rstrip("%")) for share in shown[sizes + 1].split()[1:])
    assert half <= now <= twice <= most < 100
    assert re.search(r"KiB more, tier cpu would hit [1-9]\d\.\d% more of all tokens", sentences), sentences
    assert "With this size, tier cpu is useless: without tier cpu as many tokens would hit." in sentences


# -- what can go wrong --------------------------------------------------------------------------------------


def test_the_token_comes_from_a_file_or_the_servers_settings(url: str, tmp_path: Path) -> None:
    file = tmp_path / "token"
    file.write_text(f"{TOKEN}\nand more\n")
    assert says("lookup", TEXT, "--url", url, "--token-file", file, LMKV_AGENT_TOKEN="")
    wrong = refused("lookup", TEXT, "--url", url, LMKV_AGENT_TOKEN="letmeout")
    assert "refuses the token: give the server's agent_token as LMKV_AGENT_TOKEN or with --token-file" in wrong
    assert "letmeout" not in wrong
    config = tmp_path / "lmkv.yaml"
    config.write_text(f"agent_listen: {url}\nagent_token_file: {file}\n")
    assert says("lookup", TEXT, LMKV_CONFIG_FILE=str(config), LMKV_AGENT_TOKEN=None)  # type: ignore[arg-type]


@pytest.mark.parametrize("url", ["127.0.0.1:1", "http://127.0.0.1:1", "nonsense::"])
def test_a_server_that_is_away_is_one_line(url: str) -> None:
    for words in (["lookup", TEXT, "--url"], ["top", "--url"], ["clear", "--yes", "--url"]):
        said = refused(*words, url)
        assert said.startswith("no server answers at")
        assert said.rstrip().endswith(": start one with agent_listen, or give another address with --url")


def test_another_server_is_one_line() -> None:
    other = http.server.HTTPServer(("127.0.0.1", 0), http.server.BaseHTTPRequestHandler)
    threading.Thread(target=other.serve_forever, daemon=True).start()
    assert "is not lmkv's agent API" in refused("lookup", TEXT, "--url", f"127.0.0.1:{other.server_port}")
    other.shutdown()
    other.server_close()


@pytest.fixture(scope="module")
def other() -> Iterator[RudePeer]:
    """Something else, which answers in JSON."""
    with RudePeer(short_socket()) as other:
        yield other


ABOUT_A_PROMPT = [["lookup", TEXT], ["prefetch", TEXT], ["pin", TEXT], ["unpin", TEXT], ["clear", "--yes"]]


@pytest.mark.parametrize(
    "answer",
    [
        *(b"{}", b"[]", b"1", b"[" * 200_000, b'{"engines": [{}]}', b'{"engines": {"a": 1}}', b'{"sources": 1}'),
        *(b'{"hit_tokens": "a", "total_tokens": [], "sources": {}}', b'{"sources": {"a": 1e999}}'),
        b'{"deleted_chunks": null, "unpinned_chunks": [], "pinned_tokens": 1, "seconds": {}, "done": 1}',
    ],
    ids=lambda answer: answer[:30].decode(),
)
def test_an_answer_in_json_that_is_none_is_one_line(other: RudePeer, answer: bytes, tmp_path: Path) -> None:
    other.bytes = as_http(answer)
    commands: list[list[Any]] = [[*each, "--url"] for each in ABOUT_A_PROMPT]
    for words in (*commands, ["top", "--url"], ["record", tmp_path / "trace", "--url"]):
        assert "is not lmkv's agent API" in refused(*words, other.url)


def test_nothing_of_a_server_reaches_the_terminal_as_it_is(other: RudePeer) -> None:
    escape = "\x1b]0;owned\x07\x9b2J[/bold]" * 1000
    found = {"total_tokens": 9, "hit_tokens": 8, "sources": {escape: 8}}
    other.bytes = as_json({**found, "engines": [{"engine": 0, **found}, {"engine": escape, "unavailable": escape}]})
    shown = [run("lookup", TEXT, "--url", other.url).stdout]
    other.bytes = as_http(json.dumps({"detail": escape}).encode(), 400)
    shown.append(refused("lookup", TEXT, "--url", other.url))
    other.bytes = f"HTTP/1.1 200 {escape}\r\n\r\n".encode()
    shown.append(refused("lookup", TEXT, "--url", other.url))
    for text in shown:
        assert "".join(text.splitlines()).isprintable()
        assert len(text) < 1500
    assert all("owned" in text for text in shown[:2])


HISTORY = {"interval": 10.0, "samples": [{"time": 1.0, "lookup_tokens": 9, "hit_tokens": hit} for hit in (1, 4)]}
POINT = {"bytes": 1 << 30, "hit_ratio": 0.5, "saved_seconds": 9.0}
VALUE: dict[str, Any] = {
    "sampled_requests": 90, "sampled_share": 1.0,
    "tiers": [{"name": "cpu", "bytes": 1 << 30, "points": [POINT] * 4, "without": POINT}],
}  # fmt: skip
REQUESTS = {"lookup_tokens": 9, "hit_tokens": 8, "requests": [REPORT, REPORT]}
WHOLE = {"stats": {**STATS, "engines": [{"engine": 0, **STATS}]}, "history": HISTORY, "value": VALUE}


@given(st.fixed_dictionaries({name: nearly(like) for name, like in {**WHOLE, "requests": REQUESTS}.items()}))
@example({**WHOLE, "requests": REQUESTS, "value": {**VALUE, "tiers": [{**VALUE["tiers"][0], "name": "[/b]"}]}})
def test_whatever_is_answered_top_shows_it_or_says_one_line(by_path: dict[str, Any]) -> None:
    def answer(asked: bytes, connection: socket.socket) -> None:
        connection.sendall(as_json(by_path[asked.split()[1].decode().split("/")[2]]))

    with RudePeer(short_socket(), answer) as server:
        for words in (["top", "--url"], ["top", "--advise", "--url"]):
            shown_or_refused(*words, server.url)


def shown_or_refused(*words: str) -> None:
    done = run(*words)
    assert type(done.exception) in (type(None), SystemExit), done.exception
    assert "".join(done.output.splitlines()).isprintable()
    assert len(done.output) < 100_000


@given(st.sampled_from(ABOUT_A_PROMPT), answers)
def test_whatever_is_answered_a_command_shows_it_or_says_one_line(
    other: RudePeer, words: list[str], answer: bytes
) -> None:
    other.bytes = answer
    shown_or_refused(*words, "--url", other.url)


def test_what_is_no_prompt_is_refused() -> None:
    assert "not a list of token ids" in refused("lookup", "--tokens", "1,two", code=2)


@pytest.mark.parametrize("words", [["lookup", "\udcff"], ["pin", TEXT, "--cache-salt", "\udcff"]])
def test_what_is_no_text_is_refused(url: str, words: list[str]) -> None:
    assert "not text in UTF-8" in refused(*words, "--url", url)


@pytest.mark.parametrize("shell", ["bash", "zsh", "fish"])
def test_shells_complete_commands(shell: str, tmp_path: Path) -> None:
    """The script that lmkv shows names lmkv, and what it calls as the shell does answers."""
    program = tmp_path / "lmkv"
    program.write_text("from lmkv.cli import main\nmain()\n")

    def call(*words: str, **environment: str) -> str:
        env = os.environ | {"_TYPER_COMPLETE_TEST_DISABLE_SHELL_DETECTION": "1", **environment}
        command = [sys.executable, program, *words]
        return subprocess.run(command, env=env, capture_output=True, text=True, timeout=500, check=False).stdout

    assert f"_LMKV_COMPLETE=complete_{shell}" in call("--show-completion", shell)
    typed = {"COMP_WORDS": "lmkv pre", "COMP_CWORD": "1", "_TYPER_COMPLETE_ARGS": "lmkv pre"}
    assert "prefetch" in call(_LMKV_COMPLETE=f"complete_{shell}", _TYPER_COMPLETE_FISH_ACTION="get-args", **typed)
