"""One engine's life: requests arrive and are aborted at random steps, and each answer is compared."""

from __future__ import annotations

import contextlib
import random
import time
from collections.abc import Callable
from typing import Any

from attrs import define, field

from tests.torture.conversations import Turn
from tests.torture.counts import Counts
from tests.torture.sabotage import Saboteur
from tests.vllm.harness import Engine

CLOSE_ENOUGH = 1e-3
"""Largest difference of log-probabilities. Another order of summing in float32 stays below it, a wrong page not."""

PATIENCE = 120.0
"""Seconds after which a request that has not ended never will."""

_AT_ONCE = 12
_ABORTED_LOADS = 0.3
"""Share of the loads under way whose requests are aborted, in each step."""
_HOT = 16


@define
class _Asked:
    turn: Turn
    since: float
    abort_after: int | None


@define
class Drive:
    """`alive` is called with each step. `turns`: what may be asked."""

    running: Engine
    turns: list[Turn]
    rng: random.Random
    counts: Counts
    saboteur: Saboteur
    alive: Callable[[], None]
    _asked: dict[str, _Asked] = field(factory=dict)
    _hot: list[Turn] = field(factory=list)
    _number: int = 0

    def run(self, requests: int) -> None:
        """Ask so many requests, wait for all of them, and look for what is left over."""
        self._hot = self.rng.choices(self.turns, k=_HOT)
        self._count_preemptions()
        left = requests
        while left or self._asked:
            left -= self._arrive(left)
            self._abort_some()
            self._forget_at_times()
            self.saboteur.strike()
            self._step()
        self.saboteur.make_peace()
        self._wind_down()
        self._count_evictions()

    def _count_preemptions(self) -> None:
        scheduler = self.running.scheduler
        preempt = scheduler._preempt_request

        def counted(*args: Any, **options: Any) -> Any:
            self.counts.preemptions += 1
            return preempt(*args, **options)

        scheduler._preempt_request = counted

    # -- asking -------------------------------------------------------------------------------------------

    def _arrive(self, left: int) -> int:
        """Requests come in bursts; returns how many came now."""
        if self.rng.random() < 0.7 and self._asked:
            return 0
        count = min(left, self.rng.randint(1, 6), _AT_ONCE - len(self._asked))
        for _ in range(count):
            self._ask(self._next_turn())
        return max(0, count)

    def _next_turn(self) -> Turn:
        """The next turn to ask: mostly one that was asked not long ago."""
        if self.rng.random() < 0.15:
            self._hot[self.rng.randrange(_HOT)] = self.rng.choice(self.turns)
        return self.rng.choice(self._hot)

    def _ask(self, turn: Turn) -> None:
        from vllm import SamplingParams
        from vllm.sampling_params import RequestOutputKind

        params = SamplingParams(
            temperature=0,
            max_tokens=len(turn.answer),
            ignore_eos=True,
            detokenize=False,
            logprobs=0,
            output_kind=RequestOutputKind.FINAL_ONLY,
            extra_args={"kv_transfer_params": self._wishes()},
        )
        prompt: dict[str, Any] = {"prompt_token_ids": turn.prompt}
        salt = self.rng.choice((None, None, None, "a", "b"))
        if salt is not None:
            prompt["cache_salt"] = salt
        self._number += 1
        name = self.running.llm.llm_engine.add_request(f"r{self._number}", prompt, params)
        abort_after = self.rng.randint(0, 25) if self.rng.random() < 0.1 else None
        self._asked[f"r{self._number}"] = _Asked(turn, time.monotonic(), abort_after)
        assert name.startswith(f"r{self._number}")

    def _wishes(self) -> dict[str, Any]:
        wishes: dict[str, Any] = {"lmkv.report": True}
        match self.rng.randrange(40):
            case 0:
                wishes["lmkv.skip_save"] = True
            case 1:
                wishes["lmkv.skip_load"] = True
            case 2:
                wishes["lmkv.pin"] = 0.2
            case 3:
                wishes["lmkv.prefetch"] = True
            case 4:
                wishes["lmkv.prefetch_tokens"] = self.rng.choice(self.turns).prompt
            case 5:
                wishes["lmkv.tag.team"] = "blue"
        return wishes

    def _abort_some(self) -> None:
        """Abort some requests after a number of steps, and some whose blocks are just being filled."""
        for name, asked in list(self._asked.items()):
            loading = self._is_loading(name)
            if asked.abort_after is not None:
                asked.abort_after -= 1
            due = asked.abort_after is not None and asked.abort_after < 0
            if due or (loading and self.rng.random() < _ABORTED_LOADS):
                self.counts.aborted += 1
                self.counts.aborted_loads += loading
                self._abort(name)

    def _is_loading(self, name: str) -> bool:
        loads = self.running.connector._scheduler.loading.jobs.between_steps
        return any(request == name or request.startswith(f"{name}-") for request in loads)

    def _abort(self, name: str) -> None:
        del self._asked[name]
        self.counts.requests += 1
        self.running.llm.llm_engine.abort_request([name])

    def _forget_at_times(self) -> None:
        """Empty vLLM's own cache, all running requests being preempted for it, or everything."""
        if self.rng.random() < 0.01:
            self.counts.resets += 1
            # vLLM does the half of it and raises when a request holds blocks that are being filled.
            with contextlib.suppress(RuntimeError):
                self.running.scheduler.reset_prefix_cache(
                    reset_running_requests=True, reset_connector=self.rng.random() < 0.1
                )

    # -- answers ------------------------------------------------------------------------------------------

    def _step(self) -> None:
        if not self.running.scheduler.running:
            time.sleep(0.0005)  # the disk's threads want to get on, too
        for output in self.running.llm.llm_engine.step():
            if output.finished and output.request_id in self._asked:
                self._compare(output, self._asked.pop(output.request_id).turn)
        self.counts.steps += 1
        self.alive()
        now = time.monotonic()
        for name in [name for name, asked in self._asked.items() if now - asked.since > PATIENCE]:
            self.counts.hang(f"request {name} has not ended after {PATIENCE:.0f} s")
            self._abort(name)

    def _compare(self, output: Any, turn: Turn) -> None:
        self.counts.requests += 1
        answer = output.outputs[0]
        hit = int((output.kv_transfer_params or {}).get("lmkv", {}).get("hit_tokens", 0))
        self.counts.external_hit_tokens += hit
        where = f"{output.request_id}, {len(turn.prompt)} tokens, {hit} loaded"
        if list(answer.token_ids) != turn.answer:
            self.counts.differ(f"{where}: {list(answer.token_ids)} instead of {turn.answer}")
            return
        pairs = zip(answer.token_ids, answer.logprobs, turn.logprobs, strict=True)
        distance = max(abs(likely[token].logprob - before) for token, likely, before in pairs)
        if distance > CLOSE_ENOUGH:
            self.counts.differ(f"{where}: a log-probability is off by {distance:.4f}")

    # -- the end ------------------------------------------------------------------------------------------

    def _wind_down(self) -> None:
        """Ask nothing more: every slot and block must come back by itself."""
        core = self.running.llm.llm_engine.engine_core
        scheduler, deadline = self.running.scheduler, time.monotonic() + PATIENCE
        while scheduler.has_requests() or self.running.connector._scheduler.busy:
            if time.monotonic() > deadline:
                self.counts.hang("copies or aborted requests never came to an end")
                break
            core.get_output()
            self.alive()
            time.sleep(0.001)
        core.get_output()
        if not self.running.store.drain(PATIENCE):
            self.counts.hang("I/O never came to an end")
        self._wait_for_pins()
        self._look_for_leaks()

    def _wait_for_pins(self) -> None:
        """Wait until pinned and prefetched chunks are released, when their time is over."""
        store, deadline = self.running.store, time.monotonic() + PATIENCE
        while any((store.stats().pinned, store.stats().leased)) and time.monotonic() < deadline:
            self.alive()
            time.sleep(0.05)
            store.reserve(())

    def _look_for_leaks(self) -> None:
        store, scheduler = self.running.store, self.running.scheduler
        stats, pool = store.stats(), scheduler.kv_cache_manager.block_pool
        for name in ("leased", "pinned", "writing", "loading", "pending_io"):
            if getattr(stats, name):
                self.counts.leak(f"{getattr(stats, name)} chunks {name}")
        slots = store.slab.num_slots - store.slab.free_slots - stats.primary.chunks - stats.primary.states
        if slots:
            self.counts.leak(f"{slots} slots are neither free nor in use")
        blocks = pool.num_gpu_blocks - 1 - pool.get_num_free_blocks()
        if blocks:
            self.counts.leak(f"{blocks} of vLLM's blocks are not free")
        if scheduler.requests or self.running.connector._scheduler._requests:
            self.counts.leak("requests are still known")
        for tier in stats.tiers:
            if tier.capacity_bytes is not None and tier.used_bytes > tier.capacity_bytes:
                self.counts.leak(f"{tier.name} takes {tier.used_bytes} of {tier.capacity_bytes} bytes")

    def _count_evictions(self) -> None:
        self.counts.evictions += sum(tier.evictions for tier in self.running.store.stats().tiers)
