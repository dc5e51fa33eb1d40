"""Commands that run in this process leave its logging as it was."""

from __future__ import annotations

import logging
from collections.abc import Iterator

import pytest


@pytest.fixture(autouse=True)
def _same_log_level() -> Iterator[None]:
    logger = logging.getLogger("lmkv")
    level = logger.level
    yield
    logger.setLevel(level)
