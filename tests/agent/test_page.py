"""The page: it is whole without a network, needs no token itself, and shows in a browser what the server has."""

from __future__ import annotations

import re
import shutil
import subprocess
from pathlib import Path

import httpx
import pytest

from lmkv.agent.http import PAGE
from lmkv.agent.server import AgentServer
from lmkv.agent.service import CacheService
from lmkv.policies import LRU, Quotas
from lmkv.store.tiered import TieredStore
from tests.agent.serving import TOKEN, at_port, put, service_of, service_of_scheduler
from tests.servers import missing
from tests.vllm.scheduler.test_explain import CHUNK, OTHERS, PROMPT, engine_of


def test_it_loads_nothing_from_elsewhere() -> None:
    assert not re.findall(r"https?:|//\w|@import|\bsrc=|innerHTML|insertAdjacentHTML|document\.write|\beval\b", PAGE)


def test_it_needs_no_token_and_may_run_nothing_but_itself(server: AgentServer) -> None:
    answer = httpx.get(server.url)
    assert httpx.get(f"{server.url}/v1/stats").status_code == 401
    assert answer.text == PAGE
    policy = answer.headers["Content-Security-Policy"]
    assert policy.startswith("default-src 'none'; script-src 'sha256-")
    assert "unsafe" not in policy


@pytest.fixture
def browser() -> str:
    for name in ("chromium", "chromium-browser", "google-chrome"):
        if found := shutil.which(name):
            return found
    return missing("chromium", "apt install chromium")


def rendered(browser: str, service: CacheService, token: str | None, tmp_path: Path) -> str:
    """The page's elements, once a browser has run it for some seconds of its own time."""
    options = ["--headless", "--no-sandbox", "--disable-gpu", f"--user-data-dir={tmp_path / 'browser'}"]
    with at_port(service, token) as server:
        command = [browser, *options, "--virtual-time-budget=8000", "--dump-dom", server.url]
        shown = subprocess.run(command, capture_output=True, text=True, timeout=500, check=True).stdout
    return shown.partition("<script>")[0]


@pytest.mark.nightly("fleet")
class TestInABrowser:
    def test_it_shows_tiers_and_why_requests_missed(self, browser: str, tmp_path: Path) -> None:
        engine = engine_of(ram_chunks=6, policy=lambda: Quotas(LRU, {"<i>a</i>:b": 0.3}))
        for number, tokens in enumerate([PROMPT, *OTHERS, PROMPT]):
            tag = ("b", "c")[number == 5]
            engine.serve(f"cmpl-<b>{number}</b>", tokens, 1, "", **{"lmkv.tag.<i>a</i>": tag})
        shown = rendered(browser, service_of_scheduler(engine.scheduler, CHUNK), None, tmp_path)
        assert "live" in shown
        assert re.search(r"<td[^>]*>.*cpu", shown)
        assert "evicted from cpu" in shown
        assert re.search(r"<td[^>]*>&lt;i&gt;a&lt;/i&gt;:b</td>.*all others.*<td[^>]*>.*cpu.*KiB of ", shown, re.DOTALL)
        [sizes] = re.findall(r'<tbody id="sizes">(.*?)</tbody>', shown, re.DOTALL)
        assert re.findall(r">(\d+) %<", sizes)[0] == "0", "without the only tier nothing is found"
        assert len(re.findall(r">(\d+) %<", sizes)) == 5
        assert "cmpl-&lt;b&gt;9&lt;/b&gt;" in shown, "what a client has chosen is text"
        engine.close()

    def test_it_asks_for_the_token(self, browser: str, store: TieredStore, tmp_path: Path) -> None:
        put(store, "what nobody may see")
        shown = rendered(browser, service_of(store), TOKEN, tmp_path)
        assert re.search(r'<section id="ask">', shown)
        assert re.search(r'<div class="parts" id="all" hidden', shown)
