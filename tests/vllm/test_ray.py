"""Ray Serve LLM with lmkv: both of the examples' apps, from Python and from YAML, on vLLM's CPU build.

Ray, NIXL and vLLM, as docs/ray.md installs them. Ray listens on all of a machine's addresses: it gets a network of
its own, and processes that end with it.
"""

from __future__ import annotations

import ast
import json
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.pages import ROOT
from tests.servers import needs_package
from tests.vllm.server import child_environment

EXAMPLES = ROOT / "examples" / "ray"
ALONE = ["unshare", "--map-root-user", "--net", "--pid", "--fork", "--kill-child", "--mount-proc"]
MODEL = "Qwen/Qwen2-0.5B-Instruct"
PROMPT = "Hello, how are you? " * 60
OTHER = "What is the weather like today? " * 40
PATIENT = {"RAY_SERVE_PROXY_READY_CHECK_TIMEOUT_S": "300", "RAY_SERVE_PROXY_HEALTH_CHECK_TIMEOUT_S": "300"}
RAY = {
    "RAY_ADDRESS": "127.0.0.1:6379",
    "RAY_AUTH_MODE": "disabled",
    "RAY_USAGE_STATS_ENABLED": "0",
    "RAY_worker_niceness": "0",
    "VLLM_HOST_IP": "127.0.0.1",
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
    "OMP_NUM_THREADS": "1",
    "UCX_NET_DEVICES": "lo",
}

HOW = "see docs/ray.md"


def command(example: str, model: Path, folder: Path) -> list[str]:
    """The command that serves the example with this model on a machine without a GPU."""
    if example.endswith(".py"):
        return [sys.executable, str(EXAMPLES / example), "--cpu", "--model", str(model)]
    file = folder / example
    file.write_text((EXAMPLES / example).read_text().replace(MODEL, str(model)))
    return [str(Path(sys.executable).parent / "serve"), "run", str(file)]


def answers(example: str, model: Path, folder: Path, *asked: dict[str, Any]) -> list[Any]:
    """The answers of the example's app, one request after the other."""
    requests, answered = folder / "asked.json", folder / "answered.json"
    requests.write_text(json.dumps([{"model": "qwen-0.5b", "max_tokens": 8, "temperature": 0, **ask} for ask in asked]))
    script = [sys.executable, "-m", "tests.vllm.ray_script", requests, answered, *command(example, model, folder)]
    path = f"{Path(sys.executable).parent}:/usr/sbin:/usr/bin:/sbin:/bin"
    with (folder / "log").open("wb") as log:
        environment = child_environment(**RAY, **PATIENT, PATH=path, PYTHONPATH=str(ROOT))
        subprocess.run([*ALONE, *script], cwd=ROOT, env=environment, stdout=log, stderr=log, timeout=880, check=False)
    assert answered.exists(), (folder / "log").read_text(errors="replace")[-6000:]
    found: list[Any] = json.loads(answered.read_text())
    return found


def cached(answer: Any) -> int:
    return int(answer["usage"]["prompt_tokens_details"]["cached_tokens"])


@pytest.mark.nightly("ray")
@pytest.mark.parametrize("example", ["offloading.py", "offloading.yaml"])
def test_a_repeated_prompt_comes_from_host_memory(example: str, model: Path, tmp_path: Path) -> None:
    needs_package("ray", HOW)
    asked = {"prompt": PROMPT, "kv_transfer_params": {"lmkv.report": True}}
    cold, warm = answers(example, model, tmp_path, asked, asked)
    tokens = cold["usage"]["prompt_tokens"]
    assert (cached(cold), cached(warm)) == (0, tokens - 1)
    assert warm["kv_transfer_params"]["lmkv"]["sources"] == {"cpu": tokens - 1}
    assert warm["choices"][0]["text"] == cold["choices"][0]["text"]


@pytest.mark.nightly("ray")
@pytest.mark.parametrize("example", ["prefill_decode.py", "prefill_decode.yaml"])
def test_prefill_and_decode_apart(example: str, model: Path, tmp_path: Path) -> None:
    for package in ("ray", "nixl"):
        needs_package(package, HOW)
    asked = {"prompt": PROMPT}
    reported = {**asked, "kv_transfer_params": {"lmkv.report": True}}
    cold, warm, told, other = answers(example, model, tmp_path, asked, asked, reported, {**reported, "prompt": OTHER})
    tokens = cold["usage"]["prompt_tokens"]
    assert cached(cold) == tokens, "NIXL brings all of the prompt's KV from the prefill engine, the last token's too"
    assert cached(warm) == tokens - 1
    assert told["kv_transfer_params"]["lmkv"]["sources"] == {"cpu": tokens - 1}
    assert warm["choices"][0]["text"] == cold["choices"][0]["text"] == told["choices"][0]["text"]
    assert cached(other) == other["usage"]["prompt_tokens"]
    assert other["kv_transfer_params"]["lmkv"]["sources"] == {}, "it came from the other engine, not from lmkv"


def environment(text: str) -> dict[str, str]:
    import yaml

    (app,) = yaml.safe_load(text)["applications"]
    found: dict[str, str] = app["runtime_env"]["env_vars"]
    return found


def in_python(example: str, *, cpu: bool) -> dict[str, str]:
    """The variables of the example from Python, whose module needs Ray: read from its source."""
    tree = ast.parse((EXAMPLES / example.replace(".yaml", ".py")).read_text())
    [found] = [
        pair[1]
        for node in ast.walk(tree)
        if isinstance(node, ast.Dict)
        for pair in zip(node.keys, node.values, strict=True)
        if isinstance(pair[0], ast.Constant) and pair[0].value == "env_vars"
    ]
    variables: dict[str, str] = eval(compile(ast.Expression(found), example, "eval"), {"cpu": cpu})
    return variables


@pytest.mark.parametrize("example", ["offloading.yaml", "prefill_decode.yaml"])
def test_a_file_is_for_a_cpu_and_with_two_changes_for_a_gpu(example: str) -> None:
    import yaml
    from vllm.config import KVTransferConfig

    edits = re.search(r"sed (-e .+)$", (ROOT / "docs" / "ray.md").read_text(), re.MULTILINE)
    assert edits
    command = f"sed {edits[1].partition(' examples/')[0]} {EXAMPLES / example}"
    for_gpu = subprocess.run(["bash", "-c", command], capture_output=True, text=True, check=True).stdout
    assert environment((EXAMPLES / example).read_text()) == in_python(example, cpu=True)
    assert environment(for_gpu) == in_python(example, cpu=False)
    (app,) = yaml.safe_load(for_gpu)["applications"]
    for config in app["args"].get("llm_configs") or app["args"].values():
        assert config.keys() == {"model_loading_config", "engine_kwargs"}
        transfer = KVTransferConfig(**config["engine_kwargs"]["kv_transfer_config"])
        for child in transfer.kv_connector_extra_config.get("connectors", ()):
            KVTransferConfig(**child)


def test_what_the_page_asks_the_small_model_has_as_many_tokens_as_it_says() -> None:
    page = (ROOT / "docs" / "ray.md").read_text()
    for variable, prompt in (("PROMPT", PROMPT), ("OTHER", OTHER)):
        [line] = [line for line in page.splitlines() if line.startswith(f"{variable}=")]
        done = subprocess.run(
            ["bash", "-c", f'{line}; printf %s "${variable}"'], capture_output=True, text=True, check=True
        )
        assert done.stdout.strip() == prompt.strip()
    assert (len(PROMPT), len(OTHER)) == (1200, 1280), "a token for each letter"
