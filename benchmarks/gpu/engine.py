"""One vLLM engine, with any connector, in a child process that answers batches, conversations and questions.

`python -m benchmarks.gpu.engine FOLDER` runs the child process. It reads lines of JSON, and answers each with one line
of JSON. The first line has the arguments of `vllm.LLM`. The engine runs on a GPU or a CPU.
"""

from __future__ import annotations

import json
import os
import random
import sys
import time
import traceback
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

from lmkv.cli.engines import ENVIRONMENT, MAX_SOCKET_FOLDER, VOCABULARY, ChildFailedError, ChildProcess, Questions

SHAPES = {
    "8B": (36, 4096, 12288, 32, 8, 128),
    "4B": (36, 2560, 9728, 32, 8, 128),
    "1.7B": (28, 2048, 6144, 16, 8, 128),
    "tiny": (2, 128, 256, 2, 1, 64),
}
"""For each of Qwen3's shapes: layers, hidden size, intermediate size, heads, KV heads, and size of a head."""
WORDS = 151_936
"""Number of tokens in the vocabulary of Qwen3's models."""
LOOPBACK = {
    "VLLM_HOST_IP": "127.0.0.1",
    "GLOO_SOCKET_IFNAME": "lo",
    "NCCL_SOCKET_IFNAME": "lo",
    "VLLM_USE_FLASHINFER_SAMPLER": "0",
    "VLLM_ALLOW_INSECURE_SERIALIZATION": "1",
    "VLLM_ENABLE_V1_MULTIPROCESSING": "1",
    "LMCACHE_TRACK_USAGE": "false",
    "PYTHONHASHSEED": "0",
}
Prompt = Sequence[tuple[int, int]]
"""Parts of a prompt, each `(seed, count)`: a number of random tokens, or one repeated token if the count is below 0."""


def kv_bytes_per_token(shape: str, width: int) -> int:
    layers, _, _, _, kv_heads, size = SHAPES[shape]
    return 2 * layers * kv_heads * size * width


def weight_bytes(shape: str) -> int:
    layers, hidden, inner, heads, kv_heads, size = SHAPES[shape]
    return 2 * layers * (hidden * size * (2 * heads + 2 * kv_heads) + 3 * hidden * inner) + 4 * hidden * WORDS


def write_model(folder: Path, shape: str, positions: int, dtype: str) -> str:
    """Write the model's config.json without weights. vLLM's load format `dummy` makes the weights on the GPU."""
    layers, hidden, inner, heads, kv_heads, size = SHAPES[shape]
    folder.mkdir(parents=True, exist_ok=True)
    config = {
        "architectures": ["Qwen3ForCausalLM"],
        "model_type": "qwen3",
        "num_hidden_layers": layers,
        "hidden_size": hidden,
        "intermediate_size": inner,
        "num_attention_heads": heads,
        "num_key_value_heads": kv_heads,
        "head_dim": size,
        "vocab_size": 2048 if shape == "tiny" else WORDS,
        "hidden_act": "silu",
        "max_position_embeddings": positions,
        "rms_norm_eps": 1e-6,
        "rope_theta": 1e6,
        "attention_bias": False,
        "tie_word_embeddings": False,
        "torch_dtype": dtype,
        "bos_token_id": 1,
        "eos_token_id": 2,
    }
    (folder / "config.json").write_text(json.dumps(config))
    return str(folder)


class Engine(ChildProcess):
    """The parent's side of an engine in a child process. `info`: facts of the engine's start. Raises
    ChildFailedError.
    """

    def __init__(self, spec: Mapping[str, Any], folder: Path, env: Mapping[str, str], timeout: float) -> None:
        command = [sys.executable, "-P", "-m", "benchmarks.gpu.engine", str(folder)]
        super().__init__(command, folder, {**ENVIRONMENT, **LOOPBACK, **env})
        try:
            self.info = self.ask(spec, timeout)
        except BaseException:
            self.kill()
            self.close()
            raise

    def ask(self, question: object, timeout: float = 240.0) -> Any:
        answer = super().ask(question, timeout)
        if "error" in answer:
            raise ChildFailedError(answer["error"])
        return answer

    @property
    def ended(self) -> bool:
        return self._child.poll() is not None


# -- in the child -----------------------------------------------------------------------------------------


def tokens_of(parts: Prompt) -> list[int]:
    tokens: list[int] = []
    for seed, count in parts:
        one = random.Random(seed)
        tokens += one.choices(range(VOCABULARY), k=count) if count >= 0 else [seed % VOCABULARY] * -count
    return tokens


def randomize(worker: Any) -> None:
    """Replace vLLM's dummy weights, because answers of dummy weights would not depend on the KV. Called in vLLM's
    worker.

    Attention is narrow, so that an answer depends on a few tokens instead of the mean of all tokens.
    """
    import torch

    generator = None
    for name, parameter in worker.model_runner.model.named_parameters():
        if generator is None:
            generator = torch.Generator(device=parameter.device).manual_seed(0)
        with torch.no_grad():
            if parameter.dim() < 2:
                parameter.fill_(5.0 if "q_norm" in name else 1.0 if "norm" in name else 0.0)
            else:
                scale = 1.0 if "embed" in name else 1.5 / parameter.shape[-1] ** 0.5
                parameter.normal_(0.0, scale, generator=generator)


class Answering:
    """An engine in the child process. Each public method answers the question with the name of the method."""

    def __init__(self, spec: dict[str, Any], folder: Path) -> None:
        started = time.perf_counter()
        from vllm import LLM
        from vllm.config import KVTransferConfig

        imported = time.perf_counter()
        transfer = spec["connector"] and KVTransferConfig(kv_role="kv_both", **spec["connector"])
        options = dict(spec["options"])
        options["model"] = write_model(folder / "model", spec["shape"], spec["positions"], options["dtype"])
        self._llm = LLM(
            skip_tokenizer_init=True,
            disable_log_stats=False,
            load_format="dummy",
            kv_transfer_config=transfer or None,
            **options,
        )
        self._llm.collective_rpc(randomize)
        config = self._llm.llm_engine.vllm_config
        graphs = config.compilation_config.cudagraph_mode
        self.info = {
            "seconds to import": round(imported - started, 1),
            "seconds to start": round(time.perf_counter() - imported, 1),
            "V2 runner": bool(getattr(config, "use_v2_model_runner", False)),
            "async scheduling": bool(config.scheduler_config.async_scheduling),
            "graphs": getattr(graphs, "name", str(graphs)),
            "blocks": config.cache_config.num_gpu_blocks,
        }

    def _params(self, answer: int, **more: Any) -> Any:
        from vllm import SamplingParams

        return SamplingParams(temperature=0, max_tokens=answer, ignore_eos=True, detokenize=False, **more)

    def _forget(self, wait: float = 10.0) -> None:
        """Empty vLLM's own prefix cache, so that hits come from the connector alone. Wait for up to `wait` seconds
        while blocks are in use.
        """
        deadline = time.monotonic() + wait
        while not self._llm.reset_prefix_cache():
            if time.monotonic() > deadline:
                raise RuntimeError("vLLM does not reset its prefix cache")
            time.sleep(0.02)

    def batch(self, prompts: Sequence[Prompt], answer: int = 1, *, forget: bool = False) -> dict[str, Any]:
        if forget:
            self._forget()
        asked = [{"prompt_token_ids": tokens_of(parts)} for parts in prompts]
        started = time.perf_counter()
        outputs = self._llm.generate(asked, self._params(answer), use_tqdm=False)
        return {
            "seconds": time.perf_counter() - started,
            "ttfts": [output.metrics.first_token_latency for output in outputs],
            "hits": [output.num_cached_tokens or 0 for output in outputs],
            "tokens": [list(output.outputs[0].token_ids) for output in outputs],
        }

    def talks(self, seed: int, users: int, turns: int, ask: int, answer: int, at_once: int) -> dict[str, Any]:
        """Run conversations: each user sends `turns` prompts of `ask` new tokens after the whole conversation so
        far. `at_once`: number of requests in flight.
        """
        engine, params = self._llm.llm_engine, self._params(answer)
        said: list[list[int]] = [[] for _ in range(users)]
        turn, busy = [0] * users, set[int]()
        chance = random.Random(seed)
        order = [user for _ in range(turns) for user in chance.sample(range(users), users)]
        ttfts: list[float] = []
        tokens: dict[str, list[int]] = {}
        cached = prompts = 0
        started = time.perf_counter()

        def send() -> None:
            while len(busy) < at_once:
                user = next((user for user in order if user not in busy), None)
                if user is None:
                    return
                order.remove(user)
                busy.add(user)
                said[user] += tokens_of([(1_000_000 * seed + 1000 * user + turn[user], ask)])
                engine.add_request(f"{user}-{turn[user]}", {"prompt_token_ids": list(said[user])}, params)

        send()
        while engine.has_unfinished_requests():
            for output in engine.step():
                if output.finished:
                    user = int(output.request_id.partition("-")[0])
                    tokens[f"{user}-{turn[user]}"] = list(output.outputs[0].token_ids)
                    prompts += len(said[user])
                    said[user] += output.outputs[0].token_ids
                    ttfts.append(output.metrics.first_token_latency)
                    cached += output.num_cached_tokens or 0
                    turn[user] += 1
                    busy.discard(user)
            send()
        found = {"prompt tokens": prompts, "cached": cached, "ttfts": ttfts}
        return {"seconds": time.perf_counter() - started, **found, "tokens": [tokens[name] for name in sorted(tokens)]}

    def mixed(self, seed: int, count: int, answer: int, length: int, prompts: int, every: float) -> dict[str, Any]:
        """Return the seconds between the tokens of requests that decode, while long prompts come one after the
        other.
        """
        from vllm.sampling_params import RequestOutputKind

        engine, params = self._llm.llm_engine, self._params(answer, output_kind=RequestOutputKind.DELTA)
        for number in range(count):
            asked = {"prompt_token_ids": tokens_of([(seed + 500 + number, 200)])}
            engine.add_request(f"d{number}", asked, params)
        left = [[(seed + number, length)] for number in range(prompts)]
        last: dict[str, float] = {}
        gaps: list[float] = []
        ttfts: list[float] = []
        tokens: dict[str, list[int]] = {}
        due = time.perf_counter() + 0.3
        while left or engine.has_unfinished_requests():
            if left and (time.perf_counter() > due or not engine.has_unfinished_requests()):
                asked = {"prompt_token_ids": tokens_of(left.pop(0))}
                engine.add_request(f"p{len(left)}", asked, self._params(1))
                due = time.perf_counter() + every
            for output in engine.step():
                now, name = time.perf_counter(), output.request_id.partition("-")[0]
                tokens.setdefault(name, []).extend(output.outputs[0].token_ids)
                if name.startswith("p"):
                    ttfts.append(output.metrics.first_token_latency)
                    continue
                if name in last:
                    gaps.append(now - last[name])
                last[name] = now
        gaps.sort()
        shares = {"p50": 0.5, "p90": 0.9, "p99": 0.99, "worst": 1.0}
        found = {f"ms between tokens, {name}": 1e3 * gaps[int(at * (len(gaps) - 1))] for name, at in shares.items()}
        if ttfts:
            found["first token of the long ones"] = sorted(ttfts)[len(ttfts) // 2]
        return {**found, "tokens": [tokens[name] for name in sorted(tokens)]}

    def decode(self, seed: int, count: int, length: int, steps: int) -> dict[str, Any]:
        """Return the milliseconds of a step that decodes `count` prompts together: the difference between few and
        many tokens.
        """
        prompts = [[(seed + number, length)] for number in range(count)]
        # The first one computes the prompts, for both.
        _, few, many = (self.batch(prompts, answer) for answer in (1, 8, 8 + steps))
        return {"ms": 1e3 * (many["seconds"] - few["seconds"]) / steps, "tokens": many["tokens"]}

    def sleep(self, level: int) -> dict[str, Any]:
        started = time.perf_counter()
        self._llm.sleep(level=level)
        asleep = time.perf_counter()
        self._llm.wake_up()
        return {"sleep": asleep - started, "wake": time.perf_counter() - asleep}

    def end(self) -> None:
        with suppress(Exception):
            self._llm.llm_engine.engine_core.shutdown()
        os._exit(0)


def main() -> None:
    questions, folder = Questions(), Path(sys.argv[1])
    if len(str(folder)) <= MAX_SOCKET_FOLDER:
        os.environ.setdefault("VLLM_RPC_BASE_PATH", str(folder))
    serving = Answering(next(iter(questions)), folder)
    questions.answer(serving.info)
    for question in questions:
        try:
            answer = getattr(serving, question.pop("do"))(**question)
        except Exception as error:  # noqa: BLE001
            traceback.print_exc()
            answer = {"error": f"{type(error).__name__}: {error}"}
        questions.answer(answer)
    serving.end()


if __name__ == "__main__":
    main()
