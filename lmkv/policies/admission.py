"""Admission filters: a tier takes all chunks, none, or those that were offered to it before."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from types import MappingProxyType

from attrs import define, field
from cachetools import LRUCache

from lmkv import plugins
from lmkv.errors import ConfigError, UsageError
from lmkv.protocols import Admission, ChunkKey

DEFAULT_MAX_KEYS = 1 << 16
"""Keys that "second_touch" remembers: about 19 MB of memory, for 16.8 million tokens in chunks of 256."""


class AdmitAll:
    """Admits every chunk.

    Examples
    --------
    >>> AdmitAll().admit(b"a")
    True
    """

    def admit(self, key: ChunkKey) -> bool:
        return True


class AdmitNone:
    """Admits no chunk: the tier only serves the chunks that it has.

    Examples
    --------
    >>> AdmitNone().admit(b"a")
    False
    """

    def admit(self, key: ChunkKey) -> bool:
        return False


def _positive(_: object, __: object, max_keys: int) -> None:
    if max_keys < 1:
        raise UsageError(f"max_keys must be positive, not {max_keys}")


@define(eq=False, repr=False)
class SecondTouch:
    """Admits a chunk when it is offered again: chunks that are used once do not wear the disk.

    Parameters
    ----------
    max_keys
        How many of the last offered keys to remember.

    Raises
    ------
    UsageError
        `max_keys` is not positive.

    Notes
    -----
    Not thread-safe: the store asks its filters under its lock.

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


ADMISSIONS: Mapping[str, Callable[[], Admission]] = MappingProxyType(
    {"all": AdmitAll, "second_touch": SecondTouch, "none": AdmitNone}
)
"""The filters that a configuration can name."""


def make_admission(name: str) -> Admission:
    """A new admission filter: one of `ADMISSIONS`, or `package.module:Class`. Raises ConfigError for any other."""
    if name in ADMISSIONS:
        return ADMISSIONS[name]()
    if not plugins.is_place(name):
        raise ConfigError(f"unknown admission {name!r}; there are: {', '.join(ADMISSIONS)}")
    admission: Admission = plugins.make(name, f"disk_admission {name!r}", Admission)
    return admission
