"""`Recount`: puts a store right after a change that an exception has cut short, from what still refers to its slots."""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Sequence
from functools import partial

from attrs import define

from lmkv.store.flusher import Flusher
from lmkv.store.hints import Hints
from lmkv.store.leases import Holders
from lmkv.store.pins import Pins
from lmkv.store.promoter import Promoter
from lmkv.store.tiers.iopool import IOPool
from lmkv.store.tiers.jobs import AfterLock, Job, Priority, deletion
from lmkv.store.tiers.lower import LowerTier
from lmkv.store.tiers.primary import PrimaryTier

logger = logging.getLogger(__name__)


@define(eq=False, repr=False)
class Recount:
    """Called under the store's lock.

    Nothing but the entries, and who holds them, is taken for true: counts, free slots and policies are made anew. Any
    exception within leaves the same work to be done again.
    """

    _holders: Holders
    _pins: Pins
    _hints: Hints
    _primary: PrimaryTier
    _tiers: Sequence[LowerTier]
    _promoter: Promoter
    _flusher: Flusher
    _pool: IOPool

    def __call__(self) -> None:
        self._count(self._tiers, cut_short=True)

    def after_clear(self, *, lower: bool) -> None:
        """Count anew what was just emptied, without `lower` host memory alone: an index may have millions of chunks."""
        self._count(self._tiers if lower else (), cut_short=False)

    def _count(self, tiers: Sequence[LowerTier], *, cut_short: bool) -> None:
        after = AfterLock()
        refs = Counter(self._pins.recount())
        held = list(self._holders.entries())
        refs.update(entry for entry, _ in held)
        self._flusher.recount(refs, after)
        filled = self._promoter.recount(refs) | {entry for entry, fills in held if fills}
        self._primary.recount(refs, filled)
        self._promoter.settle(after)
        for tier in tiers:
            tier.index.recount(self._promoter.reading(tier))
            after.jobs.append(deletion(tier.delete_all if tier.index.clearing else tier.reclaim, tier.name))
        # Their policies are new, too.
        self._hints.recount()
        # The plans run after the lock's release, as all plans do.
        self._pool.submit([Job(partial(_run, after, cut_short), Priority.LOAD, lambda after: None)])


def _run(planned: AfterLock, cut_short: bool, after: AfterLock) -> None:
    if cut_short:
        logger.warning("lmkv: an exception has cut a change of the store short; slots and indexes were counted anew")
    after.jobs += planned.jobs
    after.calls += planned.calls
