"""Ray Serve LLM that offloads KV to host memory.

python examples/ray/offloading.py
python examples/ray/offloading.py --cpu --model small-model    # without a GPU; see docs/ray.md
"""

from __future__ import annotations

import argparse
from typing import Any

from ray import serve
from ray.serve.llm import LLMConfig, build_openai_app

SMALL = {"dtype": "float32", "enforce_eager": True, "enable_prefix_caching": False}
"""Options for a try without a GPU: vLLM's own prefix cache is off, so that all hits come from lmkv."""

KV = {"kv_connector": "LMKVConnector", "kv_role": "kv_both", "kv_load_failure_policy": "recompute"}


def llm_config(model: str, *, cpu: bool) -> LLMConfig:
    return LLMConfig(
        model_loading_config={"model_id": "qwen-0.5b", "model_source": model},
        engine_kwargs={
            "tensor_parallel_size": 1,
            # How many tokens of a prompt were not computed, in each answer.
            "enable_prompt_tokens_details": True,
            "kv_transfer_config": KV,
            **(SMALL if cpu else {}),
        },
        runtime_env={
            "env_vars": {
                "LMKV_LOCAL_CPU": "True",
                "LMKV_CHUNK_SIZE": "256",
                "LMKV_MAX_LOCAL_CPU_SIZE": "1" if cpu else "100",  # GiB
                **({"VLLM_CPU_KVCACHE_SPACE": "1"} if cpu else {}),
            }
        },
        **(without_gpu() if cpu else {}),
    )


def without_gpu() -> dict[str, Any]:
    """Ray gives a replica a GPU unless it is told otherwise."""
    return {"accelerator_config": {"kind": "cpu"}, "placement_group_config": {"bundles": [{"CPU": 1}]}}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="Qwen/Qwen2-0.5B-Instruct")
    parser.add_argument("--cpu", action="store_true", help="no GPU: vLLM's CPU build")
    args = parser.parse_args()
    serve.run(build_openai_app({"llm_configs": [llm_config(args.model, cpu=args.cpu)]}), blocking=True)


if __name__ == "__main__":
    main()
