"""Compares the KV of each block that vLLM uses with the KV that the same tokens had before, wherever it came from."""

from __future__ import annotations

from typing import Any

import torch
from attrs import define, field

from tests.vllm.harness import BLOCK, Engine

TOLERANCE = 1e-3
"""Two computations of the same tokens differ by at most this share of the greatest value, however they are batched."""


@define
class KVOracle:
    """Looks at the whole blocks of the requests that a step computes, when one of them is new or filled again.

    `compared`: blocks whose tokens some step had before. `wrong`: request and place of those with another KV.
    """

    engine: Engine
    compared: int = 0
    wrong: list[tuple[str, int]] = field(factory=list)
    _known: dict[int, torch.Tensor] = field(factory=dict, repr=False)
    _seen: dict[str, tuple[int, tuple[int, ...]]] = field(factory=dict, repr=False)
    _step: Any = field(default=None, repr=False)

    @property
    def _runner(self) -> Any:
        return self.engine.llm.llm_engine.engine_core.engine_core.model_executor.driver_worker.worker.model_runner

    def __enter__(self) -> KVOracle:
        runner, self._step = self._runner, self._runner.execute_model

        def execute_model(output: Any, *args: Any, **kwargs: Any) -> Any:
            result = self._step(output, *args, **kwargs)
            transfer = runner.kv_connector_output
            # vLLM knows of blocks that could not be loaded, and computes them in the next step.
            if transfer is None or not transfer.invalid_block_ids:
                for request_id, tokens in output.num_scheduled_tokens.items():
                    self._look(runner.requests[request_id], request_id, tokens)
            return result

        runner.execute_model = execute_model
        return self

    def __exit__(self, *_: object) -> None:
        self._runner.execute_model = self._step

    def _look(self, request: Any, request_id: str, scheduled: int) -> None:
        tokens = [*request.prompt_token_ids, *request.output_token_ids]
        computed = request.num_computed_tokens
        blocks = tuple(request.block_ids[0][: (computed + scheduled) // BLOCK])
        before, seen = self._seen.get(request_id, (0, ()))
        self._seen[request_id] = computed, blocks
        if seen == blocks and computed >= before:
            return
        rows = self.engine.worker._memory.rows
        found = torch.stack([row[list(blocks)].view(torch.float32) for row in rows], 1)
        key = 0
        for index, kv in enumerate(found):
            key = hash((key, *tokens[index * BLOCK : (index + 1) * BLOCK]))
            known = self._known.get(key)
            if known is None:
                self._known[key] = kv.clone()
                continue
            self.compared += 1
            if (kv - known).abs().max() > TOLERANCE * known.abs().max():
                self.wrong.append((request_id, index))
