"""The cost of a start: import, time to the first store with a 4 GiB tier, and the identity of the weights.

    python -m benchmarks.start [--quick] [--json] [--write FILE]
    python -m benchmarks.start --weights 32 [--json] [--write FILE]

Each sample is a new process, which imports torch and numpy before the clock starts. Times are compared with the time of
numpy's import in the same process.

`--weights`: vLLM's start and first tokens with a model of Llama's 8B shape. The number is its number of layers. vLLM
makes random weights in bfloat16: 16 GB with 32 layers. vLLM runs without lmkv's plug-in, with the plug-in alone, and
with the connector. The machine needs memory for the weights, and 4 GB more.
"""

from __future__ import annotations

import json
import os
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from benchmarks.rounds import ROOT, Row, arguments, compared, finish
from lmkv.cli.engines import ENVIRONMENT, ONE_PROCESS

IMPORT_TARGET, READY_TARGET, MOST_MIB, MOST_MODULES = 1.0, 0.5, 12.0, 120.0
NUMPY = "numpy's import"
IMPORT = """
import gc, json, sys, time
cpu = time.process_time()
import numpy
bare = time.process_time() - cpu
import torch
gc.freeze()  # a collection over all of torch's objects, which may or may not come now, costs more than lmkv
def rss():
    with open("/proc/self/statm") as file:
        return int(file.read().split()[1]) * 4096
modules, memory, cpu = len(sys.modules), rss(), time.process_time()
from lmkv import Config, Engine
print(json.dumps([bare, time.process_time() - cpu, (rss() - memory) / 2**20, len(sys.modules) - modules]))
"""
READY = """
import json, time
start = time.perf_counter()
import numpy
bare = time.perf_counter() - start
import torch
from lmkv import Config, Engine
tensors = [torch.zeros((64, 2, 16, 64)) for _ in range(4)]
config = Config.load(max_local_cpu_size=4.0, chunk_size=256, env={})
start = time.perf_counter()
engine = Engine.open(tensors, block_size=16, model="startup", config=config)
ready = time.perf_counter() - start
stored = engine.store(list(range(256)), list(range(16)))
first = time.perf_counter() - start
assert stored == 256
print(json.dumps([bare, ready, first]))
engine.close()
"""
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
WEIGHTS = """
import json, sys, time
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
options = {"kv_transfer_config": transfer} if sys.argv[2] == "connector" else {}
started = time.perf_counter()
llm = LLM(
    model=sys.argv[1], dtype="bfloat16", load_format="dummy", enforce_eager=True, max_model_len=1024, block_size=32,
    seed=0, kv_cache_memory_bytes=256 << 20, skip_tokenizer_init=True, max_num_batched_tokens=1024, **options,
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


def sample(script: str, *words: str, **env: str) -> Any:
    command, given = [sys.executable, "-c", script, *words], {**os.environ, "PYTHONPATH": str(ROOT), **env}
    done = subprocess.run(command, cwd=ROOT, stdout=subprocess.PIPE, text=True, check=True, env=given)
    return json.loads(done.stdout.splitlines()[-1])


def starts(count: int) -> Iterator[Row]:
    bare, took, memory, modules = zip(*(sample(IMPORT) for _ in range(count)), strict=True)
    shown = {NUMPY: bare, "import after torch and numpy": took}
    yield from compared("CPU time", "s", shown, NUMPY, {"import after torch and numpy": IMPORT_TARGET})
    for name, values, unit, most in (("memory", memory, "MiB", MOST_MIB), ("modules", modules, "", MOST_MODULES)):
        value = statistics.median(values)
        yield Row(f"import after torch and numpy, {name}", value, unit, target=most, met=value <= most)
    bare, ready, first = zip(*(sample(READY) for _ in range(count)), strict=True)
    shown = {NUMPY: bare, "ready to serve with a 4 GiB tier": ready, "first chunk stored": first}
    yield from compared("time", "s", shown, NUMPY, {"ready to serve with a 4 GiB tier": READY_TARGET})


def weights(layers: int) -> Iterator[Row]:
    with tempfile.TemporaryDirectory() as folder:
        Path(folder, "config.json").write_text(json.dumps({**SHAPE, "num_hidden_layers": layers}))
        for name, arm in ARMS.items():
            plugin, _, connector = arm.partition(" ")
            env = {**ENVIRONMENT, **ONE_PROCESS, "VLLM_PLUGINS": plugin or "none"}
            for what, value in sample(WEIGHTS, folder, connector, **env).items():
                yield Row(f"{name}: {what}", value, "s")


def main() -> int:
    parser = arguments(__doc__, quick="three samples instead of nine")
    parser.add_argument("--weights", type=int, metavar="LAYERS")
    options = parser.parse_args()
    return finish(weights(options.weights) if options.weights else starts(3 if options.quick else 9), options)


if __name__ == "__main__":
    sys.exit(main())
