"""Real vLLM on the GPU, with a model of random weights, with or without a KV connector: speeds, and equal bytes.

Run by gpu_first_run.py, each time in a process of its own. Prints a JSON object on the last line.
"""

from __future__ import annotations

import sys
from pathlib import Path

# Not this folder: its copy.py would stand in for the standard library's.
sys.path[0] = str(Path(__file__).resolve().parents[1])

import argparse
import json
import os
import random
import tempfile
import time
from collections import Counter
from collections.abc import Sequence
from importlib.metadata import entry_points
from typing import TYPE_CHECKING, Any

from attrs import define, field

from benchmarks._gpu_engines import forget
from lmkv.cli.measure.small_model import SmallModel
from lmkv.cli.measure.vllm_engines import CONNECTOR, CONNECTOR_MODULE, ENVIRONMENT, ONE_PROCESS, VOCABULARY

if TYPE_CHECKING:
    import torch
    from vllm import LLM

PROMPTS, OUTPUT_TOKENS, ABORTS = 4, 16, 6

Prompt = dict[str, list[int]]


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--connector", help="its name; none by default")
    parser.add_argument("--settings", type=json.loads, default={}, help="kv_connector_extra_config, as JSON")
    parser.add_argument("--backend", help="vLLM's attention backend")
    parser.add_argument("--graphs", action="store_true", help="with CUDA graphs")
    parser.add_argument("--layers", type=int, default=18, help="so that no power of two divides a chunk")
    parser.add_argument("--tokens", type=int, default=8192, help="of a prompt")
    parser.add_argument("--aborts", action="store_true", help="abort requests in the middle of their loads, as well")
    parser.add_argument("--batch-invariant", action="store_true", help="kernels that round alike in every batch")
    parser.add_argument("--small", action="store_true", help="a model for a CPU")
    return parser.parse_args()


def model_of(options: argparse.Namespace) -> SmallModel:
    if options.small:
        return SmallModel(layers=2, hidden=64, heads=2, kv_heads=1, max_position=2048)
    return SmallModel(
        layers=options.layers, hidden=1024, heads=8, kv_heads=8, dtype="bfloat16", max_position=2 * options.tokens
    )


def open_llm(options: argparse.Namespace, folder: Path) -> LLM:
    from vllm import LLM
    from vllm.config import KVTransferConfig

    model = model_of(options)
    model.write(folder / "model")
    by_name = options.connector != CONNECTOR or entry_points(group="vllm.general_plugins", name="lmkv")
    transfer = options.connector and KVTransferConfig(
        kv_connector=options.connector,
        kv_role="kv_both",
        kv_load_failure_policy="recompute",
        kv_connector_extra_config=options.settings,
        kv_connector_module_path=None if by_name else CONNECTOR_MODULE,
    )
    memory: dict[str, Any] = {"kv_cache_memory_bytes": 64 << 20} if options.small else {"gpu_memory_utilization": 0.3}
    backend = {"attention_backend": options.backend} if options.backend else {}
    return LLM(
        model=str(folder / "model"),
        dtype=model.dtype,
        skip_tokenizer_init=True,
        max_model_len=options.tokens + 2 * OUTPUT_TOKENS,
        enforce_eager=not options.graphs,
        enable_prefix_caching=True,
        kv_transfer_config=transfer or None,
        **memory,
        **backend,
    )


@define(eq=False)
class Watched:
    """A request while it runs. `loaded`: leading tokens from the connector. `kv`: their bytes, block by block."""

    prompt: int
    loaded: int = 0
    kv: list[torch.Tensor] = field(factory=list)
    output: list[int] = field(factory=list)


class Engine:
    """An engine in this process: what it answers, what its connector loads, and the KV that it computes with."""

    def __init__(self, llm: LLM, *, is_lmkv: bool) -> None:
        self.llm, self.engine = llm, llm.llm_engine
        self.is_lmkv, self.turn = is_lmkv, 0
        self.scheduler: Any = llm.llm_engine.engine_core.engine_core.scheduler  # type: ignore[attr-defined]
        self.loaded: dict[str, int] = {}
        """Tokens from the connector, by vLLM's id of a request: what vLLM's own cache has is not in it."""
        if self.scheduler.connector is not None:
            self._count_loads(self.scheduler.connector)

    def _count_loads(self, connector: Any) -> None:
        allocated = connector.update_state_after_alloc

        def counted(request: Any, blocks: Any, tokens: int) -> Any:
            if tokens:
                self.loaded[request.request_id] = tokens
            return allocated(request, blocks, tokens)

        connector.update_state_after_alloc = counted

    def forget(self) -> None:
        """Empty vLLM's own prefix cache, so that hits can only come from the connector. Raises RuntimeError."""
        # An engine in this process gets on only while it answers.
        forget(self.llm, lambda: self.generate([{"prompt_token_ids": [1, 2, 3]}]))

    def generate(self, prompts: Sequence[Prompt]) -> tuple[float, list[list[int]], Counter[str]]:
        """Seconds, the output of each prompt, and the tokens that the connector loaded: all, and by tier."""
        before = sum(self.loaded.values())
        started = time.perf_counter()
        outputs = self.llm.generate(list(prompts), _sampling(), use_tqdm=False)
        seconds = time.perf_counter() - started
        loaded = Counter({"all": sum(self.loaded.values()) - before})
        for found in outputs:
            loaded.update(((found.kv_transfer_params or {}).get("lmkv") or {}).get("sources") or {})
        return seconds, [list(found.outputs[0].token_ids) for found in outputs], loaded

    def watch(self, prompts: Sequence[Prompt], *, abort_after: int | None = None) -> list[Watched]:
        """Ask for all prompts, and for those that end see what they compute with once their first token is there.

        `abort_after`: so many steps later every other request is aborted.
        """
        self.turn += 1
        running = {f"t{self.turn}p{number}x": Watched(number) for number in range(len(prompts))}
        for name, watched in running.items():
            self.engine.add_request(name, prompts[watched.prompt], _sampling())
        ended, steps = list[Watched](), 0
        while self.engine.has_unfinished_requests():
            if steps == abort_after:
                aborted = [name for name, watched in running.items() if not watched.prompt % 2]
                self.engine.abort_request(aborted)
                running = {name: watched for name, watched in running.items() if name not in aborted}
            steps += 1
            for output in self.engine.step():
                watched = running.get(output.request_id)
                if watched is None:
                    continue
                if not watched.kv:
                    self._look(output.request_id, watched)
                if output.finished:
                    watched.output = list(output.outputs[0].token_ids)
                    ended.append(watched)
        return ended

    def _look(self, name: str, watched: Watched) -> None:
        """Note the bytes of all full blocks of its prompt."""
        # vLLM adds to the ids that it is given.
        theirs = next((each for each in self.scheduler.requests if each.startswith(name)), None)
        if not self.is_lmkv or theirs is None:
            return
        from vllm.distributed.kv_transfer import get_kv_transfer_group

        worker: Any = get_kv_transfer_group()
        rows = worker._worker._memory.rows
        request, size = self.scheduler.requests[theirs], self.scheduler.block_size
        watched.loaded = self.loaded.get(theirs, 0) // size * size
        blocks = self.scheduler.kv_cache_manager.get_block_ids(theirs)[0][: request.num_prompt_tokens // size]
        watched.kv = [row[blocks].cpu() for row in rows]


def _sampling() -> Any:
    from vllm import SamplingParams

    extra = {"kv_transfer_params": {"lmkv.report": True}}
    return SamplingParams(temperature=0, max_tokens=OUTPUT_TOKENS, ignore_eos=True, detokenize=False, extra_args=extra)


def compare(expected: Sequence[Watched], found: Sequence[Watched], block_size: int) -> dict[str, Any]:
    """Compare loaded blocks byte for byte, and outputs, which may differ: batches of other shapes round differently."""
    blocks = wrong = outputs = 0
    for each in found:
        other = expected[each.prompt]
        count = each.loaded // block_size
        blocks += count
        for mine, theirs in zip(each.kv, other.kv, strict=False):
            wrong += int((mine[:count] != theirs[:count]).any(dim=1).sum())
        outputs += each.output != other.output
    return {"blocks loaded": blocks, "blocks with wrong bytes": wrong, "outputs that differ": outputs}


def check_bytes(engine: Engine, prompts: Sequence[Prompt], *, aborts: bool) -> dict[str, Any]:
    """Whether blocks have the bytes that were stored of them; with aborts, of the requests beside the aborted."""
    engine.forget()
    expected = sorted(engine.watch(prompts), key=lambda watched: watched.prompt)
    engine.generate([{"prompt_token_ids": [4, 5, 6]}])
    engine.forget()
    found = {"": compare(expected, engine.watch(prompts), engine.scheduler.block_size)}
    if aborts:
        beside: Counter[str] = Counter()
        for turn in range(ABORTS):
            engine.forget()
            beside.update(compare(expected, engine.watch(prompts, abort_after=turn), engine.scheduler.block_size))
        found["beside aborts: "] = dict(beside)
    return {f"{kind}{name}": value for kind, facts in found.items() for name, value in facts.items()}


def measure(llm: LLM, options: argparse.Namespace) -> dict[str, Any]:
    chooser = random.Random(1)
    prompts, others, third = (
        [{"prompt_token_ids": chooser.choices(range(VOCABULARY), k=options.tokens)} for _ in range(PROMPTS)]
        for _ in range(3)
    )
    engine = Engine(llm, is_lmkv=options.connector == CONNECTOR)
    engine.generate(others)
    cold, outputs, _ = engine.generate(prompts)
    # The stores have ended by the end of the next requests.
    engine.generate([{"prompt_token_ids": chooser.choices(range(VOCABULARY), k=64)}])
    engine.forget()
    warm, again, loaded = engine.generate(prompts)
    inside, last, _ = engine.generate(prompts)
    tiers = {f"tokens from {name}": tokens for name, tokens in loaded.items() if name != "all"}
    return {
        "cold seconds": round(cold, 4),
        "seconds after vLLM's prefix cache was reset": round(warm, 4),
        "seconds from vLLM's prefix cache": round(inside, 4),
        "loaded tokens": loaded["all"],
        **tiers,
        "batches compute alike": options.batch_invariant,
        "outputs are equal": outputs == again == last,
        **check_bytes(engine, third, aborts=options.aborts),
    }


def main() -> int:
    options = arguments()
    for name, value in (ENVIRONMENT | ONE_PROCESS).items():
        os.environ.setdefault(name, value)
    if options.batch_invariant:
        os.environ["VLLM_BATCH_INVARIANT"] = "1"
    with tempfile.TemporaryDirectory(prefix="lmkv-gpu-") as name:
        if "local_disk" in options.settings:
            options.settings["local_disk"] = str(Path(name) / "kv")
        started = time.perf_counter()
        llm = open_llm(options, Path(name))
        found = {"seconds to start": round(time.perf_counter() - started, 1), **measure(llm, options)}
        llm.llm_engine.engine_core.shutdown()
    print(json.dumps(found), flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
