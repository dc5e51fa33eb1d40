"""Admission filters and observers, which may be other packages': their exceptions end neither a call nor the store.

The first one is a line in the log. All are called under the store's lock.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence

from attrs import define, field

from lmkv.errors import safe_repr
from lmkv.protocols import Admission, ChunkKey, SeesPrompts
from lmkv.store.tiers.attempt import attempt
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
        return attempt(lambda: bool(self._admission.admit(key)), self._refuse)

    def prompt(self, keys: Sequence[ChunkKey], tokens: int) -> None:
        if isinstance(admission := self._admission, SeesPrompts):
            attempt(lambda: admission.prompt(keys, tokens), self._tell)

    def _refuse(self, error: Exception) -> bool:
        self._tell(error)
        return False

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
        if not self._ended:
            attempt(lambda: self._observer.stored(tier, key), self._end)

    def removed(self, tier: str, key: ChunkKey) -> None:
        if not self._ended:
            attempt(lambda: self._observer.removed(tier, key), self._end)

    def _end(self, error: Exception) -> None:
        self._ended = True
        logger.error("lmkv: an observer of a store is told nothing more: it failed: %s", safe_repr(error))
