"""`Audit`: a hit that a request computes all the same, so that it can be compared with what is stored."""

from __future__ import annotations

from collections.abc import Sequence

from attrs import define, field

from lmkv.chunks.hashing import TailKey


@define(eq=False)
class Audit:
    """The hit's chunks from number `first` up to `end`, and the states behind them; `next` is compared next.

    `tiers`: which tier would have delivered each of these chunks. `computed`: tokens of vLLM's own hit before them,
    which may have been loaded earlier. `tail`: of the prompt, if it comes next and has whole pages.
    """

    first: int
    end: int
    tiers: Sequence[str] = field(repr=False)
    computed: int
    tail: TailKey | None = None
    next: int = field(init=False)

    def __attrs_post_init__(self) -> None:
        self.next = self.first

    def tier(self, chunk: int) -> str:
        """The tier that would have delivered this chunk."""
        return self.tiers[min(chunk - self.first, len(self.tiers) - 1)]
