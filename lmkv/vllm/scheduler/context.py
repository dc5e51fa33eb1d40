"""What the planners of both directions share: options, store, block map, the step's plan, observer."""

from __future__ import annotations

import time
from typing import Literal

from attrs import frozen

from lmkv.protocols import Clock
from lmkv.store.catalog import Boundaries
from lmkv.store.tiered import TieredStore
from lmkv.vllm.plan.block_map import BlockMap
from lmkv.vllm.plan.metadata import StepPlanBuilder
from lmkv.vllm.plan.options import MAX_TOKENS
from lmkv.vllm.scheduler.jobs import Jobs
from lmkv.vllm.scheduler.observer import SchedulerObserver


@frozen(kw_only=True)
class SchedulerOptions:
    """Made once, by the connector, from lmkv's and vLLM's configuration. The fields are in order:

    `ranks`: workers that answer each order. `loads`, `stores`: False switches that direction off, as for a
    producer or a consumer. `save_decode`: generated tokens are stored too. `save_unfull_chunk`: tails are
    stored and found, and chunks that begin like the rest of a prompt. `whole_blocks`: a hit ends with a
    block, because loads by layers come after the step has written the rest of that block.
    `min_retrieve_tokens`: smaller hits are computed. `load_or_recompute`: compute chunks that are measured
    to load more slowly. `load_mode`: within the step that reads the KV ("sync"), between steps ("async"), or whichever
    delays others less ("auto"). `concurrent_copies`: the device copies while it computes.
    `prefetch_deadline`: most seconds that a request waits for chunks of lower tiers. `lookahead`: how many
    tokens after a position its KV depends on, so that the end of a key's tokens cannot be served.
    `state_interval`: chunks from one kept state of a long prompt to the next; 0: so many that states take as much room
    as chunks. `pin_ttl`: seconds that a prefetch is kept, and a priority lasts. `audit_rate`: share of hits that are
    computed all the same, and compared, if `audits_computed`; and of loads that are read back. After a wrong one
    `audit_action` drops it, or disables loads as well. `media_by_name`: names of images are theirs alone. `longest`:
    tokens of the longest prompt. `clock`: in seconds.
    """

    ranks: int = 1
    loads: bool = True
    stores: bool = True
    save_decode: bool = True
    save_unfull_chunk: bool = False
    whole_blocks: bool = False
    min_retrieve_tokens: int = 0
    load_or_recompute: bool = True
    load_mode: Literal["auto", "sync", "async"] = "auto"
    concurrent_copies: bool = False
    prefetch_deadline: float = 30.0
    lookahead: int = 0
    state_interval: int = 0
    pin_ttl: float = 300.0
    audit_rate: float = 0.0
    audits_computed: bool = True
    audit_action: Literal["drop", "disable"] = "drop"
    media_by_name: bool = False
    longest: int = MAX_TOKENS
    clock: Clock = time.monotonic


@frozen(kw_only=True)
class PlanContext:
    """One engine's store, where hits may end, its map of blocks to chunks, the step's plan, jobs, options, observer."""

    store: TieredStore
    boundaries: Boundaries
    block_map: BlockMap
    builder: StepPlanBuilder
    jobs: Jobs
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
