"""The objects that all planners of the scheduler side share, such as options, store, block map and jobs."""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping
from typing import Any, Literal, Self, TypeVar

from attrs import define, field, fields, frozen

from lmkv.protocols import Clock
from lmkv.store.catalog import HitFinder
from lmkv.store.tiered import TieredStore
from lmkv.vllm.plan import JobReport, StepPlanBuilder
from lmkv.vllm.plan.block_map import BlockMap
from lmkv.vllm.plan.options import MAX_TOKENS
from lmkv.vllm.plan.request import Request
from lmkv.vllm.scheduler.observer import SchedulerObserver


@frozen(kw_only=True)
class SchedulerOptions:
    """The options of the scheduler side, from lmkv's and vLLM's configuration.

    `ranks`: number of workers that report on each job. `loads`: whether to load, False in a `kv_producer`. `stores`:
    whether to store, False in a `kv_consumer`. `save_decode`: whether to store generated tokens as well.
    `save_unfull_chunk`: whether to store tails (the tokens after a prompt's last whole chunk), and whether hits may end
    within a chunk. `whole_blocks`: whether hits must end at the end of a block, as with layer-by-layer loads. Such a
    load could overwrite tokens that the step computes in the same block.

    `min_retrieve_tokens`: number of tokens of the smallest hit to load. `load_or_recompute`: whether to compute chunks
    for which loading is slower than computing, by measured times. `load_mode`: whether loads are synchronous, within
    the step ("sync"), asynchronous, between steps ("async"), or whichever delays other requests less ("auto").
    `concurrent_copies`: whether the device copies while it computes. `prefetch_deadline`: largest number of seconds
    that a request waits for lower tiers. `lookahead`: on how many later tokens the KV of draft layers depends; a hit
    omits this number of tokens at its end.

    `state_interval`: number of chunks from one stored state of a long prompt to the next; with 0, states get as much
    space as chunks. `pin_ttl`: seconds for which prefetched chunks stay in host memory, and priorities without a time
    last. `audit_rate`: share of loads to audit. `audits_computed`: whether to audit the same share of hits.
    `audit_action`: whether an audit only deletes a wrong chunk, or switches loads off as well. `media_by_name`: whether
    equal names of images mean equal content. `longest`: number of tokens of the longest prompt. `clock`: a function
    that returns seconds.
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

    @classmethod
    def of(cls, config: object, **given: Any) -> Self:
        """Make options from the attributes of `config` that have the same names. `given`: options that replace those of
        `config`.
        """
        found = {each.name: getattr(config, each.name) for each in fields(cls) if hasattr(config, each.name)}
        return cls(**{**found, **given})


@define(eq=False)
class Job:
    """A job that the workers do for a request: one copy task or read task. Each planner has its own subclass.

    `distrusted`: whether to discard the result, for example because the copied KV may depend on blocks that a failed
    load has not filled.
    """

    planner: Planner = field(repr=False)
    request: Request
    distrusted: bool = field(init=False, default=False)


J = TypeVar("J", bound=Job)


class Jobs:
    """The jobs that have not ended. Only the scheduling thread calls the methods. `ranks`: number of workers that
    report on each job.
    """

    def __init__(self, ranks: int) -> None:
        self._ranks = ranks
        self._jobs: dict[int, Job] = {}
        self._reports: dict[int, JobReport] = {}
        """For each job number, the merged reports of the ranks that have reported so far."""

    def __len__(self) -> int:
        return len(self._jobs)

    def begin(self, number: int, job: Job) -> None:
        """Add a job. `number`: the job number of its task in the step's plan."""
        self._jobs[number] = job

    def get(self, number: int) -> Job | None:
        return self._jobs.get(number)

    def of(self, kind: type[J]) -> Iterator[J]:
        """Return the jobs of the class `kind`, the oldest first."""
        return (job for job in self._jobs.values() if isinstance(job, kind))

    def distrust(self) -> None:
        """Mark all current jobs as distrusted, so that their results are discarded.

        After a failed load, for example, requests may have computed KV from the unfilled blocks, which vLLM's prefix
        cache shares.
        """
        for job in self._jobs.values():
            job.distrusted = True

    def answered(self, reports: Mapping[int, JobReport]) -> Iterator[tuple[int, JobReport]]:
        """Add `reports`, which come from some ranks, to the earlier reports on the same jobs. Yield `(number, report)`
        for each job on which all ranks have now reported.
        """
        for number, part in reports.items():
            known = self._reports.pop(number, None)
            merged = part if known is None else known.merge(part)
            if merged.ranks < self._ranks:
                self._reports[number] = merged
            else:
                yield number, merged

    def end(self, number: int, report: JobReport) -> None:
        """End a job on which all ranks have reported. Unknown numbers are ignored."""
        job = self._jobs.pop(number, None)
        if job is not None:
            job.planner.ended(number, job, report)


@frozen
class PlanContext:
    """The objects of one engine that all planners share (see `Planner`)."""

    store: TieredStore
    boundaries: HitFinder
    block_map: BlockMap
    builder: StepPlanBuilder
    jobs: Jobs
    options: SchedulerOptions
    observer: SchedulerObserver


class Planner:
    """Base class of the parts of the scheduler side that make jobs for the workers.

    Only the scheduling thread calls the methods, which never wait.
    """

    def __init__(self, context: PlanContext) -> None:
        self._store, self._boundaries, self._block_map = context.store, context.boundaries, context.block_map
        self._builder, self._jobs, self._options = context.builder, context.jobs, context.options
        self._observer, self._telemetry = context.observer, context.observer.telemetry
        self._clock = context.options.clock
        self._chunk_size = context.block_map.chunk_size

    def ended(self, number: int, job: Job, report: JobReport) -> None:
        """Process the result of one of this planner's jobs, after all ranks have reported.

        `number`: the job's number. `report`: the merged reports of all ranks.
        """
