"""Eviction policies and admission filters: bookkeeping over keys and sizes, without locks, clocks or I/O."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from types import MappingProxyType

from lmkv.errors import ConfigError
from lmkv.policies.admission import ADMISSIONS, AdmitAll, AdmitNone, SecondTouch, make_admission
from lmkv.policies.base import PolicyBase
from lmkv.policies.fifo import FIFO
from lmkv.policies.lru import LRU
from lmkv.protocols import Policy

__all__ = [
    "ADMISSIONS",
    "FIFO",
    "LRU",
    "POLICIES",
    "AdmitAll",
    "AdmitNone",
    "PolicyBase",
    "SecondTouch",
    "make_admission",
    "make_policy",
]

POLICIES: Mapping[str, Callable[[], Policy]] = MappingProxyType({"LRU": LRU, "FIFO": FIFO})
"""The policies that a configuration can name."""


def make_policy(name: str) -> Policy:
    """A new, empty policy; an unknown name is a `ConfigError`."""
    if name not in POLICIES:
        raise ConfigError(f"unknown cache policy {name!r}; there are: {', '.join(POLICIES)}")
    return POLICIES[name]()
