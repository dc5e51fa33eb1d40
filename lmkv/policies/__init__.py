"""Eviction policies and admission filters: bookkeeping over keys and sizes, without locks, clocks or I/O."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from types import MappingProxyType

from lmkv import plugins
from lmkv.errors import ConfigError
from lmkv.policies.adaptive import ADAPTIVE, Shadow, WeightedAge
from lmkv.policies.admission import ADMISSIONS, AdmitAll, AdmitNone, MinTokens, SecondTouch, make_admission
from lmkv.policies.base import PolicyBase
from lmkv.policies.queues import ARC, FIFO, LFU, LRU, MRU, S3FIFO, SIEVE, SLRU, QueuePolicy
from lmkv.policies.quota import Quotas
from lmkv.protocols import Policy

__all__ = [
    "ADAPTIVE",
    "ADMISSIONS",
    "ARC",
    "FIFO",
    "LFU",
    "LRU",
    "MRU",
    "POLICIES",
    "S3FIFO",
    "SIEVE",
    "SLRU",
    "AdmitAll",
    "AdmitNone",
    "MinTokens",
    "PolicyBase",
    "QueuePolicy",
    "Quotas",
    "SecondTouch",
    "Shadow",
    "WeightedAge",
    "like",
    "make_admission",
    "make_policy",
    "policy_names",
]

POLICIES: Mapping[str, Callable[[], Policy]] = MappingProxyType(
    {made.__name__: made for made in (LRU, FIFO, LFU, MRU, ARC, SLRU, S3FIFO, SIEVE, ADAPTIVE)}
)
"""lmkv's own policies, by the names that a configuration gives them."""


def policy_names() -> Iterator[str]:
    """The names for a configuration: lmkv's own, then installed packages'."""
    yield from POLICIES
    yield from (name for name in plugins.installed(plugins.POLICIES) if name not in POLICIES)


def make_policy(name: str) -> Policy:
    """A new, empty policy: one of `policy_names`, or `package.module:Class`. Raises ConfigError for any other."""
    if name in POLICIES:
        return POLICIES[name]()
    place = name if plugins.is_place(name) else plugins.installed(plugins.POLICIES).get(name)
    if place is None:
        raise ConfigError(f"unknown cache policy {name!r}; there are: {', '.join(policy_names())}")
    policy: Policy = plugins.make(place, f"cache_policy {name!r}", Policy)
    return policy


def like(policy: Policy) -> Policy:
    """An empty policy of the same kind, for a shadow; LRU for a class that needs arguments.

    >>> like(LRU())
    <LRU: 0 evictable bytes, 0 keys held>
    """
    if isinstance(policy, ADAPTIVE):
        return WeightedAge(policy.weight)
    if isinstance(policy, Quotas):
        return like(policy.make())
    try:
        return type(policy)()
    except TypeError:
        return LRU()
