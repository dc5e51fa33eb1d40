"""Simulated engines of most tests."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.vllm.scheduler.simulated_vllm import SimulatedVLLM
from tests.vllm.scheduler.test_explain import engine_of


@pytest.fixture
def engine() -> Iterator[SimulatedVLLM]:
    """Over host memory alone."""
    with engine_of() as made:
        yield made


@pytest.fixture
def tiered() -> Iterator[SimulatedVLLM]:
    """Host memory for ten chunks, over a tier for more than the tests store."""
    with engine_of(ram_chunks=10, lower_chunks=60) as made:
        yield made
