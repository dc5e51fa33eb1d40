"""The examples that need vLLM, as a reader would run them, at a small size."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

from lmkv.cli.small_model import SmallModel
from tests.pages import ROOT, loaded_module
from tests.tables import raised
from tests.vllm.server import child_environment

EXAMPLES = ROOT / "examples"
EAGER = {"TORCHDYNAMO_DISABLE": "1", "VLLM_USE_AOT_COMPILE": "0"}
"""Without the compilation, which takes most of a start."""

NOT_COMPUTED = re.compile(r"([\d,]+) of ([\d,]+) prompt tokens not computed$", re.MULTILINE)


def run(script: Path, *arguments: str, **env: str) -> str:
    """What the script prints on its standard output."""
    done = subprocess.run(
        [sys.executable, script, *arguments],
        # In one process it starts sooner; test_multiprocess has the other mode.
        env=child_environment(**{"VLLM_ENABLE_V1_MULTIPROCESSING": "0", "VLLM_LOGGING_LEVEL": "ERROR", **env}),
        capture_output=True,
        text=True,
        timeout=800,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


def not_computed(printed: str) -> list[tuple[int, int]]:
    """Of each run, how many of its prompt tokens were not computed."""
    return [(int(some.replace(",", "")), int(of.replace(",", ""))) for some, of in NOT_COMPUTED.findall(printed)]


@pytest.mark.parametrize("enabled", [True, False])
def test_cpu_offloading(enabled: bool) -> None:
    flags = ["--num-prompts", "3", "--num-tokens", "600", *(["--enable-lmkv"] if enabled else [])]
    printed = run(EXAMPLES / "cpu_offloading.py", *flags)
    (first, total), (second, _) = not_computed(printed)
    assert 3 * 600 < total < 3 * 620
    assert first == 0
    assert 3 * 512 <= second <= total - 3 if enabled else second == 0
    assert re.search(r"^Speedup \(first run / second run\): \d+\.\d\dx$", printed, re.MULTILINE)
    assert "Outputs are equal: yes" in printed


def test_cpu_offloading_takes_the_largest_model_that_the_gpu_has_room_for() -> None:
    fits = loaded_module(EXAMPLES / "cpu_offloading.py").model_that_fits
    assert fits(79.1, (8, 0)) == fits(36.0, (7, 5)) == ("Qwen/Qwen3-8B", {})
    assert fits(35.9, (8, 9)) == fits(20.0, (9, 0)) == ("Qwen/Qwen3-8B-FP8", {"kv_cache_dtype": "fp8"})
    assert fits(23.7, (8, 6)) == fits(19.9, (8, 9)) == fits(10.0, (7, 5)) == ("Qwen/Qwen3-1.7B", {})
    raised(SystemExit, "--model", fits, 9.9, (8, 9))


def test_offline_with_spawned_processes(tmp_path: Path) -> None:
    """They import the script again. The prompt has six thousand tokens: one for each of its words."""
    script, model = EXAMPLES / "offline.py", SmallModel(layers=2, hidden=128, vocab=2048)
    model.write(tmp_path)
    model.write_tokenizer(tmp_path, [script.read_text()])
    spawned = {"VLLM_ENABLE_V1_MULTIPROCESSING": "1", "VLLM_WORKER_MULTIPROC_METHOD": "spawn"}
    printed = run(script, str(tmp_path), VLLM_CPU_KVCACHE_SPACE="1", **EAGER, **spawned)
    (first, total), (second, _) = not_computed(printed)
    assert (first, total) == (0, 6005)
    assert total // 256 * 256 <= second < total
    texts = re.findall(r"^Generated text: .+$", printed, re.MULTILINE)
    assert len(texts) == 2
    assert texts[0] == texts[1]
