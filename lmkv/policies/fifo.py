"""`FIFO`: evicts the chunk that was inserted first."""

from __future__ import annotations

from attrs import define

from lmkv.policies.queue import QueuePolicy


@define(eq=False, repr=False)
class FIFO(QueuePolicy):
    """Evicts the chunk that was inserted first, however often it was used.

    Raises
    ------
    UsageError
        A key is inserted twice or with no size, or held or released without being known.

    Notes
    -----
    A key keeps its place while it is held. When its turn comes meanwhile, it is the first to be evicted
    once it is released.

    Examples
    --------
    >>> policy = FIFO()
    >>> for name in (b"a", b"b", b"c"):
    ...     policy.insert(name, size=10)
    >>> policy.touch([b"a"])
    >>> policy.evict(15)
    [b'a', b'b']
    """
