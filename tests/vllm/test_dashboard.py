"""The dashboard's queries, asked of a real Prometheus that scrapes a real server."""

from __future__ import annotations

import contextlib
import json
import shutil
import subprocess
import urllib.parse
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.kit import LIMIT, eventually
from tests.servers import free_port, missing
from tests.vllm.harness import prompt
from tests.vllm.server import Server, serving_together
from tests.vllm.test_metrics import CHUNKS, LENGTH, others, small_tiers, store
from tests.vllm.test_online import ask, report

DASHBOARD = Path(__file__).parents[2] / "docs" / "grafana" / "lmkv.json"
VARIABLES = {"$model": ".*", "$__rate_interval": "1m"}


def queries() -> Iterator[tuple[str, str]]:
    """Titles and expressions of all panels."""
    for panel in json.loads(DASHBOARD.read_text())["panels"]:
        for target in panel.get("targets", []):
            expression = target["expr"]
            for variable, value in VARIABLES.items():
                expression = expression.replace(variable, value)
            yield panel["title"], expression


@contextlib.contextmanager
def prometheus(server: Server, folder: Path) -> Iterator[str]:
    """Its URL; it scrapes the server each second."""
    program = shutil.which("prometheus")
    if program is None:
        missing("prometheus", "apt install prometheus")
    port = free_port()
    scrape = {"job_name": "vllm", "static_configs": [{"targets": [f"127.0.0.1:{server.port}"]}]}
    (folder / "prometheus.yml").write_text(
        json.dumps({"global": {"scrape_interval": "1s"}, "scrape_configs": [scrape]})
    )
    command = [program, f"--config.file={folder}/prometheus.yml", f"--storage.tsdb.path={folder}/data"]
    with (folder / "prometheus.log").open("wb") as log:
        process = subprocess.Popen([*command, f"--web.listen-address=127.0.0.1:{port}"], stdout=log, stderr=log)
    try:
        yield f"http://127.0.0.1:{port}"
    finally:
        process.terminate()
        process.wait(LIMIT)


def asked(url: str, query: str) -> list[Any]:
    """The series that Prometheus answers with; none while it is starting."""
    words = urllib.parse.urlencode({"query": query})
    try:
        with urllib.request.urlopen(f"{url}/api/v1/query?{words}", timeout=LIMIT) as answer:
            series: list[Any] = json.load(answer)["data"]["result"]
    except ConnectionError:
        return []
    except urllib.error.HTTPError as error:
        if error.code == 503:
            return []
        raise AssertionError(f"{query}: {error.read().decode()}") from error
    except urllib.error.URLError:
        return []
    return series


@pytest.mark.nightly("fleet")
def test_every_query_of_the_dashboard_has_an_answer(model: Path, tmp_path: Path) -> None:
    ids = prompt(80, LENGTH)
    served = Server(model, tmp_path / "server.log", small_tiers(tmp_path / "kv"), VLLM_SERVER_DEV_MODE="1")
    with serving_together(served) as (server,), prometheus(server, tmp_path) as url:
        eventually(lambda: bool(asked(url, "up == 1")), "a scrape")
        store(server, ids, CHUNKS)
        server.post("/reset_prefix_cache")
        ask(server, ids)
        others(server, 81, 82)
        assert report(ask(server, ids))["sources"]["disk"] > 0
        found = asked(url, "lmkv_hit_tokens_total")
        for title, query in queries():
            eventually(lambda query=query: bool(asked(url, query)), f"an answer to {title!r}: {query}")
        hits = 'sum by (tier) (lmkv_hit_tokens_total{tier="disk"})'
        eventually(lambda: bool(asked(url, f"{hits} == 1499")), f"1499 tokens from disk; {found}")
