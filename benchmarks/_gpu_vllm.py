"""Real vLLM on the GPU, with a model of random weights, with or without a KV connector: speeds, and equal outputs.

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
from collections.abc import Sequence
from importlib.metadata import entry_points
from typing import TYPE_CHECKING, Any

from lmkv.cli.measure.engines import CONNECTOR, CONNECTOR_MODULE, ENVIRONMENT, ONE_PROCESS, VOCABULARY
from lmkv.cli.measure.small_model import SmallModel

if TYPE_CHECKING:
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


def generate(llm: LLM, prompts: Sequence[Prompt]) -> tuple[float, list[list[int]], int]:
    """Seconds, the output of each prompt, and the tokens that did not have to be computed."""
    started = time.perf_counter()
    outputs = llm.generate(list(prompts), _sampling(), use_tqdm=False)
    seconds = time.perf_counter() - started
    return (
        seconds,
        [list(found.outputs[0].token_ids) for found in outputs],
        sum(found.num_cached_tokens or 0 for found in outputs),
    )


def _sampling() -> Any:
    from vllm import SamplingParams

    return SamplingParams(temperature=0, max_tokens=OUTPUT_TOKENS, ignore_eos=True, detokenize=False)


def abort_some(llm: LLM, prompts: Sequence[Prompt], expected: list[list[int]]) -> int:
    """Ask for all prompts and abort half of them some steps later; how many of the others came out wrong."""
    engine, wrong = llm.llm_engine, 0
    for turn in range(ABORTS):
        llm.reset_prefix_cache()
        for number, prompt in enumerate(prompts):
            engine.add_request(f"{turn}-{number}", prompt, _sampling())
        for _ in range(turn):
            engine.step()
        engine.abort_request([f"{turn}-{number}" for number in range(0, len(prompts), 2)])
        while engine.has_unfinished_requests():
            for output in engine.step():
                number = int(output.request_id.partition("-")[2].partition("-")[0])
                if output.finished and number % 2:
                    wrong += list(output.outputs[0].token_ids) != expected[number]
    return wrong


def measure(llm: LLM, options: argparse.Namespace) -> dict[str, Any]:
    chooser = random.Random(1)
    prompts = [{"prompt_token_ids": chooser.choices(range(VOCABULARY), k=options.tokens)} for _ in range(PROMPTS)]
    others = [{"prompt_token_ids": chooser.choices(range(VOCABULARY), k=options.tokens)} for _ in range(PROMPTS)]
    generate(llm, others)
    cold, outputs, _ = generate(llm, prompts)
    # The stores have ended by the end of the next requests.
    generate(llm, [{"prompt_token_ids": chooser.choices(range(VOCABULARY), k=64)}])
    llm.reset_prefix_cache()
    warm, again, hits = generate(llm, prompts)
    inside, third, _ = generate(llm, prompts)
    found: dict[str, Any] = {
        "cold seconds": round(cold, 4),
        "seconds after vLLM's prefix cache was reset": round(warm, 4),
        "seconds from vLLM's prefix cache": round(inside, 4),
        "hit tokens": hits,
        "outputs are equal": outputs == again == third,
    }
    if options.aborts:
        found["wrong outputs beside aborts"] = abort_some(llm, prompts, outputs)
    return found


def main() -> int:
    options = arguments()
    for name, value in (ENVIRONMENT | ONE_PROCESS).items():
        os.environ.setdefault(name, value)
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
