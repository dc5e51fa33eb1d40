"""The cost of the weights' identity: starts and first tokens of an 8B shape on a CPU.

    python benchmarks/identity.py [--layers 32] [--json]

Llama's shape with random weights in bfloat16, which vLLM makes itself: 16 GB with 32 layers. Each start is a fresh
process: without lmkv's plug-in, with the plug-in alone, and with the connector. Needs as much memory as the weights,
and 4 GB.
"""

from __future__ import annotations

import sys
from pathlib import Path

# Not this folder: its copy.py would stand in for the standard library's.
sys.path[0] = str(Path(__file__).resolve().parents[1])

import json
import os
import subprocess
import tempfile
from typing import Any

from benchmarks._timing import Row, arguments_of, finish

ROOT = Path(__file__).resolve().parents[1]
ARMS = {"without the plug-in": "", "with the plug-in alone": "lmkv", "with the connector": "lmkv connector"}
SHAPE = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "hidden_size": 4096,
    "intermediate_size": 14336,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "vocab_size": 128256,
    "max_position_embeddings": 8192,
    "rms_norm_eps": 1e-5,
    "torch_dtype": "bfloat16",
    "bos_token_id": 0,
    "eos_token_id": 1,
}
ONE_START = """
import json, sys, time
model, connector = sys.argv[1], sys.argv[2] == "connector"
from vllm import LLM, SamplingParams
from vllm.config import KVTransferConfig
from lmkv.vllm import loaded

spent, digest = 0.0, loaded._digest
def timed(tensor):
    global spent
    started = time.perf_counter()
    try:
        return digest(tensor)
    finally:
        spent += time.perf_counter() - started
loaded._digest = timed

given = {"max_local_cpu_size": 0.5}
transfer = KVTransferConfig(kv_connector="LMKVConnector", kv_role="kv_both", kv_connector_extra_config=given)
options = {"kv_transfer_config": transfer} if connector else {}
started = time.perf_counter()
llm = LLM(
    model=model, dtype="bfloat16", load_format="dummy", enforce_eager=True, max_model_len=1024, block_size=32, seed=0,
    kv_cache_memory_bytes=256 << 20, skip_tokenizer_init=True, max_num_batched_tokens=1024, **options,
)
found = {"start": time.perf_counter() - started, "digests of the start": spent}
params = SamplingParams(temperature=0, max_tokens=1, ignore_eos=True, detokenize=False)
def first_token(seed):
    global spent
    spent, started = 0.0, time.perf_counter()
    llm.generate([{"prompt_token_ids": [(7 * i + seed) % 1000 + 5 for i in range(64)]}], params, use_tqdm=False)
    return time.perf_counter() - started
first_token(0)
found["first token"], found["digests of the first token"] = first_token(1), spent
llm.reset_prefix_cache()
found["first token after a reset"], found["digests of that"] = first_token(2), spent
print(json.dumps(found), flush=True)
llm.llm_engine.engine_core.shutdown()
"""


def one_start(model: Path, arm: str) -> dict[str, float]:
    plugin, _, connector = arm.partition(" ")
    env = os.environ | {
        "HF_HUB_OFFLINE": "1",
        "VLLM_NO_USAGE_STATS": "1",
        "VLLM_CPU_NUM_OF_RESERVED_CPU": "0",
        "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
        "VLLM_PLUGINS": plugin or "none",
        "PYTHONPATH": str(ROOT),
    }
    command = [sys.executable, "-c", ONE_START, str(model), connector]
    done = subprocess.run(command, cwd=ROOT, env=env, stdout=subprocess.PIPE, text=True, check=True)
    found: dict[str, float] = json.loads(done.stdout.splitlines()[-1])
    return found


def main() -> int:
    parser = arguments_of(__doc__)
    parser.add_argument("--layers", type=int, default=32)
    options = parser.parse_args()
    rows: list[Row] = []
    with tempfile.TemporaryDirectory() as folder:
        config: dict[str, Any] = {**SHAPE, "num_hidden_layers": options.layers}
        Path(folder, "config.json").write_text(json.dumps(config))
        for name, arm in ARMS.items():
            rows += [Row(f"{name}: {what}", value, "s") for what, value in one_start(Path(folder), arm).items()]
    return finish(rows, options.json)


if __name__ == "__main__":
    sys.exit(main())
