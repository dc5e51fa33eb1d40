"""Offload KV cache to host memory: the same prompts in two runs, timed.

    python examples/cpu_offloading.py                  # a small model with random weights, made on the spot
    python examples/cpu_offloading.py --without-lmkv   # the same without lmkv, for comparison
    python examples/cpu_offloading.py --model Qwen/Qwen3-8B --prompt-tokens 10000

vLLM's own prefix cache is off: what the second run does not compute comes from lmkv.
"""

from __future__ import annotations

import argparse
import random
import tempfile
import time
from pathlib import Path
from typing import Any

from vllm import LLM, SamplingParams, TokensPrompt
from vllm.config import KVTransferConfig

from lmkv.cli.model import SmallModel

SMALL = SmallModel()


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--num-prompts", type=int, default=10)
    parser.add_argument("--prompt-tokens", type=int, default=2000, help="tokens of each prompt")
    parser.add_argument("--max-tokens", type=int, default=1, help="tokens to generate for each prompt")
    parser.add_argument("--max-local-cpu-size", type=float, default=5.0, help="host memory for lmkv, GB")
    parser.add_argument("--without-lmkv", action="store_true")
    parser.add_argument("--model", help="any that vLLM serves; default: a small one with random weights")
    return parser.parse_args()


def build_llm(args: argparse.Namespace, model: str, **options: Any) -> LLM:
    if not args.without_lmkv:
        options["kv_transfer_config"] = KVTransferConfig(
            kv_connector="LMKVConnector",
            kv_role="kv_both",
            kv_load_failure_policy="recompute",
            kv_connector_extra_config={"max_local_cpu_size": args.max_local_cpu_size},
        )
    return LLM(model=model, max_model_len=args.prompt_tokens + args.max_tokens, enable_prefix_caching=False, **options)


def small_model(folder: str, args: argparse.Namespace) -> dict[str, Any]:
    """Write the model into `folder`; returns the engine options that suit it: KV space for four prompts."""
    SMALL.write(Path(folder))
    SMALL.write_tokenizer(Path(folder))
    tokens = 4 * (args.prompt_tokens + args.max_tokens + 256)
    return {"dtype": SMALL.dtype, "kv_cache_memory_bytes": tokens * SMALL.kv_bytes_per_token, "enforce_eager": True}


def create_prompts(llm: LLM, args: argparse.Namespace) -> list[TokensPrompt]:
    """Different random tokens for each prompt, so that none of them shares a prefix with another."""
    vocabulary = range(llm.model_config.get_vocab_size())
    return [
        TokensPrompt(prompt_token_ids=random.Random(number).choices(vocabulary, k=args.prompt_tokens))
        for number in range(args.num_prompts)
    ]


def timed_run(name: str, llm: LLM, prompts: list[TokensPrompt], max_tokens: int) -> float:
    params = SamplingParams(temperature=0, max_tokens=max_tokens, ignore_eos=True, detokenize=False)
    started = time.perf_counter()
    outputs = llm.generate(prompts, params, use_tqdm=False)
    seconds = time.perf_counter() - started
    cached = sum(output.num_cached_tokens or 0 for output in outputs)
    total = sum(len(prompt["prompt_token_ids"]) for prompt in prompts)
    print(f"{name} run: {seconds:.2f} s, {cached:,} of {total:,} prompt tokens not computed")
    return seconds


def main() -> None:
    args = arguments()
    with tempfile.TemporaryDirectory(prefix="lmkv-example-") as folder:
        llm = build_llm(args, args.model or folder, **({} if args.model else small_model(folder, args)))
        prompts = create_prompts(llm, args)
        first = timed_run("First", llm, prompts, args.max_tokens)
        second = timed_run("Second", llm, prompts, args.max_tokens)
    print(f"Speedup (first run / second run): {first / second:.2f}")


if __name__ == "__main__":
    main()
