"""The files of docs/deploy: rules ask for metrics that exist, manifests set settings that exist."""

from __future__ import annotations

import json
import re
import shlex
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

from lmkv.config import Config
from lmkv.vllm.scheduler.telemetry import METRICS, Metric
from tests.pages import BLOCKS, ROOT
from tests.servers import missing

DEPLOY = ROOT / "docs" / "deploy"
ALERTS = DEPLOY / "alerts.yml"
MANIFESTS = sorted(DEPLOY.glob("kubernetes-*.yaml"))
RULES = [rule for group in yaml.safe_load(ALERTS.read_text())["groups"] for rule in group["rules"]]
[_QUERIES] = [block.code for block in BLOCKS if block.language == "promql"]
QUERIES = [query for query in re.split(r"\n\n", _QUERIES) if query.strip()]

FUNCTIONS = {"sum", "max", "by", "rate", "increase", "scalar", "sort_desc", "histogram_quantile"}
EVERYWHERE = {"instance", "model_name", "engine"}
"""Labels of vLLM and of Prometheus."""


def scraped() -> dict[str, Metric]:
    """Metrics by the names that Prometheus knows."""
    names: dict[str, Metric] = {}
    for name, metric in METRICS.items():
        suffixes = {"counter": ("_total",), "gauge": ("",), "histogram": ("_bucket", "_sum", "_count")}[metric.kind]
        names |= {name + suffix: metric for suffix in suffixes}
    return names


def asked(query: str) -> Iterator[tuple[str, str, set[str], bool]]:
    """`(function, metric, labels, ranged)` of each metric: function around it, labels, whether with a range."""
    query = re.sub(r"#.*", "", query)
    grouped = {label.strip() for found in re.findall(r"by \(([^)]*)\)", query) for label in found.split(",")}
    bare = re.sub(r"by \([^)]*\)", "", query)
    for found in re.finditer(r"(?:(\w+)\s*\()?\s*((?:lmkv_|vllm:)\w+)(?:\{([^}]*)\})?(\[\w+\])?", bare):
        function, metric, matchers, span = found.groups()
        labels = set(re.findall(r"(\w+)=", matchers or ""))
        yield function or "", metric, labels | grouped, bool(span)


def wrong(query: str) -> list[str]:
    """Whatever Prometheus would refuse, or would never find."""
    problems = [] if query.count("(") == query.count(")") else ["parentheses"]
    words = re.sub(r"#.*|\{[^}]*\}|by \([^)]*\)|\[\w+\]", "", query)
    names = set(re.findall(r"[a-z_:]{2,}\w*", words)) - FUNCTIONS
    known = scraped()
    problems += [f"no metric {name}" for name in names - known.keys()]
    found = list(asked(query))
    if {metric for _, metric, _, _ in found} != names:
        problems.append("a selector that was not understood")
    labelled = {label for _, name, _, _ in found if name in known for label in known[name].labels}
    for function, name, labels, ranged in found:
        metric = known.get(name)
        if metric is None:
            continue
        needs_range = metric.kind != "gauge"
        if ranged is not needs_range or (function in ("rate", "increase")) is not needs_range:
            problems.append(f"{name} is a {metric.kind}")
        le = {"le"} if name.endswith("_bucket") else set()
        problems += [f"{name} has no label {label}" for label in labels - labelled - EVERYWHERE - le]
    return problems


@pytest.mark.parametrize("rule", RULES, ids=lambda rule: rule["alert"])
def test_an_alert_asks_for_what_there_is(rule: dict[str, Any]) -> None:
    assert wrong(rule["expr"]) == []
    named = set(re.findall(r"\$labels\.(\w+)", rule["annotations"]["summary"]))
    assert named <= {label for found in re.findall(r"by \(([^)]*)\)", rule["expr"]) for label in found.split(", ")}


def test_queries_of_the_page_ask_for_what_there_is() -> None:
    assert len(QUERIES) >= 4
    assert [(query, problems) for query in QUERIES if (problems := wrong(query))] == []


@pytest.mark.parametrize(
    "query",
    [
        "rate(lmkv_hit_tokens[5m])",
        "lmkv_failed_loads_total > 0",
        "rate(lmkv_tier_breaker[5m])",
        "sum by (reason) (rate(lmkv_hit_tokens_total[5m]))",
        "sum(rate(lmkv_failed_loads_total[5m])",
    ],
)
def test_a_wrong_query_is_noticed(query: str) -> None:
    assert wrong(query)


def test_the_page_explains_every_alert() -> None:
    page = (ROOT / "docs" / "monitor.md").read_text()
    assert re.findall(r"^\| `(Lmkv\w+)` \|", page, re.MULTILINE) == [rule["alert"] for rule in RULES]


LABELS = 'instance="a",engine="0",model_name="m"'
SERIES = {
    f'lmkv_tier_breaker{{{LABELS},tier="disk",operation="read"}}': "1x120",
    f'lmkv_missed_tokens_total{{{LABELS},reason="evicted"}}': "0+30x120",
    f'lmkv_missed_tokens_total{{{LABELS},reason="not_stored"}}': "0+20x120",
    f"lmkv_lookup_tokens_total{{{LABELS}}}": "0+100x120",
    f'lmkv_hit_tokens_total{{{LABELS},tier="cpu"}}': "0+50x120",
}
FIRE = {"LmkvTierUnavailable": {"tier": "disk", "operation": "read"}, "LmkvEvictedTooEarly": {}}


def test_prometheus_fires_the_alerts(tmp_path: Path) -> None:
    """And computes the first query of the page, and takes the others."""
    promtool = shutil.which("promtool") or missing("promtool", "apt install prometheus")
    by_name = {rule["alert"]: rule for rule in RULES}
    fired = []
    for name, labels in FIRE.items():
        summary = by_name[name]["annotations"]["summary"]
        for label, value in {"instance": "a", **labels}.items():
            summary = summary.replace(f"{{{{ $labels.{label} }}}}", value)
        known = {"severity": by_name[name]["labels"]["severity"], "instance": "a", **labels}
        alert = {"exp_labels": known, "exp_annotations": {"summary": summary}}
        fired.append({"eval_time": "110m", "alertname": name, "exp_alerts": [alert]})
    query = {"expr": re.sub("#.*", "", QUERIES[0]).strip(), "eval_time": "100m"}
    query["exp_samples"] = [{"labels": '{tier="cpu"}', "value": 0.5}]
    series = [{"series": name, "values": values} for name, values in SERIES.items()]
    test = {"interval": "1m", "input_series": series, "alert_rule_test": fired, "promql_expr_test": [query]}
    rules = [{"record": f"page:query{number}", "expr": each} for number, each in enumerate(QUERIES)]
    (tmp_path / "queries.yml").write_text(yaml.safe_dump({"groups": [{"name": "page", "rules": rules}]}))
    (tmp_path / "test.yml").write_text(yaml.safe_dump({"rule_files": [str(ALERTS)], "tests": [test]}))
    subprocess.run([promtool, "check", "rules", str(ALERTS), tmp_path / "queries.yml"], check=True)
    subprocess.run([promtool, "test", "rules", tmp_path / "test.yml"], check=True)


# -- manifests -----------------------------------------------------------------------------------------


def environment(file: Path) -> dict[str, str]:
    """What a unit or a manifest sets."""
    text = file.read_text()
    if file.suffix == ".service":
        return dict(line.split("=", 1) for line in re.findall(r"^Environment=(.+)$", text, re.MULTILINE))
    found: dict[str, str] = {}
    for document in yaml.safe_load_all(text):
        for container in document["spec"].get("template", {}).get("spec", {}).get("containers", []):
            found |= {each["name"]: each.get("value", "") for each in container.get("env", [])}
    return found


def transfer_configs(file: Path) -> list[Any]:
    text = file.read_text()
    found = re.findall(r"--kv-transfer-config[= ](.+?)(?:\\)?$", text, re.MULTILINE)
    return [json.loads(shlex.split(each)[0] if each.startswith("'") else each) for each in found]


@pytest.mark.parametrize("file", [*MANIFESTS, DEPLOY / "lmkv-vllm.service"], ids=lambda file: file.name)
def test_settings_that_are_handed_out_exist(file: Path, tmp_path: Path) -> None:
    variables = {name: value for name, value in environment(file).items() if name.startswith("LMKV_")}
    assert variables
    for name in variables:
        if name.endswith("_FILE"):
            (tmp_path / name).write_text("0123456789abcdef" * 4)
            variables[name] = str(tmp_path / name)
    assert Config.load(env=variables).sources
    configs = transfer_configs(file)
    assert configs
    assert all(each["kv_connector"] == "LMKVConnector" for each in configs)
    assert all(each["kv_load_failure_policy"] == "recompute" for each in configs)
