"""Admission filters and observers, which may be other packages': their exceptions end neither a call nor the store.

The first one is a line in the log. All are called under the store's lock.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence

from attrs import define, field

from lmkv.errors import safe_repr
from lmkv.protocols import Admission, ChunkKey, SeesPrompts
from lmkv.store.tiers.observer import StoreObserver

logger = logging.getLogger(__name__)


@define(eq=False)
class GuardedAdmission:
    """A filter that admits nothing where it raises."""

    _admission: Admission
    _tier: str
    _told: bool = field(init=False, default=False)

    @property
    def sees_prompts(self) -> bool:
        return isinstance(self._admission, SeesPrompts)

    def admit(self, key: ChunkKey) -> bool:
        try:
            return bool(self._admission.admit(key))
        except Exception as error:
            self._tell(error)
            return False

    def prompt(self, keys: Sequence[ChunkKey], tokens: int) -> None:
        try:
            if isinstance(self._admission, SeesPrompts):
                self._admission.prompt(keys, tokens)
        except Exception as error:
            self._tell(error)

    def _tell(self, error: Exception) -> None:
        if not self._told:
            self._told = True
            logger.warning("lmkv: tier %r: its admission failed: %s", self._tier, safe_repr(error))


@define(eq=False)
class GuardedObserver:
    """An observer that is told nothing more once it has raised."""

    _observer: StoreObserver
    _ended: bool = field(init=False, default=False)

    def stored(self, tier: str, key: ChunkKey) -> None:
        try:
            if not self._ended:
                self._observer.stored(tier, key)
        except Exception as error:
            self._end(error)

    def removed(self, tier: str, key: ChunkKey) -> None:
        try:
            if not self._ended:
                self._observer.removed(tier, key)
        except Exception as error:
            self._end(error)

    def _end(self, error: Exception) -> None:
        self._ended = True
        logger.error("lmkv: an observer of a store is told nothing more: it failed: %s", safe_repr(error))
