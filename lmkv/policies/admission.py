"""Which chunks a tier takes: all, none, or those that were offered before."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from types import MappingProxyType

from attrs import define, field
from cachetools import LRUCache

from lmkv.errors import ConfigError, UsageError
from lmkv.protocols import Admission, ChunkKey

DEFAULT_MAX_KEYS = 1 << 16
"""Offers that "second_touch" remembers: about 19 MB of memory, and 16.8 million tokens in chunks of 256."""


class AdmitAll:
    """Takes everything."""

    def admit(self, key: ChunkKey) -> bool:
        return True


class AdmitNone:
    """Takes nothing: the tier serves what it has."""

    def admit(self, key: ChunkKey) -> bool:
        return False


def _positive(_: object, __: object, max_keys: int) -> None:
    if max_keys < 1:
        raise UsageError(f"max_keys must be positive, not {max_keys}")


@define(eq=False)
class SecondTouch:
    """Takes a key from its second offer on, as long as it is among the last `max_keys` offered ones.

    It spares a disk the writes of what is never asked for again, at the price of one more miss for what is.
    """

    max_keys: int = field(default=DEFAULT_MAX_KEYS, validator=_positive)
    _offered: LRUCache[ChunkKey, None] = field(init=False)

    def __attrs_post_init__(self) -> None:
        self._offered = LRUCache(self.max_keys)

    def admit(self, key: ChunkKey) -> bool:
        known = key in self._offered
        self._offered[key] = None
        return known


ADMISSIONS: Mapping[str, Callable[[], Admission]] = MappingProxyType(
    {"all": AdmitAll, "second_touch": SecondTouch, "none": AdmitNone}
)
"""The filters that a configuration can name."""


def make_admission(name: str) -> Admission:
    """A new admission filter; an unknown name is a `ConfigError`."""
    if name not in ADMISSIONS:
        raise ConfigError(f"unknown admission {name!r}; there are: {', '.join(ADMISSIONS)}")
    return ADMISSIONS[name]()
