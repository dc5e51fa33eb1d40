"""KV connectors of vLLM that are limits for every other connector: they do nothing, only copy, or only read."""

from __future__ import annotations

import time
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorBase_V1, KVConnectorMetadata

from benchmarks.peers import files_of, values_of
from lmkv.memory.paged import block_rows


class IdleConnector(KVConnectorBase_V1):
    """A connector that stores nothing and finds nothing."""

    def get_num_new_matched_tokens(self, request: Any, num_computed_tokens: int) -> tuple[int | None, bool]:
        return 0, False

    def update_state_after_alloc(self, request: Any, blocks: Any, num_external_tokens: int) -> None:
        pass

    def build_connector_meta(self, scheduler_output: Any) -> KVConnectorMetadata:
        return KVConnectorMetadata()

    def start_load_kv(self, forward_context: Any, **kwargs: Any) -> None:
        pass

    def wait_for_layer_load(self, layer_name: str) -> None:
        pass

    def save_kv_layer(self, layer_name: str, kv_layer: Any, attn_metadata: Any, **kwargs: Any) -> None:
        pass

    def wait_for_save(self) -> None:
        pass


class ReadingConnector(IdleConnector):
    """A connector that finds nothing. A request waits until one plain thread has read a prompt's files below
    `plain_folder`, or values of `redis`.

    The first prompt of a process does not wait. The connector adds a line to the file `waits` for each other prompt.
    The line has the seconds from vLLM's first question to the end of the read.
    """

    def __init__(self, vllm_config: Any, role: Any, kv_cache_config: Any) -> None:
        super().__init__(vllm_config, role, kv_cache_config)
        self._settings = vllm_config.kv_transfer_config.kv_connector_extra_config
        self._first: list[int] | None = None
        self._read: Callable[[], None] | None = None
        self._thread = ThreadPoolExecutor(1)
        self._reading: dict[str, Future[None]] = {}

    def get_num_new_matched_tokens(self, request: Any, num_computed_tokens: int) -> tuple[int | None, bool]:
        self._first = self._first or list(request.prompt_token_ids)
        if request.prompt_token_ids == self._first:
            return 0, False
        if self._read is None:
            url = self._settings["redis"]
            self._read = values_of(url) if url else files_of(Path(self._settings["plain_folder"]), in_memory=False)
        if request.request_id not in self._reading:
            self._reading[request.request_id] = self._thread.submit(self._timed, self._read, time.perf_counter())
        return (0 if self._reading[request.request_id].done() else None), False

    def _timed(self, read: Callable[[], None], asked: float) -> None:
        read()
        with open(self._settings["waits"], "a") as waits:
            print(time.perf_counter() - asked, file=waits)


class BlocksMetadata(KVConnectorMetadata):
    """The blocks that this step stores."""

    def __init__(self, blocks: list[int]) -> None:
        self.blocks = blocks


class CopyingConnector(IdleConnector):
    """A connector that finds nothing. It copies each full block into host memory, always into the same space for
    `copied_tokens` tokens.

    It hashes, looks up, evicts and reports nothing, so that only the price of the copies remains. Requests that skip
    the connector are not copied.
    """

    def __init__(self, vllm_config: Any, role: Any, kv_cache_config: Any) -> None:
        super().__init__(vllm_config, role, kv_cache_config)
        self._block_size: int = vllm_config.cache_config.block_size
        tokens: int = vllm_config.kv_transfer_config.kv_connector_extra_config["copied_tokens"]
        self._copied_blocks = tokens // self._block_size
        self._tables: dict[str, list[int]] = {}
        self._full: dict[str, int] = {}
        self.layers: list[tuple[np.ndarray, np.ndarray]] = []
        self.at = 0

    def build_connector_meta(self, scheduler_output: Any) -> BlocksMetadata:
        for request_id in scheduler_output.finished_req_ids:
            self._tables.pop(request_id, None)
            self._full.pop(request_id, None)
        found: list[int] = []
        for new in scheduler_output.scheduled_new_reqs:
            if not (new.sampling_params.extra_args or {}).get("kv_transfer_params"):
                self._tables[new.req_id] = list(new.block_ids[0])
                self._full[new.req_id] = new.num_computed_tokens // self._block_size
                found += self._filled(new.req_id, new.num_computed_tokens, scheduler_output)
        known = scheduler_output.scheduled_cached_reqs
        for request_id, computed, blocks in zip(
            known.req_ids, known.num_computed_tokens, known.new_block_ids, strict=True
        ):
            if request_id in self._tables:
                if request_id in known.resumed_req_ids:
                    # After a preemption it gets all its blocks anew.
                    self._tables[request_id], self._full[request_id] = [], computed // self._block_size
                self._tables[request_id] += blocks[0] if blocks is not None else ()
                found += self._filled(request_id, computed, scheduler_output)
        return BlocksMetadata(found)

    def _filled(self, request_id: str, computed: int, output: Any) -> list[int]:
        full = (computed + output.num_scheduled_tokens[request_id]) // self._block_size
        before, self._full[request_id] = self._full[request_id], full
        return self._tables[request_id][before:full]

    def register_kv_caches(self, kv_caches: dict[str, Any]) -> None:
        for name, tensor in kv_caches.items():
            pages = block_rows(tensor, name).numpy().view(np.uint64)
            self.layers.append((pages, np.ones((self._copied_blocks, pages.shape[1]), np.uint64)))

    def wait_for_save(self) -> None:
        metadata = self._get_connector_metadata()
        assert isinstance(metadata, BlocksMetadata)
        blocks = metadata.blocks
        while blocks:
            some, blocks = blocks[: self._copied_blocks - self.at], blocks[self._copied_blocks - self.at :]
            for pages, copies in self.layers:
                pages.take(some, 0, copies[self.at : self.at + len(some)], "clip")
            self.at = (self.at + len(some)) % self._copied_blocks
