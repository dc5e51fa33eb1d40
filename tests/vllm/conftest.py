"""Fixtures of the vLLM suite. It is skipped, with the reason, where vLLM is not installed."""

from __future__ import annotations

from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path

import pytest

from tests.vllm import triton_cpu
from tests.vllm.alone import Alone
from tests.vllm.harness import Engine, engine, prompt

HERE = Path(__file__).parent

if triton_cpu.is_wanted():
    triton_cpu.install()


def pytest_ignore_collect(collection_path: Path, config: pytest.Config) -> bool | None:
    """Do not import vLLM if it is not wanted: that takes longer than many a test."""
    needs_vllm = collection_path.parent == HERE and collection_path.suffix == ".py"
    return True if needs_vllm and "not vllm" in config.option.markexpr else None


def pytest_report_header() -> str:
    from lmkv.vllm.compat import vllm_version

    return f"vllm: {vllm_version() if find_spec('vllm') else 'not installed'}"


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    only_on_v2 = [item for item in items if (mark := item.get_closest_marker("runner_v2")) and mark.kwargs.get("only")]
    if only_on_v2 and not triton_cpu.is_wanted():
        config.hook.pytest_deselected(items=only_on_v2)
        items[:] = [item for item in items if item not in only_on_v2]
    missing = find_spec("vllm") is None
    # Every conftest sees the items of the whole run.
    for item in items:
        if item.path.parent == HERE:
            item.add_marker(pytest.mark.vllm)
            # Engines start slowly on a busy machine.
            item.add_marker(pytest.mark.timeout(900))
        if missing and item.get_closest_marker("vllm"):
            item.add_marker(pytest.mark.skip(reason="no vllm: see docs/vllm.md"))


@pytest.fixture(scope="session")
def alone(request: pytest.FixtureRequest) -> Alone:
    return Alone(Path(request.config.cache.mkdir("vllm-alone")))


@pytest.fixture(scope="session")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A small model with random weights that make outputs depend on every byte of KV; a token per byte of text."""
    from lmkv.cli.small_model import SmallModel

    folder = tmp_path_factory.mktemp("model")
    small = SmallModel(layers=4, hidden=256, max_position=8192)
    small.write(folder)
    small.write_tokenizer(folder)
    return folder


@pytest.fixture(scope="module")
def shared(model: Path, expected: dict[int, list[int]]) -> Iterator[Engine]:
    """One engine with the connector for a module's tests: chunks of 256, chunked prefill in unaligned steps.

    Only one engine can live in a process at a time: a module that uses this one makes no other.
    """
    assert expected
    with engine(model, max_num_batched_tokens=480, max_num_seqs=32) as running:
        yield running


@pytest.fixture(scope="session")
def expected(model: Path, alone: Alone) -> dict[int, list[int]]:
    """Answers of an engine without a connector to `prompt(seed, 1500)`, by seed."""
    seeds = range(8)
    answers = alone(
        model, {"max_num_batched_tokens": 480}, lambda plain: plain.ids([prompt(seed, 1500) for seed in seeds])
    )
    return dict(zip(seeds, answers, strict=True))
