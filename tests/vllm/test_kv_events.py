"""KV events of a real engine, as a subscriber over ZMQ gets them: they say what each tier has, in vLLM's words."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import AbstractContextManager, closing, contextmanager
from pathlib import Path
from typing import Any

import msgspec
import pytest
import zmq
from attrs import define, field

from lmkv.testing import ManualClock
from lmkv.vllm.scheduler.events import EventRecorder, Place
from tests.kit import LIMIT, Residents, eventually
from tests.vllm.families import FAMILIES
from tests.vllm.harness import BLOCK, CHUNK_BYTES, Engine, engine, external_hits, over_disk, prompt
from tests.vllm.test_families import TIGHT

RAM, DISK = Place("CPU", "LOCAL"), Place("STORAGE", "LOCAL")


@define
class Index:
    """A router's, checked as it grows: which blocks are where, and what vLLM said of a block when it had it."""

    of: dict[Place, set[Any]] = field(factory=dict)
    told: dict[Any, tuple[Any, ...]] = field(factory=dict)
    stored: list[Any] = field(factory=list)
    removed: int = 0

    def apply(self, event: Any) -> None:
        if not hasattr(event, "medium"):
            # vLLM's AllBlocksCleared, upon a reset of its own cache: a router forgets all that this engine has.
            self.of.clear()
        elif event.medium == "GPU":
            # For groups with windows vLLM announces fewer blocks than there are tokens.
            if hasattr(event, "token_ids") and event.kv_cache_spec_sliding_window is None:
                self._check(event)
        elif hasattr(event, "token_ids"):
            place = self.of.setdefault(_place(event), set())
            assert not place.intersection(event.block_hashes), "stored twice"
            place.update(event.block_hashes)
            self._check(event)
            self.stored.append(event)
        else:
            assert set(event.block_hashes) <= self.of[_place(event)], "removed, but not stored"
            self.of[_place(event)].difference_update(event.block_hashes)
            self.removed += 1

    def _check(self, event: Any) -> None:
        """Whoever says something of a block says the same."""
        parent, size = event.parent_block_hash, event.block_size
        extra = event.extra_keys or [None] * len(event.block_hashes)
        assert len(event.token_ids) == size * len(event.block_hashes)
        for number, block in enumerate(event.block_hashes):
            tokens = tuple(event.token_ids[number * size : (number + 1) * size])
            told = (parent, tokens, extra[number], event.lora_id, event.lora_name)
            assert self.told.setdefault(block, told) == told
            parent = block

    @property
    def places(self) -> dict[Place, set[Any]]:
        return {place: blocks for place, blocks in self.of.items() if blocks}


def _place(event: Any) -> Place:
    assert event.ownership is None, "routers pass over what has an owner that they do not know"
    return Place(event.medium, event.locality)


@define
class Subscriber:
    """Reads what an engine publishes, missing nothing: from its replay endpoint, each time from where it was."""

    replay: Any
    index: Index = field(factory=Index)
    next: int = 0

    def read(self) -> Index:
        from vllm.distributed.kv_events import KVEventBatch

        decoder = msgspec.msgpack.Decoder(type=KVEventBatch)
        self.replay.send_multipart([b"", self.next.to_bytes(8, "big")])
        while True:
            _, _, number, payload = self.replay.recv_multipart()
            if int.from_bytes(number, "big", signed=True) < 0:
                return self.index
            assert int.from_bytes(number, "big") == self.next
            self.next += 1
            for event in decoder.decode(payload).events:
                self.index.apply(event)


def publishing(folder: Path) -> dict[str, Any]:
    """Options of an engine that publishes KV events."""
    from vllm.config import KVEventsConfig

    endpoints = {"endpoint": f"ipc://{folder}/live", "replay_endpoint": f"ipc://{folder}/replay"}
    return {"kv_events_config": KVEventsConfig(enable_kv_cache_events=True, publisher="zmq", **endpoints)}


@contextmanager
def subscriber(folder: Path) -> Iterator[Subscriber]:
    with zmq.Context() as context, closing(context.socket(zmq.DEALER)) as replay:
        replay.linger, replay.rcvtimeo = 0, 60_000
        replay.connect(f"ipc://{folder}/replay")
        yield Subscriber(replay)


def asked(running: Engine, number: int, ids: list[int], salt: str | None = None) -> Any:
    """A request of vLLM's for this prompt, with the hashes that this engine gives its blocks."""
    from vllm import SamplingParams
    from vllm.v1.request import Request

    core = running.llm.llm_engine.engine_core.engine_core
    return Request(
        f"asked {number}",
        ids,
        SamplingParams(max_tokens=1),
        None,
        cache_salt=salt,
        block_hasher=core.request_block_hasher,
    )


def found(running: Engine, prompts: Iterable[list[int]], salt: str | None = None) -> dict[str, set[Any]]:
    """By tier, the whole blocks of these prompts that the store has."""
    from vllm.v1.core.kv_cache_utils import maybe_convert_block_hash

    sides = running.connector.sides
    tiers: dict[str, set[Any]] = {}
    size: int = sides.model.block_map.chunk_size
    for number, ids in enumerate(prompts):
        request = asked(running, number, ids, salt)
        for index, key in enumerate(sides.scheduler.keys_of(ids, salt, {})):
            has = Residents()
            running.store.catalog.replay_to(has, [key])
            first, end = index * size, min(len(ids), (index + 1) * size)
            hashes = request.block_hashes[first // BLOCK : end // BLOCK]
            for tier in has.of:
                tiers.setdefault(tier, set()).update(map(maybe_convert_block_hash, hashes))
    return {tier: blocks for tier, blocks in tiers.items() if blocks}


def one_more_step(running: Engine) -> None:
    """Events are published with steps, and with none while the engine has nothing to do."""
    running.run([prompt(1, 3)], max_tokens=1, params={"lmkv.skip_save": True})


def settled(running: Engine) -> None:
    """All is written, and what is to be told of it has been published."""
    assert running.store.drain(LIMIT)
    one_more_step(running)


def known_to(events: Subscriber, running: Engine, prompts: list[list[int]]) -> bool:
    """Whether the events that were published so far say where these prompts are."""
    now = found(running, prompts)
    wanted = {place: now[tier] for place, tier in ((RAM, "cpu"), (DISK, "disk")) if tier in now}
    return events.read().places == wanted


def more_than_fits(model: Path, tmp_path: Path) -> tuple[list[list[int]], AbstractContextManager[Engine]]:
    """Prompts, and an engine that publishes its events, whose host memory and disk cannot have them all."""
    prompts = [prompt(seed, length) for seed, length in ((60, 1500), (61, 1100), (62, 600), (63, 1500), (64, 70))]
    prompts.append(prompt(60, 800) + prompt(65, 333))
    extra = {
        "local_disk": f"file://{tmp_path}/kv",
        "max_local_disk_size": 12 * CHUNK_BYTES / 2**30,
        "max_local_cpu_size": 7 * CHUNK_BYTES / 2**30,
        "disk_min_free": 0.0,
    }
    return prompts, engine(model, clock=ManualClock(), extra=extra, **publishing(tmp_path))


def test_a_subscriber_knows_what_each_tier_has_under_eviction_pressure(model: Path, tmp_path: Path) -> None:
    prompts, limited = more_than_fits(model, tmp_path)
    with limited as running, subscriber(tmp_path) as events:
        for turn in range(2):
            for ids in prompts:
                running.run([ids])
                settled(running)
                eventually(lambda: known_to(events, running, prompts), f"events of turn {turn}")
                running.forget_local()
        index = events.read()
        assert index.removed > 10
        assert set(index.of) == {RAM, DISK}
        for ids in prompts:
            eventually(lambda: known_to(events, running, prompts))
            blocks = [block for blocks in index.places.values() for block in blocks]
            hit = external_hits(running.run([ids])[0])
            known = [hashed in blocks for hashed in block_hashes(running, ids)]
            assert hit // BLOCK == ([*known, False].index(False))
            settled(running)
            running.forget_local()


def block_hashes(running: Engine, ids: list[int]) -> list[Any]:
    from vllm.v1.core.kv_cache_utils import maybe_convert_block_hash

    return list(map(maybe_convert_block_hash, asked(running, 0, ids).block_hashes))


@pytest.mark.runner_v2
def test_events_say_what_vllm_says_of_its_own_blocks(model: Path, tmp_path: Path) -> None:
    ids = prompt(66, 600)
    with engine(model, **publishing(tmp_path)) as running, subscriber(tmp_path) as events:
        running.run([ids], salts=["salt"], max_tokens=1)
        expected = found(running, [ids], "salt")["cpu"]
        assert len(expected) == 600 // BLOCK
        eventually(lambda: events.read().places == {RAM: expected})
        first, *rest = events.index.stored
        assert first.parent_block_hash is None
        assert first.extra_keys[0] == ("salt",)
        assert first.block_size == BLOCK
        assert first.group_idx == 0
        assert first.kv_cache_spec_kind == "full_attention"
        assert [event.token_ids for event in (first, *rest)] == [ids[:256], ids[256:512], ids[512:576]]
        assert [event.parent_block_hash for event in rest] == [first.block_hashes[-1], rest[0].block_hashes[-1]]


def test_what_is_on_disk_after_a_restart_is_told_when_it_is_first_hit(model: Path, tmp_path: Path) -> None:
    ids, other = prompt(67, 1500), prompt(68, 600)
    with over_disk(model, tmp_path / "kv") as first:
        first.run([ids, other])
    with over_disk(model, tmp_path / "kv", **publishing(tmp_path)) as second, subscriber(tmp_path) as events:
        one_more_step(second)
        assert events.read().places == {}
        assert external_hits(second.run([ids])[0]) == 1499
        one_more_step(second)
        blocks = set(block_hashes(second, ids))
        eventually(lambda: events.read().places == {RAM: blocks, DISK: blocks})


def test_after_a_reset_nothing_is_said_to_be_anywhere(model: Path, tmp_path: Path) -> None:
    ids = prompt(69, 600)
    with over_disk(model, tmp_path / "kv", **publishing(tmp_path)) as running, subscriber(tmp_path) as events:
        running.run([ids])
        settled(running)
        eventually(lambda: events.read().places.keys() == {RAM, DISK})
        assert running.llm.reset_prefix_cache(reset_connector=True)
        one_more_step(running)
        eventually(lambda: not events.read().places)


def test_groups_with_windows_are_left_out(tmp_path: Path) -> None:
    family = FAMILIES["hybrid, window smaller than a chunk"]
    options = {**TIGHT, "num_gpu_blocks_override": family.blocks, **family.options, **publishing(tmp_path)}
    with engine(family.write(tmp_path / "model"), **options) as running, subscriber(tmp_path) as events:
        ids = prompt(70, 600)
        running.run([ids], max_tokens=1)
        eventually(lambda: events.read().stored)
        specs = [group.kv_cache_spec for group in running.scheduler.kv_cache_config.kv_cache_groups]
        assert len(specs) == family.groups > 1
        for event in events.index.stored:
            assert getattr(specs[event.group_idx], "sliding_window", None) is None
            assert event.kv_cache_spec_kind == "full_attention"


@pytest.mark.parametrize("enabled", [None, False])
def test_nothing_is_recorded_unless_vllm_publishes(model: Path, enabled: bool | None) -> None:
    from vllm.config import KVEventsConfig

    config = None if enabled is None else KVEventsConfig(enable_kv_cache_events=enabled)
    with engine(model, kv_events_config=config) as running:
        running.run([prompt(71, 600)])
        assert running.connector.sides.scheduler.observer.events is None
        assert not any(isinstance(observer, EventRecorder) for observer in running.store._observers)
        assert not running.connector.take_events()
