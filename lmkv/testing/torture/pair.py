"""A prefill and a decode engine, with what routes requests through both."""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any

from attrs import define, field

from lmkv.testing.torture.engine import Engine
from lmkv.testing.torture.server import free_ports

PREFILL_ENGINE = {"distributed_executor_backend": "mp"}
"""A process has one connector of vLLM's workers: those of the prefill engine get processes of their own."""
_TO_PREFILL = {
    "do_remote_decode": True,
    "do_remote_prefill": False,
    "remote_engine_id": None,
    "remote_block_ids": None,
    "remote_host": None,
    "remote_port": None,
}


def new_side_channel() -> None:
    """Let the next engine's NIXL listen on a port of its own."""
    from vllm import envs

    envs.disable_envs_cache()
    os.environ["VLLM_NIXL_SIDE_CHANNEL_PORT"] = str(free_ports(1)[0])


@define
class Pair(Engine):
    """Each request goes through `prefill` for one token; then this engine gets what that one has returned."""

    prefill: Engine = field(kw_only=True)
    _waiting: dict[str, Callable[[Any], None]] = field(factory=dict)
    _cached: dict[str, int] = field(factory=dict)

    def ask(self, name: str, tokens: Sequence[int], max_tokens: int, **more: Any) -> None:
        def decode(returned: Any) -> None:
            super(Pair, self).ask(name, tokens, max_tokens, **more | {"transfer": returned})

        self._waiting[name] = decode
        self.prefill.ask(name, tokens, 1, **more | {"transfer": dict(_TO_PREFILL)})

    def step(self) -> list[Any]:
        for output in self.prefill.step():
            if decode := self._waiting.pop(output.request_id, None):
                self._cached[output.request_id] = output.num_cached_tokens or 0
                decode(output.kv_transfer_params)
        return [self._with_hits_of_prefill(output) for output in super().step()]

    def _with_hits_of_prefill(self, output: Any) -> Any:
        """The whole prompt may come from the prefill engine; what that one had is what can be untrue."""
        cached = self._cached.pop(output.request_id, 0)
        if (output.num_cached_tokens or 0) <= len(output.prompt_token_ids):
            output.num_cached_tokens = cached
        return output

    def abort(self, name: str) -> None:
        self._cached.pop(name, None)
        if self._waiting.pop(name, None):
            self.prefill.abort(name)
        else:
            super().abort(name)

    def reset(self, *, running: bool) -> None:
        self.prefill.reset(running=running)
        super().reset(running=running)

    def held(self) -> set[str]:
        return self.prefill.held() | super().held()

    def left(self) -> str:
        sides = {"prefill": self.prefill.left(), "decode": super().left()}
        return "; ".join(f"{side}: {left}" for side, left in sides.items() if left)

    def all_counts(self) -> Counter[str]:
        """Preemptions of both engines; what connectors have loaded is the decode engine's."""
        return self.counts + Counter(preemptions=self.prefill.counts["preemptions"])
