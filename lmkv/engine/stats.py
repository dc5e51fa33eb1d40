"""`EngineStats`: the totals of an engine."""

from __future__ import annotations

from attrs import frozen

from lmkv.store.stats import StoreStats


@frozen
class EngineStats:
    """Totals of an engine's calls since it was opened, in tokens, and its store's state; from `Engine.stats`.

    Notes
    -----
    A snapshot, which never changes. `requested_tokens`: tokens of the chunks that callers asked to load.
    """

    stored_tokens: int
    retrieved_tokens: int
    requested_tokens: int
    store: StoreStats
