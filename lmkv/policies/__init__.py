"""Eviction policies and admission filters. They know only keys and sizes of chunks, and use no locks, clocks or I/O."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from types import MappingProxyType
from typing import Final

from attrs import Attribute, define, field
from cachetools import LRUCache

from lmkv import plugins
from lmkv.errors import ConfigError, UsageError
from lmkv.policies.adaptive import ADAPTIVE, Shadow, WeightedAge
from lmkv.policies.base import PolicyBase
from lmkv.policies.queues import ARC, FIFO, LFU, LRU, MRU, S3FIFO, SIEVE, SLRU, QueuePolicy
from lmkv.policies.quota import Quotas
from lmkv.protocols import Admission, ChunkKey, Policy

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

DEFAULT_MAX_KEYS = 1 << 16
"""Number of keys that a filter remembers by default: 19 MB of memory, for 16.8 million tokens in chunks of 256."""
DEFAULT_MIN_TOKENS = 4096


class AdmitAll:
    """An admission filter that admits every chunk.

    Examples
    --------
    >>> AdmitAll().admit(b"a")
    True
    """

    def admit(self, key: ChunkKey) -> bool:
        return True


class AdmitNone:
    """An admission filter that admits no chunk. The tier then only serves the chunks that it has already.

    Examples
    --------
    >>> AdmitNone().admit(b"a")
    False
    """

    def admit(self, key: ChunkKey) -> bool:
        return False


def _positive(_: object, attribute: Attribute[int], number: int) -> None:
    if number < 1:
        raise UsageError(f"{attribute.name} must be positive, not {number}")


@define(eq=False, repr=False)
class SecondTouch:
    """An admission filter that admits a chunk when the store offers it to the tier for the second time.

    Chunks that are used only once are not written, and so do not wear out the disk.

    Parameters
    ----------
    max_keys
        The number of offered keys that the filter remembers. The filter forgets the oldest keys first.

    Raises
    ------
    UsageError
        `max_keys` is not positive.

    Notes
    -----
    Not thread-safe: the store calls its filters while it holds its lock.

    Examples
    --------
    >>> admission = SecondTouch()
    >>> admission.admit(b"a"), admission.admit(b"a"), admission.admit(b"b")
    (False, True, False)
    """

    max_keys: int = field(default=DEFAULT_MAX_KEYS, validator=_positive)
    _offered: LRUCache[ChunkKey, None] = field(init=False)

    def __repr__(self) -> str:
        return f"<SecondTouch: {len(self._offered)} of {self.max_keys} keys>"

    def __attrs_post_init__(self) -> None:
        self._offered = LRUCache(self.max_keys)

    def admit(self, key: ChunkKey) -> bool:
        known = key in self._offered
        self._offered[key] = None
        return known


@define(eq=False)
class MinTokens:
    """An admission filter that admits only chunks of long prompts, so that chunks of short prompts do not wear out the
    disk.

    Parameters
    ----------
    min_tokens
        The smallest number of tokens of a long prompt.
    max_keys
        The number of keys of long prompts that the filter remembers.

    Raises
    ------
    UsageError
        An argument is not positive.

    Notes
    -----
    Not thread-safe: the store calls its filters while it holds its lock. If a short prompt grows into a long prompt,
    its first chunks stay refused until the store offers them to the tier again.

    Examples
    --------
    >>> admission = MinTokens(1000)
    >>> admission.prompt([b"a"], tokens=400)
    >>> admission.prompt([b"b"], tokens=4000)
    >>> admission.admit(b"a"), admission.admit(b"b")
    (False, True)
    """

    min_tokens: int = field(default=DEFAULT_MIN_TOKENS, validator=_positive)
    max_keys: int = field(default=DEFAULT_MAX_KEYS, validator=_positive)
    _long: LRUCache[ChunkKey, None] = field(init=False, repr=False)

    def __attrs_post_init__(self) -> None:
        self._long = LRUCache(self.max_keys)

    def prompt(self, keys: Sequence[ChunkKey], tokens: int) -> None:
        if tokens >= self.min_tokens:
            self._long.update(dict.fromkeys(keys))

    def admit(self, key: ChunkKey) -> bool:
        return key in self._long


ADMISSIONS: Mapping[str, Callable[[], Admission]] = MappingProxyType(
    {"all": AdmitAll, "second_touch": SecondTouch, "min_tokens": MinTokens, "none": AdmitNone}
)
"""The admission filters that a configuration can name."""

_MIN_TOKENS: Final = re.compile(r"min_tokens:([1-9]\d{0,8})")


def make_admission(name: str) -> Admission:
    """Return a new admission filter. `name`: one of `ADMISSIONS`, `min_tokens:N`, or `package.module:Class`.

    Raises ConfigError for any other name.
    """
    if name in ADMISSIONS:
        return ADMISSIONS[name]()
    if number := _MIN_TOKENS.fullmatch(name):
        return MinTokens(int(number[1]))
    if not plugins.is_place(name):
        raise ConfigError(f"unknown admission {name!r}; known are: {', '.join(ADMISSIONS)}")
    admission: Admission = plugins.make(name, f"disk_admission {name!r}", Admission)
    return admission


POLICIES: Mapping[str, Callable[[], Policy]] = MappingProxyType(
    {made.__name__: made for made in (LRU, FIFO, LFU, MRU, ARC, SLRU, S3FIFO, SIEVE, ADAPTIVE)}
)
"""lmkv's own policies, by the names that a configuration uses for them."""


def policy_names() -> Iterator[str]:
    """Yield the allowed values of the setting `cache_policy`: names of lmkv's policies, then of installed packages'
    policies.
    """
    yield from POLICIES
    yield from (name for name in plugins.installed(plugins.POLICIES) if name not in POLICIES)


def make_policy(name: str) -> Policy:
    """Return a new, empty policy. `name`: one of `policy_names()`, or `package.module:Class`.

    Raises ConfigError for any other name.
    """
    if name in POLICIES:
        return POLICIES[name]()
    place = name if plugins.is_place(name) else plugins.installed(plugins.POLICIES).get(name)
    if place is None:
        raise ConfigError(f"unknown cache policy {name!r}; known are: {', '.join(policy_names())}")
    policy: Policy = plugins.make(place, f"cache_policy {name!r}", Policy)
    return policy


def like(policy: Policy) -> Policy:
    """Return an empty policy of the same class as `policy`, or an LRU policy if the class needs arguments.

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
