"""Run by test_multiprocess: an offline `LLM` in vLLM's default mode, whose engine has its own processes.

    python offline_script.py MODEL RESULT [stay]

Writes the outputs to RESULT. With `stay` it then waits to be killed.
"""

from __future__ import annotations

import json
import os
import signal
import sys
from pathlib import Path
from typing import Any

from tests.vllm.harness import BLOCK, prompt

LENGTH = 1500


def main(model: str, result: str, stay: bool) -> None:
    from vllm import LLM, SamplingParams, TokensPrompt
    from vllm.config import KVTransferConfig

    llm = LLM(
        model=model,
        dtype="float32",
        enforce_eager=True,
        max_model_len=2048,
        kv_cache_memory_bytes=17 << 20,
        block_size=BLOCK,
        kv_transfer_config=KVTransferConfig(
            kv_connector="LMKVConnector",
            kv_role="kv_both",
            kv_load_failure_policy="recompute",
            kv_connector_extra_config={"max_local_cpu_size": 0.25},
        ),
    )
    params = SamplingParams(
        temperature=0,
        max_tokens=8,
        ignore_eos=True,
        detokenize=False,
        extra_args={"kv_transfer_params": {"lmkv.report": True}},
    )

    def ask(seed: int) -> dict[str, Any]:
        tokens = TokensPrompt(prompt_token_ids=prompt(seed, LENGTH))
        [output] = llm.generate(tokens, params, use_tqdm=False)
        report = (output.kv_transfer_params or {})["lmkv"]
        return {"ids": list(output.outputs[0].token_ids), "hit": report["hit_tokens"]}

    answers = {"cold": ask(70), "others": [ask(71), ask(72), ask(73)], "warm": ask(70), "main": os.getpid()}
    # vLLM reads the signatures of what it calls for a client.
    answers["workers"] = llm.collective_rpc("check_health")
    answers["reset"] = llm.reset_prefix_cache(reset_connector=True)
    answers["emptied"] = ask(70)
    unfinished = Path(f"{result}.tmp")
    unfinished.write_text(json.dumps(answers))
    unfinished.rename(result)
    while stay:
        signal.pause()


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2], "stay" in sys.argv[3:])
