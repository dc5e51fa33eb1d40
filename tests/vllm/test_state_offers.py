"""Blocks with states that vLLM offers to connectors, by vLLM's own manager of blocks, without a model."""

from __future__ import annotations

import os
from types import SimpleNamespace
from typing import Any

import pytest

from lmkv.vllm.plan.block_map import BlockMap, Group
from lmkv.vllm.plan.request import Auditing, Storing
from lmkv.vllm.scheduler.context import SchedulerOptions
from lmkv.vllm.scheduler.stores import StateStores
from tests.vllm.harness import ENVIRONMENT

BLOCK, DRAFTS = 32, 3


class Engine:
    """Calls the manager as vLLM's scheduler does with asynchronous scheduling: the next step is planned before."""

    def __init__(self) -> None:
        os.environ.update(ENVIRONMENT)
        import torch
        from vllm.utils.hashing import sha256
        from vllm.v1.core.kv_cache_manager import KVCacheManager
        from vllm.v1.core.kv_cache_utils import get_request_block_hasher, init_none_hash
        from vllm.v1.kv_cache_interface import FullAttentionSpec, KVCacheConfig, KVCacheGroupSpec, MambaSpec

        init_none_hash(sha256)
        self._hasher = get_request_block_hasher(BLOCK, sha256)
        attention = FullAttentionSpec(block_size=BLOCK, num_kv_heads=1, head_size=8, dtype=torch.float32)
        state = MambaSpec(
            block_size=BLOCK,
            shapes=((512,),),
            dtypes=(torch.float32,),
            mamba_cache_mode="align",
            num_speculative_blocks=DRAFTS,
        )
        groups = [KVCacheGroupSpec(["attention"], attention), KVCacheGroupSpec(["state"], state)]
        self.manager = KVCacheManager(
            KVCacheConfig(num_blocks=64, kv_cache_tensors=[], kv_cache_groups=groups),
            max_model_len=1024,
            scheduler_block_size=BLOCK,
            hash_block_size=BLOCK,
        )

    def request(self, name: str, tokens: int) -> Any:
        from vllm import SamplingParams
        from vllm.v1.request import Request

        ids = [ord(name) * 1000 + number for number in range(tokens)]
        return Request(name, ids, SamplingParams(max_tokens=50), None, block_hasher=self._hasher)

    def schedule(self, request: Any, tokens: int) -> None:
        assert self.manager.allocate_slots(request, tokens, num_lookahead_tokens=DRAFTS) is not None
        request.num_computed_tokens += tokens
        request.num_in_flight_tokens += tokens

    def step(self, request: Any, tokens: int) -> None:
        """A step of one request, whose offers are taken."""
        self.manager.new_step_starts()
        self.schedule(request, tokens)
        self.manager.take_boundary_state_offloads()

    def end(self, request: Any, tokens: int, said: list[int], rejected: int = 0) -> None:
        request.num_in_flight_tokens -= tokens
        request.num_computed_tokens -= rejected
        request.append_output_token_ids(said)
        self.manager.cache_blocks(request, request.num_computed_tokens - request.num_in_flight_tokens)


class Planner(StateStores):
    """Notes the blocks that would be copied."""

    def __init__(self) -> None:
        self._block_map = BlockMap(BLOCK, (Group(BLOCK), Group(BLOCK, state=1)))
        self._chunk_size, self._interval, self._options = BLOCK, 1, SchedulerOptions()
        audit: Any = SimpleNamespace(compare_states=lambda *given: None)
        self._audit = audit
        self.copied: set[int] = set()

    def _order(self, state: Any, chunks: int, blocks: Any, replaces: int = 0) -> None:
        copy = self._block_map.state_copy(0, 1, blocks)
        if copy is not None:
            self.copied |= {block for run in copy.runs for block in run.blocks}


def test_a_block_that_is_another_requests_by_now_is_not_taken_for_a_state() -> None:
    """Drafts carry an answer past a boundary, and the pool has nothing else for the next request."""
    pytest.importorskip("vllm")
    engine, planner = Engine(), Planner()
    manager = engine.manager
    one, other = engine.request("a", 60), engine.request("b", 90)
    engine.step(one, 32)
    one.num_in_flight_tokens -= 32
    engine.step(one, 28)
    engine.step(one, 1 + DRAFTS)
    engine.end(one, 28, [901])
    engine.step(one, 1 + DRAFTS)
    engine.end(one, 1 + DRAFTS, [902, 903], rejected=2)
    engine.step(one, 1 + DRAFTS)
    engine.end(one, 1 + DRAFTS, [904, 905, 906, 907])
    manager.block_pool.get_new_blocks(manager.block_pool.get_num_free_blocks() - 5)
    manager.new_step_starts()
    engine.schedule(one, 1 + DRAFTS)
    engine.schedule(other, 32)
    offers = manager.take_boundary_state_offloads()["a"]
    others = {block for table in manager.get_block_ids("b") for block in table if block}
    assert {block for _, block, _ in offers} & others, "no block was offered that is the other request's"
    options = SimpleNamespace(skip_save=False, max_offload_tokens=None)
    request: Any = SimpleNamespace(vllm=one, options=options, storing=Storing(), auditing=Auditing())
    request.num_tokens, request.prompt_tokens = one.num_tokens, one.num_prompt_tokens
    planner.take(request, one.num_computed_tokens - DRAFTS, manager.get_block_ids("a"), offers)
    assert not planner.copied & others
