"""Both sides of the connector without vLLM: costs, options, versions, and the block map."""

from __future__ import annotations

import logging
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from attrs import evolve
from hypothesis import assume, given, strategies as st

from lmkv.chunks.layout import KVLayout, LayerPages
from lmkv.chunks.namespace import Namespace
from lmkv.memory.copier import ChunkCopy, Run
from lmkv.memory.paged import block_rows
from lmkv.vllm import compat
from lmkv.vllm.compat import Numbers
from lmkv.vllm.model import Ranks, ServedModel
from lmkv.vllm.plan.block_map import BlockMap, Group
from lmkv.vllm.plan.options import RequestOptions
from lmkv.vllm.scheduler.timing import LoadCost, LoadMode, LoadTime
from tests.tables import raised

MIB = 1 << 20
NAMESPACE = Namespace(model="m", dtype="u8", chunk_size=8, block_size=4)


def measured(**options: Any) -> LoadCost:
    """Where a second was enough for 1,000 tokens."""
    cost = LoadCost(**options)
    cost.note_step(1000, 1.0)
    return cost


class TestLoadCost:
    def test_what_is_not_measured_is_loaded(self) -> None:
        assert LoadCost().worth_loading("disk", 1000, MIB)

    def test_a_slow_tier_is_skipped_and_a_fast_one_is_not(self, caplog: pytest.LogCaptureFixture) -> None:
        cost = measured()
        cost.note_load("disk", 10 * MIB, 1.0)
        with caplog.at_level(logging.DEBUG, logger="lmkv"):
            assert not cost.worth_loading("disk", 1000, 100 * MIB)
        assert cost.skipped == {"disk": 1}
        assert "not loaded" in caplog.text
        assert cost.worth_loading("disk", 1000, 5 * MIB)
        assert cost.worth_loading("elsewhere", 1000, 100 * MIB)

    def test_a_tier_that_looks_slow_is_tried_again_now_and_then(self) -> None:
        cost = measured()
        cost.note_load("disk", MIB, 1.0)
        probes = 0
        for _ in range(32):
            assert not cost.worth_loading("disk", 1000, 100 * MIB)
            probes += cost.wants_probe("disk")
        assert probes == 2

    def test_switched_off_everything_is_loaded(self) -> None:
        cost = measured(enabled=False)
        cost.note_load("disk", MIB, 1.0)
        assert cost.worth_loading("disk", 1000, 100 * MIB)
        assert not cost.skipped

    def test_idle_time_and_decode_steps_do_not_make_the_model_look_slow(self) -> None:
        cost = measured()
        cost.note_step(1000, 60.0)
        cost.note_step(1, 0.5)
        assert cost.prefill_speed > 900

    def test_a_delay_of_every_load_counts_for_small_ones_too(self) -> None:
        """A store behind 200 ms that then delivers 100 MiB/s, and a model that computes 1 MiB in 100 ms."""
        cost = measured()
        for size in (64, 32, 64, 128):
            cost.note_load("redis", size * MIB, 0.2 + size / 100)
        assert not cost.worth_loading("redis", 100, MIB)
        assert cost.worth_loading("redis", 1000, 10 * MIB)


class TestLoadTime:
    @given(delay=st.floats(0.001, 1.0), speed=st.floats(1e6, 1e10), sizes=st.lists(st.integers(1, 1000), min_size=2))
    def test_delay_and_speed_are_found(self, delay: float, speed: float, sizes: list[int]) -> None:
        assume(len(set(sizes)) > 1)
        time = LoadTime()
        for size in [*sizes, *sizes[:2], min(sizes), max(sizes)]:
            time.note_load(size * MIB, delay + size * MIB / speed)
        for size in (1, 10, 5000):
            assert time.of(size * MIB) == pytest.approx(delay + size * MIB / speed, rel=1e-3)

    @given(loads=st.lists(st.tuples(st.integers(1, 1 << 30), st.floats(1e-4, 1e3)), min_size=1))
    def test_no_load_takes_less_than_no_time_or_less_than_a_smaller_one(self, loads: list[tuple[int, float]]) -> None:
        time = LoadTime()
        for nbytes, seconds in loads:
            time.note_load(nbytes, seconds)
        expected = [time.of(nbytes) for nbytes in (1, MIB, 1 << 40)]
        assert expected == sorted(expected)
        assert expected[0] >= -1e-9

    def test_loads_of_one_size_leave_it_to_the_bytes(self) -> None:
        time = LoadTime()
        time.note_load(10 * MIB, 1.0)
        time.note_load(10 * MIB, 1.0)
        assert time.of(5 * MIB) == pytest.approx(0.5)

    def test_it_follows_the_tier(self) -> None:
        time = LoadTime()
        for speed in (10, 100):
            for size in [20, 40] * 20:
                time.note_load(size * MIB, size / speed)
        assert time.of(30 * MIB) == pytest.approx(0.3, rel=0.01)


def _request(**fields: Any) -> SimpleNamespace:
    return SimpleNamespace(**{"request_id": "r", "kv_transfer_params": None, **fields})


class TestOptions:
    def test_all_of_them(self) -> None:
        params = {
            "lmkv.skip_save": True,
            "lmkv.skip_load": "true",
            "lmkv.report": 2,
            "lmkv.prefetch": True,
            "lmkv.prefetch_tokens": [1, 2, 3],
            "lmkv.pin": 30,
            "lmkv.wait_for": 1500,
            "lmkv.tag.b": 2,
            "lmkv.tag.a": "x",
            "do_remote_decode": True,
        }
        options = RequestOptions.of(_request(kv_transfer_params=params))
        assert options.skip_save
        assert options.skip_load
        assert not options.report, "2 is not a boolean"
        assert options.prefetch
        assert options.prefetch_tokens == (1, 2, 3)
        assert options.pin_seconds == 30.0
        assert options.wait_for == 1500
        assert options.remote_decode
        assert options.tags == (("a", "x"), ("b", "2"))

    def test_lmcaches_parameters_keep_requests_apart_as_lmkvs_do(self) -> None:
        theirs = {"lmcache.tag.b": 2, "lmcache.tag.a": "x", "lmcache.skip_save": True, "lmcache.max_offload_tokens": 64}
        ours = {"lmkv.tag.b": 2, "lmkv.tag.a": "x", "lmkv.skip_save": True, "max_offload_tokens": 64}
        of = [RequestOptions.of(_request(kv_transfer_params=params)) for params in (theirs, ours, theirs | ours)]
        assert of[0] == of[1] == of[2]
        unclear = RequestOptions.of(_request(kv_transfer_params={"lmcache.tag.a": "x", "lmkv.tag.a": "y"}))
        assert (unclear.skip_save, unclear.skip_load) == (True, True)

    @pytest.mark.parametrize("tokens", ["123", [1, -2], [1.5], {"a": 1}, None, [2**32]])
    def test_a_clients_mistake_does_not_cost_the_request(self, tokens: object) -> None:
        params = {"lmkv.prefetch_tokens": tokens, "lmkv.pin": "soon", "lmkv.wait_for": "all"}
        options = RequestOptions.of(_request(kv_transfer_params=params))
        assert options.prefetch_tokens == ()
        assert options.pin_seconds == 0.0
        assert options.wait_for == 0


class TestCompat:
    @pytest.mark.parametrize("version", ["0.29.0", "0.31.0", "0.32.0+cpu", "0.33.1", "0.34.0.dev12", "1.0.dev3"])
    def test_supported(self, version: str) -> None:
        compat.check_version(version)

    @pytest.mark.parametrize("version", ["0.28.3", "0.9.1", "0.34.0", "1.0.0"])
    def test_unsupported_says_what_is(self, version: str) -> None:
        raised(
            ImportError,
            r"0\.29 or later, and earlier than 0\.34, not " + version.replace(".", r"\."),
            compat.check_version,
            version,
        )

    def test_progress_leaves_drafts_out(self) -> None:
        output = SimpleNamespace(
            num_scheduled_tokens={"new": 100, "running": 4},
            scheduled_spec_decode_tokens={"running": [1, 2, 3]},
            scheduled_new_reqs=[SimpleNamespace(req_id="new", num_computed_tokens=256)],
            scheduled_cached_reqs=SimpleNamespace(req_ids=["running", "idle"], num_computed_tokens=[500, 7]),
        )
        assert compat.computed_tokens(output) == {"new": 356, "running": 501, "idle": 7}

    def test_what_keeps_no_prefix_is_refused_with_the_reason(self) -> None:
        class ChunkedLocalAttentionSpec:
            block_size = 16
            page_size_bytes = 64

        group = SimpleNamespace(layer_names=["a"], kv_cache_spec=ChunkedLocalAttentionSpec())
        raised(ValueError, "ChunkedLocalAttentionSpec", compat.kv_groups, SimpleNamespace(kv_cache_groups=[group]))


class TestGeometry:
    def test_a_load_starts_at_the_first_missing_block(self) -> None:
        block_map = BlockMap(8, (Group(4),))
        copies = block_map.load_copies([5, 6], [[1, 2, 3, 4]], 4, 16)
        assert copies == [ChunkCopy(5, (Run(1, [2]),)), ChunkCopy(6, (Run(0, [3, 4]),))]
        assert block_map.covers(copies, 4, 16)
        assert not block_map.covers(copies[:1], 4, 16)

    def test_null_blocks_are_never_touched(self) -> None:
        block_map = BlockMap(8, (Group(4), Group(4, window=5)))
        tables = [[1, 2, 3, 4], [0, 0, 0, 9]]
        (first, second) = block_map.load_copies([0, 1], tables, 0, 16)
        assert [run.blocks for copy in (first, second) for run in copy.runs] == [[1, 2], [], [3, 4], [9]]
        assert second.runs[1].first == 1

    def test_a_chunk_is_stored_when_a_match_at_its_end_could_read_it(self) -> None:
        block_map = BlockMap(8, (Group(4, window=4),))
        assert block_map.store_copy(0, [[0, 7]], 0) == ChunkCopy(0, (Run(1, [7]),))
        # A hit of all but the chunk's last token reads the first of them.
        assert BlockMap(8, (Group(4, window=5),)).store_copy(0, [[0, 7]], 0) is None
        assert block_map.store_copy(0, [[3]], 0) is None, "blocks are missing"

    def test_a_tail_is_stored_with_its_own_pages(self) -> None:
        block_map = BlockMap(8, (Group(4), Group(2, window=3)))
        tables = [[1, 2, 3, 4], [0, 0, 0, 0, 0, 6, 7, 8]]
        assert block_map.store_copy(5, tables, 1, 5) == ChunkCopy(5, (Run(0, [3, 4]), Run(1, [6, 7])))
        assert block_map.store_copy(5, tables, 1, 3) is None, "a hit of two of them reads a block that is not there"


class TestLoadMode:
    def test_a_cpu_gains_nothing_between_steps(self) -> None:
        mode = LoadMode(computing=5)
        mode.note_load(1 << 20, 1.0)
        assert not mode.between_steps(1 << 30)

    def test_a_device_loads_between_steps_what_would_hold_up_others(self) -> None:
        mode = LoadMode(concurrent=True, computing=1)
        assert not mode.between_steps(1 << 40), "no speed is known yet"
        mode.note_load(10 << 30, 1.0)
        assert not mode.between_steps(40 << 20)
        assert mode.between_steps(60 << 20)
        mode.computing = 0
        assert not mode.between_steps(60 << 20), "no request is delayed"

    @pytest.mark.parametrize(("mode", "answer"), [("sync", False), ("async", True)])
    def test_users_may_decide(self, mode: Any, answer: bool) -> None:
        assert LoadMode(mode).between_steps(1) is answer


class TestServedModel:
    """Whether the tensors that vLLM registers are what the layout was made for."""

    def _model(self, *, fused: bool) -> ServedModel:
        pages = (LayerPages(192, 2),) if fused else (LayerPages(64, 2),) * 3
        block_map = BlockMap(8, (Group(4),))
        return ServedModel(block_map, KVLayout(8, pages), ("a", "b", "c"), fused, 6, Ranks((0,), 1), lambda: NAMESPACE)

    def test_layers_of_a_block_that_lie_together_are_one_page(self) -> None:
        whole = torch.arange(6 * 192).to(torch.uint8).view(6, 3, 64)
        rows = [block_rows(layer) for layer in whole.unbind(1)]
        model = evolve(self._model(fused=True), numbers=[[Numbers(torch.float16)]] * 3)
        memory = model.paged_memory([rows[2], rows[0], rows[1]])
        parts = model.parts([rows[2], rows[0], rows[1]])
        places = [(part.layer, part.plane, part.offset, part.nbytes) for part in parts]
        assert places == [("a", 0, 128, 64), ("b", 0, 0, 64), ("c", 0, 64, 64)]
        assert torch.equal(memory.rows[0], whole.view(6, 192)), "in the order of memory"
        assert (memory.num_layers, memory.layers) == (3, [range(3)])

    @pytest.mark.parametrize("fused", [False, True])
    def test_anything_else_is_refused(self, fused: bool) -> None:
        apart = [torch.zeros((6, 64 if fused else 60), dtype=torch.uint8) for _ in range(3)]
        raised(ValueError, "bytes instead of", lambda: self._model(fused=fused).paged_memory(apart))
