"""`like`: an empty policy that decides as another one does."""

from __future__ import annotations

from lmkv.policies.adaptive import ADAPTIVE
from lmkv.policies.lru import LRU
from lmkv.policies.quota import Quotas
from lmkv.policies.weighted import WeightedAge
from lmkv.protocols import Policy


def like(policy: Policy) -> Policy:
    """An empty policy of the same kind, for a shadow; LRU for a class that cannot be made without arguments.

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
