"""The examples in docstrings run, and every public class has one."""

from __future__ import annotations

import doctest
from importlib import import_module
from typing import Any

import pytest

import lmkv
import lmkv.backends
import lmkv.policies
from tests.test_architecture import MODULES

NEEDS_MORE = ("lmkv.vllm.connector", "lmkv.vllm.ray", "lmkv.memory.kernels", "lmkv.cli", "lmkv.testing.backend_suite")
"""Modules that need vLLM, Ray, a device or a command's extra to be imported, or a test runner."""


@pytest.mark.parametrize("module", [name for name in MODULES if not name.startswith(NEEDS_MORE)])
def test_examples_run(module: str) -> None:
    failed, _ = doctest.testmod(import_module(module))
    assert failed == 0


def has_example(found: Any) -> bool:
    return any(test.examples for test in doctest.DocTestFinder(recurse=False).find(found))


def test_classes_that_users_build_have_an_example() -> None:
    built = [getattr(lmkv, name) for name in ("Config", "Engine", "KVLayout", "LayerPages", "Namespace", "PagedMemory")]
    built += [lmkv.TieredStore, lmkv.Tier, lmkv.Variant, lmkv.Prefetch]
    built += [getattr(lmkv.backends, name) for name in lmkv.backends.__all__]
    built += [found for name in lmkv.policies.__all__ if isinstance(found := getattr(lmkv.policies, name), type)]
    assert [found.__name__ for found in built if not has_example(found)] == []
