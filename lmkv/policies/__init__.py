"""Eviction policies and admission filters: bookkeeping over keys and sizes, without locks, clocks or I/O."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from types import MappingProxyType

from lmkv import plugins
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
    "policy_names",
]

POLICIES: Mapping[str, Callable[[], Policy]] = MappingProxyType({"LRU": LRU, "FIFO": FIFO})
"""lmkv's own policies, by the names that a configuration gives them."""


def policy_names() -> list[str]:
    """The names that a configuration can give: lmkv's own, and those of installed packages."""
    return [*POLICIES, *(name for name in plugins.installed(plugins.POLICIES) if name not in POLICIES)]


def make_policy(name: str) -> Policy:
    """A new, empty policy: one of `policy_names`, or `package.module:Class`. Raises ConfigError for any other."""
    if name in POLICIES:
        return POLICIES[name]()
    place = name if plugins.is_place(name) else plugins.installed(plugins.POLICIES).get(name)
    if place is None:
        raise ConfigError(f"unknown cache policy {name!r}; there are: {', '.join(policy_names())}")
    policy: Policy = plugins.make(place, f"cache_policy {name!r}", Policy)
    return policy
