"""`PlanContext`: everything that the planners of both directions share."""

from __future__ import annotations

from attrs import frozen

from lmkv.store.boundaries import Boundaries
from lmkv.store.tiered import TieredStore
from lmkv.vllm.block_map import BlockMap
from lmkv.vllm.metadata import StepPlanBuilder
from lmkv.vllm.observe.observer import SchedulerObserver
from lmkv.vllm.scheduler.options import SchedulerOptions


@frozen(kw_only=True)
class PlanContext:
    """One engine's store, where hits may end, its map of blocks to chunks, the step's plan, options, observer."""

    store: TieredStore
    boundaries: Boundaries
    block_map: BlockMap
    builder: StepPlanBuilder
    options: SchedulerOptions
    observer: SchedulerObserver

    @property
    def chunk_size(self) -> int:
        """Tokens per chunk."""
        return self.block_map.chunk_size

    @property
    def loads_within_step(self) -> bool:
        """Whether a step may load what it reads: vLLM must be able to go on without it."""
        return self.block_map.one_full_table and self.options.load_mode != "async"
