"""Engine: what a program without a server does with it, in host memory and below."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing, suppress
from pathlib import Path
from typing import Any

import pytest
import torch
from redis import Redis

import lmkv
from lmkv import Config, Engine, Namespace, PagedMemory, Tier, TieredStore, Variant
from lmkv.backends.cpu import CPUPinnedBackend
from lmkv.backends.disk import LocalDiskBackend
from lmkv.backends.remote.redis import RedisBackend
from lmkv.chunks.layout import KVLayout, LayerPages
from lmkv.errors import ClosedError, UsageError
from lmkv.policies import LRU, MinTokens
from lmkv.testing import ManualClock
from lmkv.testing.backend_suite import in_threads
from tests.kit import LIMIT, Gated, assert_idle, eventually, listing_every, raised
from tests.servers import any_kind, redis_server

BLOCK = 4
CHUNK = 16
BLOCKS = 256
LAYERS = 2


class Model:
    """Paged tensors of a small model; `compute` fills the blocks of a prompt with what only it would have."""

    def __init__(self) -> None:
        self.tensors = [torch.zeros(2, BLOCKS, BLOCK, 8, dtype=torch.bfloat16) for _ in range(LAYERS)]
        self.memory = PagedMemory.of(self.tensors, block_axis=1)
        self.layout = self.memory.layout(CHUNK, [BLOCK])

    def compute(self, tokens: Sequence[int], blocks: Sequence[int], salt: int = 0) -> None:
        for place, block in enumerate(blocks):
            self.expect(tokens, place, block, salt, write=True)

    def expect(self, tokens: Sequence[int], place: int, block: int, salt: int = 0, *, write: bool = False) -> None:
        seed = hash((tuple(tokens[: (place + 1) * BLOCK]), salt))
        for layer, tensor in enumerate(self.tensors):
            generator = torch.Generator().manual_seed((seed + layer) % 2**63)
            page = torch.randn(2, BLOCK, 8, generator=generator).to(torch.bfloat16)
            if write:
                tensor[:, block] = page
            else:
                assert torch.equal(tensor[:, block], page), f"layer {layer}, block {block}"

    def check(self, tokens: Sequence[int], blocks: Sequence[int], count: int, salt: int = 0) -> None:
        """The first `count` tokens in `blocks` are those of the prompt."""
        for place in range(count // BLOCK):
            self.expect(tokens, place, blocks[place], salt)

    def lose(self) -> None:
        for tensor in self.tensors:
            tensor.fill_(-1)


def namespace(name: str = "small") -> Namespace:
    return Namespace(model=name, dtype="bfloat16", chunk_size=CHUNK, block_size=BLOCK)


def tokens(count: int, seed: int = 0) -> list[int]:
    return [(seed * 1000 + index) % 50_000 for index in range(count)]


def host(layout: KVLayout, chunks: int) -> Tier:
    return Tier(CPUPinnedBackend(chunks * layout.slot_bytes, layout.slot_bytes, populate=False), LRU())


def disk(folder: Path) -> Tier:
    return Tier(LocalDiskBackend(folder, namespace().digest), LRU())


@pytest.fixture
def gated(tmp_path: Path) -> Gated:
    """A disk whose calls can be stopped."""
    return Gated(LocalDiskBackend(tmp_path, namespace().digest))


@pytest.fixture
def model() -> Model:
    return Model()


def open_engine(model: Model, chunks: int = 64, *tiers: Tier, **options: Any) -> Engine:
    store = TieredStore(host(model.layout, chunks), tiers, **{"clock": ManualClock(), **options})
    return Engine(store, namespace(), layout=model.layout, memory=model.memory)


@pytest.fixture
def engine(model: Model) -> Iterator[Engine]:
    with open_engine(model) as engine:
        yield engine
        assert_idle(engine.tiers)


def blocks_of(count: int, first: int = 0) -> list[int]:
    """Blocks for so many tokens, neither in order nor side by side."""
    needed = -(-count // BLOCK)
    return [(first + 7 * index) % BLOCKS for index in range(needed)]


def stored(engine: Engine, model: Model, prompt: Sequence[int], salt: int = 0, **options: Any) -> list[int]:
    blocks = blocks_of(len(prompt))
    model.compute(prompt, blocks, salt)
    assert engine.store(prompt, blocks, **options) == len(prompt) // CHUNK * CHUNK
    return blocks


def drain(engine: Engine) -> None:
    assert engine.drain(LIMIT)


# -- store, lose, retrieve -----------------------------------------------------------------------------


def test_what_was_stored_and_lost_comes_back(engine: Engine, model: Model) -> None:
    for seed, count in enumerate((0, 1, 15, 16, 17, 32, 100, 403)):
        prompt, whole = tokens(count, seed), count // CHUNK * CHUNK
        stored(engine, model, prompt)
        model.lose()
        assert engine.lookup(prompt) == whole
        elsewhere = blocks_of(count, first=3)
        assert engine.retrieve(prompt, elsewhere) == whole
        model.check(prompt, elsewhere, whole)
        for make in (tuple, torch.tensor):
            assert engine.lookup(make(prompt)) == engine.retrieve(make(prompt), elsewhere) == whole
        engine.clear()


def test_a_longer_prompt_finds_its_known_prefix_and_stores_only_the_rest(engine: Engine, model: Model) -> None:
    short, long = tokens(40), tokens(40) + tokens(60, seed=1)
    stored(engine, model, short)
    assert engine.lookup(long) == 32
    for _ in range(2):
        stored(engine, model, long)
        assert engine.stats().stored_tokens == 32 + (96 - 32), "twice is copied once"
    assert engine.stats().store.primary.writes == 6
    model.lose()
    blocks = blocks_of(100, first=11)
    assert engine.retrieve(long, blocks) == 96
    model.check(long, blocks, 96)


def test_only_whole_chunks_that_the_blocks_cover_are_moved(engine: Engine, model: Model) -> None:
    prompt = tokens(64)
    model.compute(prompt, blocks_of(64))
    assert engine.store(prompt, blocks_of(64)[:11]) == 32
    assert engine.lookup(prompt) == 32
    model.lose()
    assert engine.retrieve(prompt, blocks_of(64)[:7]) == 16
    model.check(prompt, blocks_of(64), 16)
    assert model.tensors[0][:, blocks_of(64)[4]].eq(-1).all()


def test_skipped_tokens_are_left_alone(engine: Engine, model: Model) -> None:
    prompt = tokens(64)
    blocks = stored(engine, model, prompt)
    model.lose()
    assert engine.retrieve(prompt, blocks, skip_tokens=39) == 64
    assert all(model.tensors[0][:, block].eq(-1).all() for block in blocks[:8])
    for place in range(8, 16):
        model.expect(prompt, place, blocks[place])


def test_salts_adapters_and_tags_never_share(engine: Engine, model: Model) -> None:
    prompt = tokens(48)
    variants = [
        *(Variant(), Variant(cache_salt="a"), Variant(cache_salt="b"), Variant(lora=("a", "1"))),
        *(Variant(lora=("a", "2")), Variant(tags={"user": "a"}), Variant(cache_salt="a", tags={"user": "a"})),
    ]
    for salt, variant in enumerate(variants):
        assert engine.lookup(prompt, variant=variant) == 0
        stored(engine, model, prompt, salt, variant=variant)
    for salt, variant in enumerate(variants):
        model.lose()
        assert engine.retrieve(prompt, blocks_of(48), variant=variant) == 48
        model.check(prompt, blocks_of(48), 48, salt)
    assert engine.clear(prompt, variant=variants[1]) == 48
    assert [engine.lookup(prompt, variant=variant) for variant in variants] == [48, 0, 48, 48, 48, 48, 48]
    assert engine.keys(prompt) == engine.keys(prompt, Variant()), "the default is an empty variant"


def test_a_full_tier_keeps_the_head_of_a_long_prompt(model: Model) -> None:
    with open_engine(model, 4) as engine:
        prompt = tokens(160)
        model.compute(prompt, blocks_of(160))
        assert engine.store(prompt, blocks_of(160)) == 64
        assert engine.lookup(prompt) == 64
        other = tokens(160, seed=2)
        assert engine.store(other, blocks_of(160)) == 64
        assert (engine.lookup(prompt), engine.lookup(other)) == (0, 64)


# -- pins, clear, stats ----------------------------------------------------------------------------------


def test_pins_keep_a_prompt_until_their_time_is_over(model: Model) -> None:
    clock = ManualClock()
    with open_engine(model, 4, clock=clock, pin_share=1.0) as engine:
        prompt, other = tokens(48), tokens(64, seed=3)
        stored(engine, model, prompt)
        assert engine.pin(prompt, ttl=10) == 48
        assert engine.pin(prompt[:20], ttl=20) == 16
        assert engine.stats().store.pinned == 3
        assert engine.store(other, blocks_of(64)) == 16
        clock.advance(15)
        assert engine.store(other, blocks_of(64)) == 48
        assert engine.lookup(prompt) == 16
        assert engine.unpin(prompt) == 16
        assert engine.unpin(prompt) == 0
        assert engine.store(other, blocks_of(64)) == 64
        assert engine.lookup(prompt) == 0


def test_clear_forgets_everything_or_one_prompt(model: Model, tmp_path: Path) -> None:
    with open_engine(model, 16, disk(tmp_path)) as engine:
        first, second = tokens(48), tokens(48, seed=4)
        for prompt in (first, second):
            stored(engine, model, prompt)
            engine.pin(prompt)
        drain(engine)
        assert engine.clear(first) == 48
        assert (engine.lookup(first), engine.lookup(second)) == (0, 48)
        assert engine.clear() == 48
        drain(engine)
        assert engine.lookup(second) == 0
        assert not list(tmp_path.rglob("*.kv1"))
        assert engine.stats().store.pinned == 0


@pytest.mark.parametrize("everything", [True, False])
def test_clear_frees_the_slots_of_prefetches_at_once(
    cold: tuple[Engine, Gated], model: Model, everything: bool
) -> None:
    """Their time to live is over: so is that of a prefetch whose first chunk was among those of a prompt."""
    engine, gated = cold
    done = engine.prefetch(tokens(100))
    assert done.wait(LIMIT)
    gated.shut("read")
    engine.tiers.drop(engine.keys(tokens(100))[4:])
    under_way = engine.prefetch(tokens(100))
    gated.waiting("read")
    engine.clear(None if everything else tokens(16))
    gated.open()
    assert under_way.wait(LIMIT)
    drain(engine)
    assert_idle(engine.tiers)
    other = tokens(100, seed=4)
    stored(engine, model, other)
    drain(engine)
    engine.tiers.drop(engine.keys(other))
    again = engine.prefetch(other)
    assert again.wait(LIMIT)
    assert again.tokens == 96, "no slot of the prefetches' share is taken"


def test_stats_count_tokens_and_chunks(model: Model, tmp_path: Path) -> None:
    with open_engine(model, 16, disk(tmp_path)) as engine:
        prompt = tokens(50)
        stored(engine, model, prompt)
        drain(engine)
        engine.retrieve(tokens(80), blocks_of(80))
        stats = engine.stats()
        assert (stats.stored_tokens, stats.requested_tokens, stats.retrieved_tokens) == (48, 80, 48)
        primary, below = stats.store.tiers
        assert (primary.name, primary.chunks, primary.hits, primary.writes) == ("cpu", 3, 3, 3)
        assert (below.name, below.chunks, below.writes, below.breaker) == ("disk", 3, 3, "closed")
        assert below.used_bytes == sum(path.stat().st_size for path in tmp_path.rglob("*.kv1"))
        assert primary.used_bytes == 3 * model.layout.slot_bytes


# -- lower tiers -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("layers", [False, True], ids=["at once", "layer by layer"])
@pytest.mark.parametrize("lost", ["FLUSHALL", "expiry"])
def test_what_a_store_has_lost_is_written_again_from_host_memory(
    model: Model, tmp_path: Path, lost: str, layers: bool
) -> None:
    """A pinned part included: the hotter a prompt, the longer it is in host memory alone."""
    with redis_server(any_kind(), tmp_path) as server, closing(Redis(port=server.port)) as client, listing_every(0.05):
        tier = Tier(RedisBackend(server.url, namespace().digest), LRU())
        with closing(open_engine(model, 64, tier)) as engine:
            prompt = tokens(4 * CHUNK)
            blocks = stored(engine, model, prompt)
            drain(engine)
            assert client.dbsize() == 4
            engine.pin(prompt[: 2 * CHUNK])
            if lost == "FLUSHALL":
                client.flushall()
            else:
                for name in list(client.scan_iter()):
                    client.pexpire(name, 1)
            eventually(lambda: engine.stats().store.tiers[1].chunks == 0, "a listing has missed them")
            if layers:
                with engine.store_layers(prompt, blocks) as writer:
                    assert writer.tokens == 4 * CHUNK
            else:
                assert engine.store(prompt, blocks) == 4 * CHUNK
            drain(engine)
            assert client.dbsize() == 4


@pytest.mark.parametrize("write", ["through", "back"])
def test_a_prefix_four_times_the_host_tier_comes_from_disk(model: Model, tmp_path: Path, write: Any) -> None:
    lower = disk(tmp_path)
    lower.write = write
    with open_engine(model, 8, lower) as engine:
        prompt = tokens(32 * CHUNK)
        blocks = stored(engine, model, prompt, wait=LIMIT)
        drain(engine)
        for _ in range(3):
            model.lose()
            assert engine.retrieve(prompt, blocks) == len(prompt)
            model.check(prompt, blocks, len(prompt))
        drain(engine)
        assert_idle(engine.tiers)


def test_a_wait_does_not_outlast_that_of_another_thread(model: Model, gated: Gated) -> None:
    with open_engine(model, 4, Tier(gated, LRU())) as engine:
        gated.shut("write")
        prompt, other = tokens(32 * CHUNK), tokens(CHUNK, 1)
        blocks = blocks_of(len(prompt))
        with ThreadPoolExecutor(1) as pool:
            slow = pool.submit(engine.store, prompt, blocks, wait=LIMIT)
            gated.waiting("write")
            assert engine.store(other, blocks[:1], wait=0.01) == 0
            assert not slow.done(), "the other one waits on"
            gated.open()


def test_waiting_for_what_will_never_be_listed_ends_with_the_engine(model: Model, gated: Gated) -> None:
    gated.shut("list_all")
    engine = open_engine(model, 4, Tier(gated, LRU()))
    gated.waiting("list_all")
    with ThreadPoolExecutor(2) as pool:
        waiting = pool.submit(engine.tiers.wait_indexed)
        pool.submit(engine.close)
        assert waiting.result(LIMIT) is False
        gated.open()
    raised(ClosedError, "", engine.wait_indexed)


def test_a_restart_finds_what_is_on_disk(model: Model, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """All of it: the end finishes what goes there."""
    monkeypatch.setattr(TieredStore.close, "__defaults__", (LIMIT,))
    prompt = tokens(200)
    with open_engine(model, 16, disk(tmp_path)) as engine:
        blocks = stored(engine, model, prompt, wait=LIMIT)
    assert len(list(tmp_path.rglob("*.kv1"))) == 12
    model.lose()
    with open_engine(model, 16, disk(tmp_path)) as engine:
        assert engine.tiers.wait_indexed(LIMIT)
        assert engine.lookup(prompt) == 192
        assert engine.retrieve(prompt, blocks) == 192
        model.check(prompt, blocks, 192)
        assert engine.stats().store.tiers[1].hits == 12
        engine.retrieve(prompt, blocks)
        assert engine.stats().store.tiers[1].hits == 12, "it has been promoted"


def test_a_piece_that_does_not_come_in_time_ends_the_prefix(model: Model, gated: Gated) -> None:
    with open_engine(model, 16, Tier(gated, LRU())) as engine:
        prompt = tokens(64)
        blocks = stored(engine, model, prompt)
        drain(engine)
        engine.tiers.drop(engine.keys(prompt)[2:])
        gated.shut("read")
        assert engine.retrieve(prompt, blocks, timeout=0.05) == 32
        gated.open()
        drain(engine)
        assert engine.retrieve(prompt, blocks) == 64
        assert_idle(engine.tiers)


def test_what_another_thread_has_only_reserved_is_not_stored(engine: Engine, model: Model) -> None:
    """It may fail, as it does here; or be done, and then all is there."""
    prompt = tokens(48)
    with suppress(RuntimeError), engine.store_layers(prompt[:32], blocks_of(32)):
        assert engine.lookup(prompt) == 0
        assert engine.store(prompt, blocks_of(48)) == 0
        with engine.store_layers(prompt, blocks_of(48)) as writer:
            pass
        assert writer.tokens == 0
        raise RuntimeError("the model failed")
    assert engine.lookup(prompt) == 0
    assert engine.store(prompt, blocks_of(48)) == 48
    with engine.store_layers(prompt, blocks_of(48)) as writer:
        pass
    assert writer.tokens == 48


# -- prefetch --------------------------------------------------------------------------------------------


def test_a_disk_may_take_long_prompts_only(model: Model, tmp_path: Path) -> None:
    tier = Tier(LocalDiskBackend(tmp_path, namespace().digest), LRU(), admission=MinTokens(5 * CHUNK))
    with open_engine(model, 16, tier) as engine:
        for number, count in enumerate((4 * CHUNK + 3, 5 * CHUNK)):
            stored(engine, model, tokens(count, number))
        drain(engine)
        assert engine.tiers.stats().tiers[1].chunks == 5
        assert tier.backend.contains(engine.keys(tokens(5 * CHUNK, 1))) == [True] * 5


@pytest.fixture
def cold(model: Model, gated: Gated) -> Iterator[tuple[Engine, Gated]]:
    """An engine whose 6-chunk prompt `tokens(100)` is on disk only."""
    with open_engine(model, 16, Tier(gated, LRU())) as engine:
        stored(engine, model, tokens(100))
        drain(engine)
        engine.tiers.drop(engine.keys(tokens(100)))
        model.lose()
        yield engine, gated
        gated.open()


def test_prefetch_returns_at_once_and_tells_how_far_it_is(cold: tuple[Engine, Gated], model: Model) -> None:
    engine, gated = cold
    gated.shut("read")
    prefetch = engine.prefetch(tokens(100))
    assert not prefetch.done
    assert not prefetch.wait(0)
    assert (prefetch.progress.found_tokens, prefetch.progress.ready_tokens) == (96, 0)
    assert dict(prefetch.sources) == {"disk": 96}
    gated.open()
    assert prefetch.wait(LIMIT)
    assert prefetch.tokens == 96
    assert prefetch.progress.share == 1.0
    assert prefetch.progress.ready_bytes == 6 * model.layout.chunk_bytes
    again = engine.prefetch(tokens(100))
    assert (again.done, again.tokens, dict(again.sources)) == (True, 96, {"cpu": 96})
    assert engine.retrieve(tokens(100), blocks_of(100)) == 96
    model.check(tokens(100), blocks_of(100), 96)
    assert [verb for verb, _ in gated.calls].count("read") == 6
    for handle in (prefetch, again):
        handle.cancel()
    assert_idle(engine.tiers)


def test_cancelling_releases_every_slot(cold: tuple[Engine, Gated]) -> None:
    engine, gated = cold
    none = engine.prefetch(tokens(100, seed=9))
    assert (none.done, none.tokens, none.progress.share) == (True, 0, 1.0), "what nobody has is done at once"
    gated.shut("read")
    prefetch = engine.prefetch(tokens(100))
    prefetch.cancel()
    prefetch.cancel()
    gated.open()
    assert prefetch.wait(LIMIT)
    assert_idle(engine.tiers)
    assert engine.lookup(tokens(100)) == 96, "it is on disk as before"


def test_many_tasks_may_await_one_prefetch_and_one_may_give_up(cold: tuple[Engine, Gated]) -> None:
    engine, gated = cold
    gated.shut("read")

    async def run() -> list[Any]:
        prefetch = engine.prefetch(tokens(100))

        async def one() -> int:
            return await prefetch

        tasks = [asyncio.create_task(one()) for _ in range(5)]
        await asyncio.sleep(0)
        tasks[0].cancel()
        gated.open()
        return [*await asyncio.gather(*tasks, return_exceptions=True), await prefetch]

    cancelled, *rest = asyncio.run(run())
    assert isinstance(cancelled, asyncio.CancelledError)
    assert rest == [96] * 5


def test_a_loop_that_is_closed_before_the_prefetch_ends_harms_nothing(
    cold: tuple[Engine, Gated], caplog: pytest.LogCaptureFixture
) -> None:
    engine, gated = cold
    gated.shut("read")

    async def give_up() -> None:
        with pytest.raises(TimeoutError):
            async with asyncio.timeout(0):
                await engine.prefetch(tokens(100))

    asyncio.run(give_up())
    gated.open()
    drain(engine)
    assert engine.retrieve(tokens(100), blocks_of(100)) == 96
    assert not [record for record in caplog.records if record.exc_info]


# -- ends ------------------------------------------------------------------------------------------------


def test_a_closed_engine_says_so(model: Model) -> None:
    engine, prompt = open_engine(model), tokens(32)
    stored(engine, model, prompt)
    with engine:
        pass
    engine.close()
    assert engine.closed
    for call in (engine.lookup, engine.prefetch, engine.pin, engine.unpin, engine.clear):
        raised(ClosedError, "'lmkv' is closed", call, prompt)
    for move in (engine.store, engine.retrieve):
        raised(ClosedError, "'lmkv' is closed", move, prompt, blocks_of(32))
    assert engine.stats().stored_tokens == 32


def test_a_store_that_is_overtaken_by_close_publishes_nothing(model: Model, tmp_path: Path) -> None:
    """Or empty slots would go to disk as if they had been copied, with sound checksums."""
    engine, prompt = open_engine(model, 16, disk(tmp_path)), tokens(64)
    model.compute(prompt, blocks_of(64))
    with ThreadPoolExecutor(1) as pool:
        with engine._copy_lock:
            storing = pool.submit(engine.store, prompt, blocks_of(64))
            eventually(lambda: engine.tiers.stats().writing > 0)
            engine._closed = True
            engine.copier.close()  # type: ignore[union-attr]
        raised(ClosedError, "", storing.result, LIMIT)
    engine._closed = False
    engine.close()
    assert not list(tmp_path.rglob("*.kv1"))


def test_what_cannot_be_together_is_refused(model: Model, tmp_path: Path) -> None:
    small = TieredStore(Tier(CPUPinnedBackend(1 << 20, 4096, populate=False), LRU()))
    layout = KVLayout(16, (LayerPages(4096, 4),) * 9)
    raised(UsageError, r"slot_bytes=layout\.slot_bytes", Engine, small, namespace(), layout=layout)
    small.close()
    raised(UsageError, "host memory", TieredStore, disk(tmp_path))
    raised(UsageError, "model is empty", Engine.open, model.tensors, block_size=BLOCK, block_axis=1, model="")
    tier = host(model.layout, 4)
    with Engine(TieredStore(tier), namespace(), layout=model.layout) as engine:
        assert engine.lookup(tokens(32)) == 0
        for move in (engine.store, engine.retrieve):
            raised(UsageError, "no paged memory", move, tokens(32), blocks_of(32))
        # A slab belongs to one store.
        raised(UsageError, "belongs to a store", TieredStore, tier)
        raised(UsageError, "belongs to a store", tier.backend.contains, [bytes(32)])


def settings(folder: Path, **more: Any) -> Config:
    below = {"local_disk": str(folder), "max_local_disk_size": 0.01, "disk_min_free": 0.0}
    return Config(**{"chunk_size": CHUNK, "max_local_cpu_size": 0.001, **below, **more})  # type: ignore[arg-type]


def test_open_builds_everything_from_a_config(model: Model, tmp_path: Path) -> None:
    config, prompt = settings(tmp_path, pin_ttl=5.0), tokens(40)
    options: dict[str, Any] = {"block_size": BLOCK, "block_axis": 1, "config": config}
    for expected in (0, 32):
        with Engine.open({"layer": model.tensors[0]}, model="m", **options) as engine:
            assert engine.tiers.wait_indexed(LIMIT)
            assert engine.chunk_size == CHUNK
            assert engine.lookup(prompt) == expected
            engine.store(prompt, blocks_of(40))
            drain(engine)
    with Engine.open(model.tensors[:1], model="n", **options) as engine:
        assert engine.tiers.wait_indexed(LIMIT)
        assert engine.lookup(prompt) == 0, "another model"


def test_without_a_cpu_tier_everything_passes_through(model: Model, tmp_path: Path) -> None:
    config = settings(tmp_path, local_cpu=False)
    with Engine.open(model.tensors, block_size=BLOCK, block_axis=1, model="m", config=config) as engine:
        prompt = tokens(64)
        blocks = stored(engine, model, prompt)
        drain(engine)
        model.lose()
        assert engine.retrieve(prompt, blocks) == 64
        model.check(prompt, blocks, 64)
        assert engine.stats().store.primary.chunks == 0


def test_an_engine_that_cannot_be_made_closes_its_store(
    model: Model, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    closed: list[TieredStore] = []
    close = TieredStore.close
    monkeypatch.setattr(TieredStore, "close", lambda self: closed.append(self) or close(self))
    monkeypatch.setattr("lmkv.engine.make_copier", lambda *args: 1 // 0)
    with pytest.raises(ZeroDivisionError):
        Engine.open(model.tensors, block_size=BLOCK, block_axis=1, model="m", config=Config(chunk_size=CHUNK))
    assert len(closed) == 1


# -- the registry ----------------------------------------------------------------------------------------


@pytest.fixture
def names() -> Iterator[None]:
    yield
    for name in ("one", "two"):
        lmkv.destroy(name)


@pytest.mark.usefixtures("names")
def test_engines_by_name(model: Model) -> None:
    made = []

    def make() -> Engine:
        made.append(open_engine(model, 4))
        return made[-1]

    first = lmkv.get_or_create("one", make)
    assert lmkv.get_or_create("one", make) is first is lmkv.get("one")
    second = lmkv.get_or_create("two", make)
    assert second is not first
    lmkv.destroy("one")
    lmkv.destroy("one")
    assert first.closed
    assert not second.closed
    raised(UsageError, r"no engine 'one'; registered: two", lmkv.get, "one")
    assert lmkv.get_or_create("one", make) is made[2]
    made[2].close()
    assert lmkv.get_or_create("one", make) is made[3], "one that was closed by hand is made anew"


@pytest.mark.usefixtures("names")
def test_an_engine_is_made_once_however_many_ask(model: Model) -> None:
    made: list[Engine] = []
    asking: list[int] = []

    def make() -> Engine:
        eventually(lambda: len(asking) == 8)
        made.append(open_engine(model, 4))
        return made[-1]

    def ask(number: int) -> None:
        asking.append(number)
        lmkv.get_or_create("one", make)

    in_threads(8, ask)
    assert len(made) == 1
