"""Offline inference with lmkv: the same prompt twice.

python examples/offline.py                                          # Qwen/Qwen3-8B

lmkv model small-model --text examples/offline.py                   # without a GPU or a download
python examples/offline.py small-model
"""

import os
import sys

from vllm import LLM, SamplingParams
from vllm.config import KVTransferConfig

os.environ["LMKV_CHUNK_SIZE"] = "256"  # tokens
os.environ["LMKV_LOCAL_CPU"] = "true"
os.environ["LMKV_MAX_LOCAL_CPU_SIZE"] = "5.0"  # GiB


def main() -> None:
    llm = LLM(
        model=sys.argv[1] if len(sys.argv) > 1 else "Qwen/Qwen3-8B",
        max_model_len=8000,
        gpu_memory_utilization=0.8,
        enable_prefix_caching=False,  # vLLM's own, so that lmkv is seen alone
        kv_transfer_config=KVTransferConfig(
            kv_connector="LMKVConnector", kv_role="kv_both", kv_load_failure_policy="recompute"
        ),
    )
    prompt = "Hello, how are you?" * 1000 + "Hello, my name is"
    for _ in range(2):
        [output] = llm.generate(prompt, SamplingParams(temperature=0, max_tokens=10), use_tqdm=False)
        tokens = len(output.prompt_token_ids or [])
        print(f"Generated text: {output.outputs[0].text!r}")
        print(f"{output.num_cached_tokens} of {tokens} prompt tokens not computed")


# vLLM may start its processes by importing this file again. lmkv is closed with the engine.
if __name__ == "__main__":
    main()
