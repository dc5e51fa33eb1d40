"""Offload KV cache to host memory: the same prompts in two runs, timed.

    python examples/cpu_offloading.py                  # vLLM alone
    python examples/cpu_offloading.py --enable-lmkv    # what the first run computes, the second one loads

The model is the largest Qwen3 of three that the GPU has room for; without a GPU a small one with random
weights, made on the spot. vLLM's own prefix cache is off: what the second run does not compute comes from lmkv.
"""

from __future__ import annotations

import argparse
import os
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import torch
from vllm import LLM, SamplingParams
from vllm.config import KVTransferConfig

from lmkv.cli.small_model import SmallModel

GIB = 2**30
SMALL = SmallModel(vocab=2048)
QWEN_BYTES = 1.5 * GIB / 10_000
"""KV of one token of Qwen3-8B, with a margin for chunks that are not full; the other two need less."""
MAX_MODEL_LEN = 16_384


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--num-prompts", type=int, default=10)
    parser.add_argument("--num-tokens", type=int, default=10_000, help="about how many tokens each prompt has")
    parser.add_argument("--enable-lmkv", action="store_true")
    parser.add_argument("--model", help="model in place of the one that suits the GPU")
    parser.add_argument("--gpu-memory", type=float, help="GiB of the GPU to use; default: nine tenths of it")
    return parser.parse_args()


def create_prompts(number: int, tokens: int) -> list[str]:
    """Prompts that differ at their beginning, so that none shares a prefix with another."""
    return [f"[Prompt {index}] {'Hi ' * tokens} how are you?" for index in range(number)]


def model_that_fits(memory_gib: float, capability: tuple[int, int]) -> tuple[str, dict[str, Any]]:
    """Name and engine options of a model for a GPU of this memory and compute capability."""
    if memory_gib >= 36:
        return "Qwen/Qwen3-8B", {}
    if memory_gib >= 20 and capability >= (8, 9):  # it computes in FP8
        return "Qwen/Qwen3-8B-FP8", {"kv_cache_dtype": "fp8"}
    if memory_gib >= 10:
        return "Qwen/Qwen3-1.7B", {}
    sys.exit(f"The GPU has {memory_gib:.1f} GiB, Qwen/Qwen3-1.7B needs 10: name a smaller one with --model")


def on_gpu(args: argparse.Namespace) -> dict[str, Any]:
    """Engine options."""
    total_gib = torch.cuda.get_device_properties(0).total_memory / GIB
    name, options = (args.model, {}) if args.model else model_that_fits(total_gib, torch.cuda.get_device_capability(0))
    share = args.gpu_memory / total_gib if args.gpu_memory else 0.9
    return {"model": name, "gpu_memory_utilization": share, **options}


def on_cpu(args: argparse.Namespace, prompts: list[str], folder: Path) -> dict[str, Any]:
    """Engine options; KV space for four prompts. Without --model one is written, with tokens for these prompts."""
    if not args.model:
        SMALL.write(folder)
        SMALL.write_tokenizer(folder, prompts)
    tokens = max(4 * args.num_tokens, max_model_len(args)) + 1024
    options = {"dtype": SMALL.dtype, "kv_cache_memory_bytes": tokens * SMALL.kv_bytes_per_token, "enforce_eager": True}
    return {"model": args.model or str(folder), **options}


def max_model_len(args: argparse.Namespace) -> int:
    return max(MAX_MODEL_LEN, args.num_tokens + 256)


def host_memory_gib(args: argparse.Namespace, bytes_per_token: float) -> float:
    """Host memory for all prompts, but at most half of the machine's memory, and at least 1 GiB.

    lmkv itself cuts this to what is available. It pins the memory through the GPU's driver, for which the limit
    of locked memory (`ulimit -l`) does not count.
    """
    wanted = args.num_prompts * args.num_tokens * bytes_per_token
    memory = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    return max(min(wanted, memory / 2) / GIB, 1.0)


def lmkv(args: argparse.Namespace, bytes_per_token: float) -> KVTransferConfig | None:
    if not args.enable_lmkv:
        return None
    return KVTransferConfig(
        kv_connector="LMKVConnector",
        kv_role="kv_both",
        kv_load_failure_policy="recompute",
        kv_connector_extra_config={"max_local_cpu_size": host_memory_gib(args, bytes_per_token)},
    )


def timed_run(name: str, llm: LLM, prompts: list[str]) -> tuple[float, list[str]]:
    """Seconds, and the generated texts."""
    started = time.perf_counter()
    outputs = llm.generate(prompts, SamplingParams(temperature=0, max_tokens=1), use_tqdm=False)
    seconds = time.perf_counter() - started
    cached = sum(output.num_cached_tokens or 0 for output in outputs)
    total = sum(len(output.prompt_token_ids or []) for output in outputs)
    print(f"{name} run: {seconds:.2f} s, {cached:,} of {total:,} prompt tokens not computed")
    return seconds, [output.outputs[0].text for output in outputs]


def main() -> None:
    args = arguments()
    prompts = create_prompts(args.num_prompts, args.num_tokens)
    gpu = torch.cuda.is_available()
    with tempfile.TemporaryDirectory(prefix="lmkv-example-") as folder:
        llm = LLM(
            max_model_len=max_model_len(args),
            enable_prefix_caching=False,
            kv_transfer_config=lmkv(args, QWEN_BYTES if gpu else 1.1 * SMALL.kv_bytes_per_token),
            **(on_gpu(args) if gpu else on_cpu(args, prompts, Path(folder))),
        )
        first, generated = timed_run("First", llm, prompts)
        second, again = timed_run("Second", llm, prompts)
    print(f"Speedup (first run / second run): {first / second:.2f}x")
    print(f"Outputs are equal: {'yes' if generated == again else 'no'}")


# vLLM may start its processes by importing this file again.
if __name__ == "__main__":
    main()
