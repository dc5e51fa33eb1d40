"""A small model of vLLM's scheduling around a KV connector, with an oracle for every byte of KV.

It knows nothing of lmkv but the two sides' calls. Time passes by steps alone, and I/O gets on between them:
the same seed gives the same history.

The KV of a token is a hash of everything that decides it (salt and all tokens up to it), so that one wrong, stale or
missing byte shows in the step that reads it. So is a recurrent layer's state, which a step reads before its loads
begin, and writes into the block of its last token.
"""

from __future__ import annotations

import functools
import hashlib
import itertools
import random
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from functools import partial
from typing import Any, Literal, Self

import numpy as np
import pytest
import torch
from attrs import define, evolve, field, frozen

from lmkv.backends.cpu import CPUPinnedBackend
from lmkv.chunks.layout import KVLayout, LayerPages
from lmkv.chunks.namespace import Namespace
from lmkv.memory.comparison import Part
from lmkv.memory.device import DeviceCopier, Staging
from lmkv.memory.paged import PagedMemory
from lmkv.policies import LRU
from lmkv.protocols import Admission, Backend, Policy, Tier
from lmkv.store.tiered import TieredStore
from lmkv.testing.faults import FaultyBackend, FaultyCopier
from lmkv.vllm import compat
from lmkv.vllm.plan import StepPlan
from lmkv.vllm.plan.block_map import BlockMap, Group
from lmkv.vllm.plan.request import Request
from lmkv.vllm.scheduler import Scheduler
from lmkv.vllm.scheduler.context import SchedulerOptions
from lmkv.vllm.scheduler.events import Describe, Event, EventRecorder
from lmkv.vllm.scheduler.telemetry import Values, merge
from lmkv.vllm.worker import Worker
from tests.kit import LIMIT
from tests.simulated_device import SimulatedDevice
from tests.store.stepped import Pausing, sleep, stepped

PAGE = 32
NULL = 0


@frozen
class Ring:
    """One block per request with the last tokens, of which those of an unfinished group of `ratio` are read again."""

    block_size: int
    ratio: int
    window: int | None = None
    state: int = 0


@frozen
class Replay:
    """A window that is computed again after a hit, whose last tokens vLLM has computed twice for it."""

    block_size: int
    window: int
    state: int = 0


Table = Group | Ring | Replay
Place = tuple[int, slice]
"""A block, and bytes in it."""


@functools.lru_cache(1 << 16)
def kv_of(salt: str, tokens: bytes, layer: int, nbytes: int) -> bytes:
    """The KV of the last of `tokens` in a layer."""
    return hashlib.sha256(f"{salt} {layer} ".encode() + tokens).digest()[:nbytes]


def next_token(salt: str, tokens: Sequence[int]) -> int:
    return hashlib.sha256(f"{salt} next ".encode() + bytes(tokens)).digest()[0] % 50


@define(eq=False)
class SimulatedRequest:
    """A vLLM Request as connectors see it, and the simulation's own notes."""

    request_id: str
    all_token_ids: list[int]
    num_prompt_tokens: int
    max_tokens: int
    cache_salt: str
    kv_transfer_params: dict[str, Any] | None = None
    mm_features: list[Any] = field(factory=list)
    lora_request: Any = None
    blocks: list[list[int]] = field(factory=list)
    computed: int = 0
    shareable: int = 0
    """How many of its leading blocks were offered to others once."""
    status: str = "waiting"
    in_flight: int = 0
    """Tokens sampled on the device and not known to the scheduler yet, as if all drafts were accepted."""
    num_in_flight_tokens: int = 0
    """Tokens that steps compute whose outputs the scheduler does not know yet, drafts included."""
    rejected: int = 0
    """Those of them that the device has rejected."""
    ends: set[int] = field(factory=set)
    """Where steps of it are known to have ended, or to end if nothing is accepted, when another one is scheduled."""
    state_place: int | None = None
    """Where in its state tables the last step has left its state; None before its first step."""
    epoch: int = 0
    """Counts preemptions and rewinds: what was sampled before one is void."""
    tainted: bool = False
    """It has read blocks whose load failed: until that is known, all that it computes is rubbish."""
    loaded: int = 0
    """Tokens that it had when it began to compute."""
    admitted: bool = False
    """It has been scheduled once."""
    replays: bool = False
    """It has a hit whose last tokens are still to be computed again, where vLLM keeps no KV of them."""
    shared_prefix_boundary: int = 0
    """Where a step has to end, so that the state there can be kept."""

    @property
    def num_tokens(self) -> int:
        return len(self.all_token_ids)

    @property
    def num_computed_tokens(self) -> int:
        return self.computed

    @property
    def start(self) -> int:
        """Tokens before the step that the device is to compute."""
        return self.computed - self.rejected

    def truth(self, upto: int) -> list[int]:
        """All tokens, those the scheduler does not know yet included."""
        tokens = list(self.all_token_ids)
        while len(tokens) < upto:
            tokens.append(next_token(self.cache_salt, tokens))
        return tokens[:upto]


def request_for(name: str, tokens: Sequence[int], answer: int = 1, salt: str = "a", **params: Any) -> SimulatedRequest:
    """A request with this prompt, for an answer of so many tokens."""
    return SimulatedRequest(name, list(tokens), len(tokens), answer, salt, params or None)


@frozen
class _Share:
    """What a step computes of one request: so many tokens, the last of them drafts, of which some are accepted."""

    request: SimulatedRequest
    epoch: int
    tokens: int
    drafts: int = 0
    accepted: int = 0
    samples: bool = False


class AtOnce(ThreadPoolExecutor):
    """Does the work within `submit`, so that the same seed gives the same history."""

    def submit(self, fn: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Future[Any]:
        future: Future[Any] = Future()
        future.set_result(fn(*args, **kwargs))
        return future


@define(eq=False)
class _Step:
    shares: list[_Share]
    report: Any
    failed_blocks: set[int]
    finished: set[str]
    failed: set[str]
    progress: dict[str, int]
    """How far each request of the step was before it."""


class SimulatedVLLM:
    """One engine: block pool, waiting and running queues, `depth` steps between scheduling and knowing.

    `rng`: or its seed. `local_hits`: how often a request finds a part of its prompt in the engine's own prefix cache.
    `io_moves`: how often jobs get on between two steps, at most; three times, and one is done. `device`: each
    rank computes and copies on a simulated device of its own, some time after it was told to. `medium`: of the
    lower tier, with what an engine before has stored there. `lookahead`: the second layer of each group is one of a
    draft model, whose KV depends on so many tokens after its own. `describe`: have events recorded.
    `load_or_recompute`: wait for loads by what they save, where a step takes 0.01 simulated seconds; otherwise 0.8
    for any. `context`: over so many ranks the tokens of a block are spread, one after the other. `block_map`: of a
    model with scratch blocks, some of the `groups`. `audit_rate`, `audit_action`, `min_retrieve_tokens`: of the
    options.
    """

    def __init__(
        self,
        rng: random.Random | int = 0,
        *,
        num_blocks: int = 90,
        groups: Sequence[Table] = (Group(4),),
        chunk_size: int = 8,
        ram_chunks: int = 24,
        local_hits: float = 0.3,
        lower_chunks: int = 0,
        depth: int = 1,
        drafts: bool = False,
        load_faults: float = 0.0,
        store_faults: float = 0.0,
        ranks: int = 1,
        layerwise: bool = False,
        load_mode: Literal["auto", "sync", "async"] = "auto",
        lookahead: int = 0,
        save_unfull_chunk: bool = True,
        min_retrieve_tokens: int = 0,
        prefix_caching: bool = False,
        aborts: float = 0.0,
        io_moves: int = 10,
        device: bool = False,
        medium: Backend | None = None,
        policy: Callable[[], Policy] = LRU,
        admission: Admission | None = None,
        describe: Describe | None = None,
        load_or_recompute: bool = False,
        context: int = 1,
        block_map: BlockMap | None = None,
        audit_rate: float = 0.0,
        audit_action: Literal["drop", "disable"] = "drop",
    ) -> None:
        self.rng = rng = rng if isinstance(rng, random.Random) else random.Random(rng)
        self.io_moves = io_moves
        self.groups = tuple(groups)
        self.context = context
        if block_map is None:
            cached = [evolve(each, table=n) for n, each in enumerate(groups) if isinstance(each, Group)]
            block_map = BlockMap(chunk_size, tuple(cached), scratch=len(cached) < len(groups))
        self.prefixes = list(range(len(groups)))
        """Numbers of the block tables that hold prefixes."""
        if block_map.scratch:
            self.prefixes = [group.table or 0 for group in block_map.groups]
        self.depth = depth
        self.states = [index for index, group in enumerate(self.groups) if group.state]
        self.drafts = drafts
        lookahead = min(lookahead, 1) if self.states else lookahead
        save_unfull_chunk = save_unfull_chunk and not self.states
        self.offers: dict[str, list[tuple[int, int, int]]] = {}
        self.load_faults, self.store_faults = load_faults, store_faults
        self.aborts = aborts
        self.local_hits = local_hits
        self.chunk_size, self.lookahead = chunk_size, lookahead
        # Where draft layers look ahead, vLLM drops the end of its own hits, which is not simulated.
        self.shares = prefix_caching and block_map.one_full_table and not lookahead
        self.num_blocks = num_blocks
        self.free = list(range(1, num_blocks))
        self.users: Counter[int] = Counter()
        self.content: dict[int, tuple[str, tuple[int, ...]]] = {}
        """Of blocks that others may share, used or free: the salt and tokens that decide what is in them."""
        self.cached: dict[tuple[str, tuple[int, ...]], int] = {}
        layers = [
            LayerPages(PAGE, 1 if group.state else chunk_size // group.block_size, index, group.state)
            for index, group in enumerate(block_map.groups)
            for _ in range(2)
        ]
        layout = KVLayout(chunk_size, tuple(layers), ranks)
        self.now = 0.0
        self.disks: list[FaultyBackend] = []
        lower = []
        if lower_chunks:
            size = layout.slot_bytes * lower_chunks
            if medium is None:
                medium = CPUPinnedBackend(size, layout.slot_bytes, populate=False)
                medium.name = "lower"
            self.disks = [FaultyBackend(medium, sleep=self._sleep)]
            lower = [Tier(Pausing(self.disks[0]), policy(), size, admission)]
        host = CPUPinnedBackend(layout.slot_bytes * ram_chunks, layout.slot_bytes, shared=True, populate=False)
        with stepped():
            self.store = TieredStore(
                Tier(host, policy()), lower, spans=layout.spans, sizes=layout.sizes, clock=lambda: self.now
            )
        namespace = Namespace(model="m", dtype="u8", chunk_size=chunk_size, block_size=groups[0].block_size)
        self.events: list[Event] = []
        self.scheduler = Scheduler(
            self.store,
            namespace,
            block_map,
            SchedulerOptions(
                ranks=ranks,
                load_mode="async" if depth > 1 else load_mode,
                lookahead=lookahead,
                save_unfull_chunk=save_unfull_chunk,
                min_retrieve_tokens=min_retrieve_tokens,
                whole_blocks=layerwise and block_map.one_full_table,
                load_or_recompute=load_or_recompute,
                prefetch_deadline=30.0 if load_or_recompute else 0.8,
                audit_rate=audit_rate,
                audit_action=audit_action,
                clock=lambda: self.now,
            ),
            EventRecorder(self.store, block_map, describe) if describe is not None else None,
        )
        self.scheduler.watch_blocks(lambda: len(self.free), self._evict_blocks, num_blocks)
        self.scheduler.audit.sampler.draw = rng.random
        self.scheduler.matcher.stop_at = compat.stop_at
        self.memories: list[list[np.ndarray]] = []
        """Of each rank, and each of its layers, the same bytes as the worker's."""
        self.workers = []
        self.devices: list[SimulatedDevice] = []
        self.ended_on = Counter[str]()
        """Ranks on which the load of a request has ended, until it has on all of them."""
        self.failed_on: set[str] = set()
        self.wrong: list[str] = []
        """What the devices have read that was not right; where anything else is, rubbish only."""
        for rank in range(ranks):
            every = [torch.zeros((num_blocks, PAGE), dtype=torch.uint8) for _ in range(2 * len(self.groups))]
            rows = [every[layer] for table in self.prefixes for layer in self._layers(table)]
            single = block_map.one_full_table
            parts = [Part(f"layer {plane}", plane, 0, PAGE, torch.float8_e5m2) for plane in range(len(rows))]
            worker = Worker(rank, layout, block_level_failures=single, layerwise=layerwise and single)
            memory = PagedMemory(rows, [layer.group for layer in layers], fuse=False)
            if device:
                self.devices.append(SimulatedDevice(rng.randrange(2**32), rng.choice([None, 0])))
                self.devices[-1].adopt(every)
            with pytest.MonkeyPatch.context() as patch:
                if device:
                    staging = Staging(self.devices[-1], memory, rng.choice([1, 500, 5000]))
                    patch.setattr("lmkv.vllm.worker.make_staging", lambda *_, staging=staging: staging)
                worker.register(memory, parts)
                worker._comparer._pool = AtOnce()
            self.memories.append([row.numpy() for row in every])
            self.workers.append(worker)
        self._computing = False
        self._due: dict[int, list[Callable[[], object]]] = defaultdict(list)
        """What each rank is to do when the next step has begun."""
        self._lost: list[str] = []
        """Requests that were preempted since the last step."""
        self.waiting: list[SimulatedRequest] = []
        self.running: list[SimulatedRequest] = []
        self.loading: list[SimulatedRequest] = []
        self.pipeline: list[_Step] = []
        self.looked_up = 0
        """Tokens that a load could have brought, of requests when they were first scheduled."""
        self.samples: Values = {}
        """What the scheduler side has counted."""
        self.counts = dict.fromkeys(
            ("hits", "partial_hits", "shared", "preempted", "aborted", "recomputed", "async_loads", "finished"), 0
        )

    def _sleep(self, seconds: float) -> None:
        """A call of the disk takes so long, or until the disk is fast again."""
        end = self.now + seconds
        sleep(lambda: self.now < end and self.disks[0].latency > 0)

    # -- requests -----------------------------------------------------------------------------------------

    def add(self, request: SimulatedRequest) -> None:
        self.waiting.append(request)
        self.scheduler.on_new_request(request)

    def begin(
        self, name: str, tokens: Sequence[int], answer: int = 1, salt: str = "a", **params: Any
    ) -> SimulatedRequest:
        """A request that has arrived."""
        request = request_for(name, tokens, answer, salt, **params)
        self.add(request)
        return request

    def serve(
        self, name: str, tokens: Sequence[int], answer: int = 1, salt: str = "a", **params: Any
    ) -> SimulatedRequest:
        """A request, from its arrival to the end of all that there are."""
        request = self.begin(name, tokens, answer, salt, **params)
        self.finish()
        return request

    def abort(self, request: SimulatedRequest) -> None:
        self.counts["aborted"] += 1
        self._end(request)

    def _end(self, request: SimulatedRequest) -> None:
        self.scheduler.request_finished(request)
        for queue in (self.waiting, self.running):
            if request in queue:
                queue.remove(request)
        if request in self.loading:
            request.status = "ended"  # its blocks stay until the load is reported
        else:
            request.status = "ended"
            self._free(request)

    def _free(self, request: SimulatedRequest) -> None:
        for group, table in enumerate(request.blocks):
            for block in table:
                if block != NULL:
                    self._release(group, block)
        request.blocks, request.shareable = [], 0

    def _release(self, group: int, block: int) -> None:
        self.users[block] -= 1
        if not self.users[block]:
            self.free.append(block)
            if block not in self.content:
                self._poison(group, block)

    def _poison(self, group: int, block: int) -> None:
        """A freed block is soon another request's: what still reads it must be caught."""
        for rank, rows in enumerate(self.memories):
            for index in self._layers(group):
                self.write(rank, rows[index], [((block, slice(None)), 0xEE)])

    def _launch(self, rank: int, work: Callable[[], object]) -> None:
        """Computation of a rank: now, or whenever its device comes to it; not before the next step has begun."""
        if not self._computing:
            self._due[rank].append(work)
        elif self.devices:
            self.devices[rank].launch(work)
        else:
            work()

    def write(self, rank: int, row: np.ndarray, values: Sequence[tuple[Place, Any]]) -> None:
        """One kernel, which writes everything at once."""

        def write() -> None:
            for place, value in values:
                row[place] = value

        self._launch(rank, write)

    def _read(self, rank: int, row: np.ndarray, wanted: Sequence[tuple[int, Place, bytes | None]], where: str) -> None:
        """One kernel, which reads everything at once: number of a token, place and content; None: anything but 0xDD."""

        def read() -> None:
            for at, place, expected in wanted:
                found = row[place].tobytes()
                if found == b"\xdd" * len(found) if expected is None else found != expected:
                    self.wrong.append(f"{where} {at}")

        self._launch(rank, read)

    def _layers(self, group: int) -> range:
        return range(2 * group, 2 * group + 2)

    # -- block tables -------------------------------------------------------------------------------------

    def _share(self, request: SimulatedRequest, upto: int) -> None:
        """RetainedState its full blocks of tokens [0, upto) to others, once each and, as vLLM, uncomputed."""
        if not self.shares:
            return
        size = self.groups[0].block_size
        for place in range(request.shareable, min(upto, request.num_tokens) // size):
            content = (request.cache_salt, tuple(request.all_token_ids[: (place + 1) * size]))
            block = request.blocks[0][place]
            if block not in self.content:
                self.content[block] = content
                self.cached.setdefault(content, block)
            request.shareable = place + 1

    def _evict_blocks(self, blocks: set[int]) -> None:
        for block in blocks:
            content = self.content.pop(block, None)
            if content is not None and self.cached.get(content) == block:
                del self.cached[content]

    def _shared(self, request: SimulatedRequest) -> list[int]:
        """The leading blocks that others have or left behind, below the last token."""
        size, found = self.groups[0].block_size, []
        for end in range(size, request.num_tokens, size):
            block = self.cached.get((request.cache_salt, tuple(request.all_token_ids[:end])))
            if block is None:
                break
            found.append(block)
        return found

    def _take(self, group: int) -> int:
        block = self.free.pop(0)
        if block in self.content:
            self._evict_blocks({block})
            self._poison(group, block)
        return block

    def _allocate(self, request: SimulatedRequest, upto: int, start: int, shared: Sequence[int] = ()) -> bool:
        """Blocks for tokens [0, upto); of windowed tables only those that tokens from `start` on can see."""
        tables = [list(table) for table in request.blocks] or [[] for _ in self.groups]
        taken: list[int] = list(shared)
        if shared:
            tables[0] = list(shared)
            self.free = [block for block in self.free if block not in taken]
        for index, (group, table) in enumerate(zip(self.groups, tables, strict=True)):
            if group.state:
                wanted = self._state_places(group, len(table), upto, start)
                if len(wanted) > len(self.free):
                    self.free += [block for block in taken if not self.users[block]]
                    return False
                table += [NULL] * (max(wanted, default=-1) + 1 - len(table))
                for place in wanted:
                    table[place] = self._take(index)
                    taken.append(table[place])
                continue
            first = start - group.window if isinstance(group, Replay) else start
            skipped = 0 if group.window is None else max(0, first - group.window + 1) // group.block_size
            while not table if isinstance(group, Ring) else len(table) * group.block_size < upto:
                if len(table) < skipped:
                    table.append(NULL)
                elif self.free:
                    taken.append(self._take(index))
                    table.append(taken[-1])
                else:
                    self.free += [block for block in taken if not self.users[block]]
                    return False
        self.users.update(taken)
        request.blocks = tables
        return True

    @staticmethod
    def _state_places(group: Group, there: int, upto: int, start: int) -> list[int]:
        """Where a state table, of so many blocks, gets new ones: for the state behind `upto`.

        And for the one before the step if it is new, and at the last boundary that the step goes past.
        """
        size = group.block_size
        last = -(-upto // size) - 1
        places = {last}
        if start and not there:
            places.add(start // size - 1)
        if last * size > start:
            places.add(last - 1)
        return sorted(place for place in places if place >= there)

    def _split(self, request: SimulatedRequest, start: int, count: int) -> int:
        """Of a step's tokens, those after which a state can be kept: all, or up to a boundary."""
        if not self.states:
            return count
        size, end = self.groups[self.states[0]].block_size, start + count
        if end < request.num_tokens and end // size * size > start:
            end = end // size * size
        last, junction = (request.num_tokens - 1) // size * size, request.shared_prefix_boundary
        stops = [junction // size * size]
        if start % size:
            stops.append(start // size * size + size)
        elif self.rng.random() < 0.5 or start >= last:
            stops.append(last)
        return min((stop for stop in stops if start < stop < end), default=end) - start

    def _offer(self, request: SimulatedRequest, start: int, end: int) -> None:
        """Hand over the state at the last boundary of a prompt: at the end of this step, or inside it."""
        if not self.states or request.request_id in self.offers:
            return
        size = self.groups[self.states[0]].block_size
        last = (request.num_tokens - 1) // size * size
        if start < last <= end and last and last > end - size:
            place = last // size - 1
            found = [(group, request.blocks[group][place], last) for group in self.states]
            if all(block != NULL for _, block, _ in found):
                self.offers[request.request_id] = found

    def _read_states(self, scheduled: dict[SimulatedRequest, int]) -> None:
        """Each step begins with the states before it, before any load of the step."""
        for request in scheduled:
            for group in self.states if request.start and not request.tainted else ():
                place = request.state_place
                if place is None:
                    place = -(-request.start // self.groups[group].block_size) - 1
                block = request.blocks[group][place]
                assert block != NULL, f"{request.request_id}: no state after {request.start} tokens"
                for (rank, rows), layer in itertools.product(enumerate(self.memories), self._layers(group)):
                    state = kv_of(request.cache_salt, bytes(request.truth(request.start)), layer, PAGE)
                    where = f"{request.request_id}: wrong state in layer {layer} after token"
                    self._read(rank, rows[layer], [(request.start, (block, slice(None)), state)], where)

    def _write_state(self, request: SimulatedRequest, group: int, tokens: int, place: int) -> None:
        block = request.blocks[group][place]
        for (rank, rows), layer in itertools.product(enumerate(self.memories), self._layers(group)):
            state = kv_of(request.cache_salt, bytes(request.truth(tokens)), layer, PAGE)
            value = 0xDD if request.tainted else np.frombuffer(state, np.uint8)
            self.write(rank, rows[layer], [((block, slice(None)), value)])

    def _compute_states(self, request: SimulatedRequest, end: int, drafts: int, accepted: int) -> None:
        """Write the states that a step leaves which computes tokens up to `end`, the last of them drafts."""
        valid = end - drafts + accepted
        for group in self.states:
            size = self.groups[group].block_size
            request.state_place = -(-end // size) - 1
            self._write_state(request, group, valid, request.state_place)
            passed = valid // size * size
            if passed >= end - drafts:
                self._write_state(request, group, passed, passed // size - 1)
            for offered, block, tokens in self.offers.get(request.request_id, ()):
                if offered == group and tokens < end and request.blocks[group][tokens // size - 1] == block:
                    self._write_state(request, group, tokens, tokens // size - 1)

    def _trim(self, request: SimulatedRequest) -> None:
        """Blocks behind the window become null, before the next tokens are scheduled."""
        processed = request.computed - request.num_in_flight_tokens
        for index, (group, table) in enumerate(zip(self.groups, request.blocks, strict=False)):
            if group.state:
                for place in range(-(-processed // group.block_size) - 1):
                    if table[place] != NULL:
                        self._release(index, table[place])
                        table[place] = NULL
            if group.window is not None:
                for place in range(max(0, processed - group.window + 1) // group.block_size):
                    if table[place] != NULL:
                        self._release(index, table[place])
                        table[place] = NULL

    def forget(self) -> None:
        """As if others had used the free blocks meanwhile."""
        self._evict_blocks(set(self.free) & set(self.content))

    # -- one step -----------------------------------------------------------------------------------------

    def step(self) -> None:
        """Schedule, execute, and take in the output of the step that is `depth` - 1 steps back."""
        self.now += 0.01
        pool: Any = self.store._pool
        pool.move(self.rng.choices(range(8), k=self.rng.randint(0, self.io_moves)))
        if self.rng.random() < 0.1:
            self.forget()
        scheduled: dict[SimulatedRequest, int] = {}
        drafted: dict[str, int] = {}
        preempted = self.counts["preempted"]
        self._schedule_running(scheduled, drafted)
        if self.counts["preempted"] == preempted:  # as vLLM: who was just preempted must not take it back
            self._schedule_waiting(scheduled)
        progress = {
            request.request_id: request.computed + count - drafted.get(request.request_id, 0)
            for request, count in scheduled.items()
        }
        tables = {request.request_id: [list(table) for table in request.blocks] for request in scheduled}
        for request, count in scheduled.items():
            self._offer(request, request.computed, request.computed + count)
            request.ends |= {request.computed - request.num_in_flight_tokens, request.num_tokens}
        self.scheduler.plan_step(progress, tables.get, sum(scheduled.values()), self.offers, self._lost)
        self._lost = []
        plan = self.scheduler.take_plan()
        self._computing = True
        self.pipeline.append(self._execute(plan, scheduled, drafted))
        self._computing = False
        if self.rng.random() < self.aborts and self.running:
            self.abort(self.rng.choice(self.running))
        for share in self.pipeline[-1].shares:
            # As vLLM: as if all drafts were accepted, until it is known.
            share.request.computed += share.tokens
            share.request.num_in_flight_tokens += share.tokens
            share.request.in_flight += (1 + share.drafts) * share.samples
            share.request.rejected += share.drafts - share.accepted
        self.offers = {}
        while len(self.pipeline) >= self.depth:
            self._take_output(self.pipeline.pop(0))

    def _schedule_running(self, scheduled: dict[SimulatedRequest, int], drafted: dict[str, int]) -> None:
        for request in list(self.running):
            if request not in self.running:
                continue
            self._trim(request)
            left = request.num_tokens + request.in_flight - request.computed
            if left <= 0:
                continue
            count = self._split(request, request.computed, self.rng.randint(1, left))
            extra = self.rng.randint(0, 3) if self.drafts and count == left and left == 1 else 0
            while not self._allocate(request, request.computed + count + extra, request.computed):
                victim = self.running[-1]
                self.preempt(victim)
                scheduled.pop(victim, None)
                if victim is request:
                    break
            else:
                self._share(request, request.computed + count)
                scheduled[request] = count + extra
                drafted[request.request_id] = extra

    def preempt(self, request: SimulatedRequest) -> None:
        self.counts["preempted"] += 1
        self._lost.append(request.request_id)
        self.running.remove(request)
        self._free(request)
        request.epoch += 1
        request.computed, request.status, request.tainted = 0, "waiting", False
        self._is_back(request)
        self.waiting.insert(0, request)

    @staticmethod
    def _is_back(request: SimulatedRequest) -> None:
        """What steps in flight compute of it is void."""
        request.in_flight = request.num_in_flight_tokens = request.rejected = 0
        request.state_place = None

    def _schedule_waiting(self, scheduled: dict[SimulatedRequest, int]) -> None:
        for request in list(self.waiting):
            shared = self._shared(request)
            local = len(shared) * self.groups[0].block_size if self.shares else self._local_hit(request)
            external, asynchronous = self.scheduler.get_num_new_matched_tokens(request, local)
            if external is None:
                continue
            assert local + external < request.num_tokens
            start = local + external
            count = 0 if asynchronous else self.rng.randint(1, request.num_tokens - start)
            count = self._split(request, start, count)
            if not self._allocate(request, start + count, start, shared):
                return
            request.replays = start > 0
            if not self.shares:
                request.loaded = 0
                self._fill(request, local, states=not external)
            elif not asynchronous:
                self._share(request, start + count)
            self.scheduler.update_state_after_alloc(request, request.blocks, external)
            # After a reset, too.
            wants_none = state_of(self.scheduler, request).options.skip_load
            self.looked_up += 0 if request.admitted or wants_none else request.num_tokens - 1 - local
            request.admitted = True
            self.waiting.remove(request)
            request.computed = request.loaded = start
            self.counts["hits"] += external > 0
            self.counts["partial_hits"] += external > 0 and start % self.groups[0].block_size > 0
            self.counts["shared"] += bool(shared)
            if asynchronous:
                self.counts["async_loads"] += 1
                request.status = "loading"
                self.loading.append(request)
            else:
                request.status = "running"
                self.running.append(request)
                scheduled[request] = count

    def _local_hit(self, request: SimulatedRequest) -> int:
        """Tokens that the engine's own prefix cache has, at times: whole blocks, below the last token."""
        prefixes = [self.groups[table] for table in self.prefixes if not self.groups[table].state]
        if self.rng.random() >= self.local_hits or len(prefixes) > 1 or prefixes[0].window is not None:
            return 0
        size = prefixes[0].block_size
        most = max(0, request.num_tokens - max(1, self.lookahead))
        return self.rng.randint(0, most // size) * size

    def _fill(self, request: SimulatedRequest, upto: int, *, states: bool) -> None:
        for group in self.prefixes:
            self._compute(request, group, 0, upto)
        for group in self.states if upto and states else ():
            self._write_state(request, group, upto, upto // self.groups[group].block_size - 1)

    def _replay(self, request: SimulatedRequest) -> None:
        """Compute the last tokens of a hit again, for the tables that keep no KV of them."""
        for index, group in enumerate(self.groups if request.replays else ()):
            if isinstance(group, Replay):
                self._compute(request, index, max(0, request.computed - group.window), request.computed)
        request.replays = False

    def _compute(self, request: SimulatedRequest, group: int, low: int, high: int) -> None:
        """Write the KV of tokens [low, high); that of the others in their blocks stays."""
        known = max(request.num_tokens, high + 1)
        for layer in self._layers(group):
            ahead = self._ahead(layer)
            # As vLLM's modules of MTP: once more when the tokens are known that they look ahead to.
            first = min(low, max(request.loaded, low - max(0, ahead - 1)))
            values = defaultdict(list)
            truth = bytes(request.truth(high + ahead))
            for at, block, place, ranks in self._places(request, group, first, high):
                rubbish = request.tainted or at + ahead >= known
                value = (
                    0xDD if rubbish else np.frombuffer(self._kv(request.cache_salt, truth, at, layer, place), np.uint8)
                )
                for rank in ranks:
                    values[rank].append(((block, place), value))
            for rank, written in values.items():
                self.write(rank, self.memories[rank][layer], written)

    def _ahead(self, layer: int) -> int:
        """How many tokens after its own decide the KV of this layer, none in scratch blocks."""
        return self.lookahead if layer % 2 and layer // 2 in self.prefixes else 0

    def _kv(self, salt: str, truth: bytes, at: int, layer: int, place: slice) -> bytes:
        return kv_of(salt, truth[: at + 1 + self._ahead(layer)], layer, place.stop - place.start)

    def _is_loose(self, request: SimulatedRequest, at: int, layer: int) -> bool:
        """Whether the KV of a token may be that of a request which went on otherwise after the chunk that it stored.

        It costs an accepted draft at most.
        """
        return at < request.loaded and at % self.chunk_size >= self.chunk_size - self._ahead(layer)

    def _is_due(self, request: SimulatedRequest, at: int, layer: int) -> bool:
        """Whether the KV of a token is computed once more, when the tokens are known that it looks ahead to."""
        return at >= request.loaded and at + self._ahead(layer) >= max(request.num_tokens, request.start + 2)

    def _spoil(self, request: SimulatedRequest, group: int, low: int, high: int) -> None:
        """What is computed for drafts that are rejected."""
        for _, block, place, ranks in self._places(request, group, low, high):
            for rank, layer in itertools.product(ranks, self._layers(group)):
                self.write(rank, self.memories[rank][layer], [((block, place), 0xDD)])

    def _places(
        self, request: SimulatedRequest, group: int, low: int, high: int
    ) -> Iterator[tuple[int, int, slice, range]]:
        """Tokens [low, high) of a table, those in null blocks apart: each with its block, bytes in it, and ranks."""
        if self.groups[group].state:
            return
        size, is_ring = self.groups[group].block_size, isinstance(self.groups[group], Ring)
        width = PAGE // size * self.context
        for at in range(max(low, high - size) if is_ring else low, high):
            block = request.blocks[group][0 if is_ring else at // size]
            place, rank = divmod(at % size, self.context)
            if block != NULL:
                yield (
                    at,
                    block,
                    slice(place * width, (place + 1) * width),
                    range(rank, len(self.memories), self.context),
                )

    def _check(self, request: SimulatedRequest, failed: set[int]) -> None:
        """What this step reads of earlier tokens is what a prefill from scratch would have written."""
        if request.tainted:
            return
        for index, group in enumerate(self.groups):
            if group.state or isinstance(group, Ring):
                continue
            low = 0 if group.window is None else max(0, request.start - group.window + 1)
            blocks = request.blocks[index][low // group.block_size : -(-request.start // group.block_size)]
            if failed.intersection(blocks):
                request.tainted = True
                return
            assert NULL not in blocks, f"{request.request_id}: a block within the window is null"
            self._read_tokens(request, index, low)

    def _check_rings(self, request: SimulatedRequest) -> None:
        """The tokens of an unfinished group, which this step may overwrite once it has read them."""
        for index, group in enumerate(() if request.tainted else self.groups):
            if isinstance(group, Ring):
                self._read_tokens(request, index, request.start // group.ratio * group.ratio)

    def _read_tokens(self, request: SimulatedRequest, group: int, low: int) -> None:
        places = list(self._places(request, group, low, request.start))
        for layer in self._layers(group):
            ahead = self._ahead(layer)
            truth = bytes(request.truth(request.start + ahead))
            wanted = defaultdict(list)
            for at, block, place, ranks in places:
                if ahead and self._is_due(request, at, layer):
                    continue
                loose = ahead and self._is_loose(request, at, layer)
                kv = None if loose else self._kv(request.cache_salt, truth, at, layer, place)
                for rank in ranks:
                    wanted[rank].append((at, (block, place), kv))
            where = f"{request.request_id}: in layer {layer} wrong KV of"
            for rank, read in wanted.items():
                self._read(rank, self.memories[rank][layer], read, where)

    def _execute(self, plan: Any, scheduled: dict[SimulatedRequest, int], drafted: dict[str, int]) -> _Step:
        reports, failed_blocks = [], set()
        finished: list[set[str]] = []
        failed: set[str] = set()
        for rank, worker in enumerate(self.workers):
            # As vLLM: nothing is written into blocks that were given up before it is planned what is read there.
            worker.begin(StepPlan(reads=plan.reads))
            for work in self._due.pop(rank, ()):
                self._launch(rank, work)
        self._read_states(scheduled)
        for worker in self.workers:
            worker.begin(evolve(plan, reads=[]))
            if isinstance(worker.copier, DeviceCopier):
                # Now, and not when a thread comes to it: the same seed gives the same history.
                worker.copier.pins.wait()
            self._break(worker)
            worker.load()
        # As vLLM: a layer writes the KV of the step's tokens, then waits for its load, then reads.
        shares = [self._decide(request, count, drafted) for request, count in scheduled.items()]
        ends = {request: request.start + count for request, count in scheduled.items()}
        for request in scheduled:
            self._replay(request)
            self._check_rings(request)
        for share in shares:
            request, end = share.request, ends[share.request]
            valid = end - share.drafts + share.accepted
            self._compute_states(request, end, share.drafts, share.accepted)
            for group in range(len(self.groups)):
                self._compute(request, group, request.start, valid)
                self._spoil(request, group, valid, end)
        for worker in self.workers:
            for layer in range(2 * len(self.prefixes) if scheduled else 0):
                worker.wait_for_layer(layer)
            failed_blocks |= worker.take_failed_blocks() | _broken(worker)
        for request, end in ends.items():
            sound = not request.tainted
            self._check(request, failed_blocks)
            for group in range(len(self.groups) if sound and request.tainted else 0):
                self._spoil(request, group, request.start, end)
        for worker in self.workers:
            for layer in range(2 * len(self.prefixes) if scheduled else 0):
                worker.save_layer(layer)
            worker.save()
            failed_blocks |= worker.take_failed_blocks()
            worker.poll()
            reports.append(worker.take_report())
            done, bad = worker.take_finished()
            finished.append(done)
            failed |= bad
        assert not self.wrong
        present = [report for report in reports if report is not None]
        merged = None
        for report in present:
            merged = report if merged is None else merged.merge(report)
        ended = self._ended_everywhere(finished)
        before = {request.request_id: request.computed for request in scheduled}
        # As vLLM: a rank may report the failure before the others have ended.
        self.failed_on |= failed
        failed = self.failed_on & ended
        self.failed_on -= failed
        return _Step(shares, merged, failed_blocks, ended, failed, before)

    def _decide(self, request: SimulatedRequest, count: int, drafted: dict[str, int]) -> _Share:
        """How many of the drafts turn out right."""
        drafts = drafted.get(request.request_id, 0)
        samples = request.computed + count - drafts == request.num_tokens + request.in_flight
        accepted = self.rng.randint(0, drafts) if drafts and not request.tainted else 0
        return _Share(request, request.epoch, count, drafts, accepted, samples)

    def _ended_everywhere(self, finished: list[set[str]]) -> set[str]:
        """The requests whose loads have ended on every rank by now, as vLLM counts them."""
        assert self.devices or all(done == finished[0] for done in finished), "every rank reports the same requests"
        self.ended_on.update(name for done in finished for name in done)
        ended = {name for name, ranks in self.ended_on.items() if ranks == len(self.workers)}
        for name in ended:
            del self.ended_on[name]
        return ended

    def _break(self, worker: Worker) -> None:
        """Let single copies fail from now on, as those of a broken mapping or device would."""
        if worker._slab is None or isinstance(worker.copier, FaultyCopier):
            return
        for verb, rate in (("load", self.load_faults), ("store", self.store_faults)):
            seed = self.rng.randrange(2**32)
            worker.wrap_copier(partial(FaultyCopier, seed=seed, error_rate=rate, verbs=frozenset({verb})))

    def _take_output(self, step: _Step) -> None:
        for name in step.failed:
            for request in self.loading:
                if request.request_id == name:
                    request.computed = 0
        self._truncate(self.loading, step)
        self._truncate(self.running, step)
        for share in step.shares:
            request = share.request
            if request.status != "running" or request.epoch != share.epoch:
                continue
            request.num_in_flight_tokens -= share.tokens
            request.in_flight -= (1 + share.drafts) * share.samples
            request.computed -= share.drafts - share.accepted
            request.rejected -= share.drafts - share.accepted
            for _ in range((1 + share.accepted) * share.samples):
                request.all_token_ids.append(next_token(request.cache_salt, request.all_token_ids))
                if request.num_tokens - request.num_prompt_tokens >= request.max_tokens:
                    self.counts["finished"] += 1
                    self._end(request)
                    break
        if step.report is not None:
            self.scheduler.on_report(step.report)
        self.events += self.scheduler.take_events()
        for request in [request for request in self.loading if request.request_id in step.finished]:
            self.loading.remove(request)
            if request.status == "ended":
                self._free(request)
            elif request.computed == 0:
                self.counts["recomputed"] += 1
                self._free(request)
                request.status = "waiting"
                self.waiting.insert(0, request)
            else:
                request.status = "running"
                self.running.append(request)
                self._share(request, request.computed)

    def _truncate(self, requests: list[SimulatedRequest], step: _Step) -> None:
        """Requests go back to their first bad block, or of blocks that an earlier one is to compute again, to

        where they were; what they sampled meanwhile is void. The blocks stay shared, as vLLM has it.
        """
        recomputed: set[int] = set()
        for request in requests:
            size = self.groups[0].block_size
            before = step.progress.get(request.request_id, request.computed)
            table = request.blocks[0][: -(-before // size)] if request.blocks else []
            bad = [place for place, block in enumerate(table) if block in step.failed_blocks]
            if not bad:
                continue
            # vLLM keeps what later steps, already scheduled, make of blocks that were never filled.
            assert self.depth == 1 or request in self.loading, "a load failed within a pipelined step"
            own = [place for place in bad if table[place] not in recomputed]
            recomputed.update(table[place] for place in own)
            self.counts["recomputed"] += 1
            request.computed = own[0] * size if own else before
            self._is_back(request)
            request.tainted = False
            request.epoch += 1

    def finish(self, limit: int = 3000) -> None:
        """Step until every request has ended, then prove that nothing is referenced."""
        for _ in range(limit):
            if not (self.waiting or self.running or self.loading or self.pipeline):
                break
            if not self.running:
                self.store.drain(LIMIT)
            self.step()
            if not (self.waiting or self.running or self.loading):
                while self.pipeline:
                    self._take_output(self.pipeline.pop(0))
        else:
            raise AssertionError(f"stuck: {self.waiting} {self.running} {self.loading}")
        for turn in range(limit):
            # As vLLM steps on without requests, for copies that have not been reported.
            if turn >= 2 and not self.scheduler.busy:
                break
            self.step()
            while self.pipeline:
                self._take_output(self.pipeline.pop(0))
        assert self.store.drain(LIMIT)
        stats = self.store.stats()
        prioritized = {*(snapshot := self.store.snapshot()).prefetched, *snapshot.pinned}
        assert (stats.leased, stats.writing, stats.loading) == (len(prioritized), 0, 0)
        assert not self.scheduler.busy
        merge(self.samples, self.scheduler.take_samples())
        found = sum(self.total("lmkv_hit_tokens").values()) + sum(self.total("lmkv_missed_tokens").values())
        assert found == self.looked_up == self.total("lmkv_lookup_tokens").get((), 0)
        assert self.store.slab.free_slots + stats.primary.chunks + stats.primary.states == self.store.slab.num_slots
        assert sorted(self.free) == list(range(1, self.num_blocks))

    def total(self, name: str) -> dict[tuple[str, ...], Any]:
        """A metric's values by its labels."""
        return self.samples.get(name, {})

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        for worker in self.workers:
            worker.close()
        self.scheduler.close()
        assert not self.wrong


def state_of(scheduler: Scheduler, request: SimulatedRequest) -> Request:
    """What the scheduler side knows of a request, which need not have arrived."""
    return scheduler._request_of(request)


def _broken(worker: Worker) -> set[int]:
    """Blocks of loads by layers that have failed, which vLLM is told once the step has ended."""
    reading: Any = worker._reading
    if reading is None or reading._pipeline is not None:
        return set()
    copies = [copy for task in reading.tasks for copy in task.copies]
    return {block for copy in copies for run in copy.runs for block in run.blocks}
