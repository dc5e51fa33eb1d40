"""Engines in processes of their own, which change what they serve when they are told to, beside one that never does.

Everything that a client, an operator or a trainer may change has a number: weights have a version, adapters a content,
images a colour. `Served` knows which of them an engine has at each moment, as vLLM's documents have it.
"""

from __future__ import annotations

import json
import multiprocessing
import random
import shutil
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

from attrs import define, field

from tests.kit import LIMIT
from tests.vllm.families import write_adapter
from tests.vllm.harness import Engine, engine, external_hits, prompt
from tests.vllm.test_media import SIDE, TEXT

COLOURS = ("red", "blue", "green", "white")
CONTENTS = tuple((seed, alpha) for seed in (1, 2) for alpha in (8, 32))
"""The contents that an adapter may have: the seed of its weights, and its scale."""
PROMPTS = [prompt(seed, 64 * (3 + seed % 5)) for seed in range(900, 912)]
RUNS_ON = [each % 250 for each in prompt(912, 150)]
"""A prompt of no image, for both models."""


def set_version(network: Any, version: int) -> None:
    """Weights that vLLM's CPU build reads as they are; version 0 is the checkpoint's."""
    for name, weight in network.named_parameters():
        if weight.ndim == 1 and "norm" in name and "vision" not in name and "qformer" not in name:
            if not hasattr(weight, "of_checkpoint"):
                weight.of_checkpoint = weight.detach().clone()
            weight.data.copy_(weight.of_checkpoint.roll(version) * (1 + version / 2))


# -- in an engine's process -------------------------------------------------------------------------------------------


class Child:
    """Carries out the calls that the driver sends, each by the name of a method."""

    def __init__(self, running: Engine) -> None:
        self._running, self._vllm = running, running.llm.llm_engine
        self.core = self._vllm.engine_core.engine_core

    def ask(self, asked: list[dict[str, Any]]) -> list[tuple[list[int], int]]:
        """Several requests at once: for each the answer, and the tokens that lmkv loaded for it."""
        from PIL import Image
        from vllm import SamplingParams
        from vllm.lora.request import LoRARequest

        prompts, adapters = list[Any](), list[Any]()
        for each in asked:
            adapters.append(LoRARequest(*each["adapter"]) if each.get("adapter") else None)
            if "colour" not in each:
                prompts.append({"prompt_token_ids": each["ids"]})
                continue
            picture = Image.new("RGB", (SIDE, SIDE), each["colour"])
            prompts.append({"prompt": each["text"], "multi_modal_data": {"image": picture}})
            if each["name"]:
                prompts[-1]["multi_modal_uuids"] = {"image": [each["name"]]}
        params = SamplingParams(
            temperature=0, max_tokens=8, ignore_eos=True, extra_args={"kv_transfer_params": {"lmkv.report": True}}
        )
        loras = adapters if any(adapters) else None
        outputs = self._running.llm.generate(prompts, params, lora_request=loras, use_tqdm=False)
        hits = external_hits if self._running.connector else lambda _: 0
        return [(list(each.outputs[0].token_ids), hits(each)) for each in outputs]

    def weights(self, version: int, how: str, beside: bool) -> None:
        """`beside`: while a request runs."""
        across = self._running.begin(RUNS_ON, 80) if beside else lambda _: []
        across(3)
        if how == "pause":
            self.core.pause_scheduler("keep", clear_cache=False)
        if how == "behind its back":
            set_version(self.core.model_executor.driver_worker.worker.model_runner.get_model(), version)
            # vLLM leaves its cache as it is while a request runs.
            across(80)
            self._running.forget_local()
        else:
            self._running.llm.apply_model(lambda network: set_version(network, version))
        if how == "pause":
            self.core.resume_scheduler()
        across(80)
        self.core.reset_encoder_cache()

    def reset(self, tiers: bool) -> None:
        assert self._running.llm.reset_prefix_cache(reset_connector=tiers)

    def sleep(self, level: int) -> None:
        self._running.llm.sleep(level)
        self._running.llm.wake_up()

    def drop(self, number: int) -> None:
        self._vllm.remove_lora(number)

    def preload(self, adapter: tuple[str, int, str]) -> None:
        from vllm.lora.request import LoRARequest

        assert self._vllm.add_lora(LoRARequest(*adapter))

    def check(self) -> None:
        if self._running.connector:
            self._running.assert_nothing_leaked()


def serve(told: Connection, model: Path, options: dict[str, Any]) -> None:
    with engine(model, **options) as running:
        child = Child(running)
        while (call := told.recv()) is not None:
            name, *arguments = call
            told.send(getattr(child, name)(*arguments))
        if running.connector:
            assert running.store.drain(LIMIT)
    told.send(None)


# -- in the driver's --------------------------------------------------------------------------------------------------


@define
class Served:
    """One engine, and what it serves by now."""

    model: Path
    options: dict[str, Any]
    version: int = 0
    adapter: tuple[int, tuple[int, int]] | None = None
    """The number and content of the one adapter that vLLM has room for."""
    named: dict[str, str] = field(factory=dict)
    """The colour of the image that has been called so; one process may not give two a name."""
    _told: Connection = field(init=False)
    _process: Any = field(init=False)

    def __attrs_post_init__(self) -> None:
        self.start()

    def start(self) -> None:
        spawn = multiprocessing.get_context("spawn")
        self._told, child = spawn.Pipe()
        self._process = spawn.Process(target=serve, args=(child, self.model, self.options), daemon=True)
        self._process.start()
        child.close()
        self.version, self.adapter, self.named = 0, None, {}

    def begin(self, name: str, *arguments: Any) -> None:
        self._told.send((name, *arguments))

    def end(self) -> Any:
        """The result. Raises EOFError if the process has ended."""
        return self._told.recv()

    def __call__(self, name: str, *arguments: Any) -> Any:
        self.begin(name, *arguments)
        return self.end()

    def restart(self, *, killed: bool) -> None:
        self.close(killed=killed)
        self.start()

    def close(self, *, killed: bool = False) -> None:
        if killed:
            self._process.kill()
        else:
            self._told.send(None)
            self.end()
        self._process.join()


class World:
    """Two engines over the same tiers, and the one that tells what is right."""

    def __init__(self, folder: Path, draw: random.Random, engines: list[Served], reference: Served) -> None:
        self.counts = Counter[str]()
        self.folder, self.draw, self.engines, self._reference = folder, draw, engines, reference
        self._right: dict[str, list[int]] = {}
        self._contents = {content: folder / "contents" / str(n) for n, content in enumerate(CONTENTS)}
        for (seed, alpha), place in self._contents.items():
            file = write_adapter(place, seed=seed) / "adapter_config.json"
            file.write_text(json.dumps({**json.loads(file.read_text()), "lora_alpha": alpha}))
        self._files: dict[int, tuple[int, int]] = {}

    def right(self, version: int, request: dict[str, Any], content: tuple[int, int] | None) -> list[int]:
        known = repr((version, {**request, "adapter": None, "name": None}, content))
        if known not in self._right:
            if self._reference.version != version:
                self._reference("weights", version, "call", False)
                self._reference.version = version
            number = CONTENTS.index(content) + 1 if content else 0
            adapter = (f"content-{number}", number, str(self._contents[content])) if content else None
            [(found, _)] = self._reference("ask", [{**request, "adapter": adapter, "name": None}])
            self._right[known] = found
        return self._right[known]

    def round(self, requests: Callable[[Served], tuple[list[dict[str, Any]], tuple[int, int] | None]]) -> None:
        """Each engine serves some requests, at the same time."""
        asked = []
        for each in self.engines:
            asked.append((each, *requests(each)))
            each.begin("ask", asked[-1][1])
        for each, found, content in asked:
            for request, (answer, hits) in zip(found, each.end(), strict=True):
                self.counts["requests"] += 1
                self.counts["hits"] += hits > 0
                expected = self.right(each.version, request, content)
                if answer != expected:
                    self.counts["differences"] += 1
                    print("differs:", each.version, content, {**request, "ids": None}, hits, answer, expected)

    def change(self) -> None:
        """Something that may happen to an engine, besides requests."""
        each = self.draw.choice(self.engines)
        kind = self.draw.choice(("weights", "weights", "reset", "sleep"))
        self.counts[kind] += 1
        if kind == "weights":
            version = self.draw.randrange(3)
            how = self.draw.choice(("call", "pause", "behind its back"))
            each("weights", version, how, self.draw.random() < 0.5)
            each.version = version
        elif kind == "reset":
            each("reset", self.draw.random() < 0.5)
        else:
            each("sleep", self.draw.choice((1, 2)))

    def restart(self) -> None:
        self.counts["restarts"] += 1
        self.draw.choice(self.engines).restart(killed=self.draw.random() < 0.5)

    def close(self) -> None:
        for each in self.engines:
            each("check")
        for each in (*self.engines, self._reference):
            each.close()

    # -- adapters -----------------------------------------------------------------------------------------------------

    def place(self, number: int) -> Path:
        """Where the adapter of this number is; the first time, it is written."""
        folder = self.folder / "adapters" / str(number)
        if number not in self._files:
            self.train(number, folder)
        return folder

    def train(self, number: int, folder: Path) -> None:
        """Another content in the same place."""
        self._files[number] = self.draw.choice(CONTENTS)
        folder.mkdir(parents=True, exist_ok=True)
        for file in self._contents[self._files[number]].iterdir():
            shutil.copyfile(file, folder / f".{file.name}")
            (folder / f".{file.name}").rename(folder / file.name)

    def change_adapters(self) -> None:
        number = self.draw.randrange(1, 4)
        kind = self.draw.choice(("train", "drop", "preload"))
        self.counts[kind] += 1
        each = self.draw.choice(self.engines)
        if kind == "train":
            self.train(number, self.place(number).parent / str(number))
        elif kind == "drop":
            each("drop", number)
            if each.adapter and each.adapter[0] == number:
                each.adapter = None
        else:
            each("preload", self.named_adapter(each, number))
        # vLLM's own cache knows adapters by their names.
        for every in self.engines:
            every("reset", False)

    def named_adapter(self, served: Served, number: int) -> tuple[str, int, str]:
        """The adapter as clients name it. vLLM reads what it has not got."""
        place = self.place(number)
        if not served.adapter or served.adapter[0] != number:
            served.adapter = number, self._files[number]
        return f"adapter-{number}", number, str(place)

    def with_adapters(self, served: Served) -> tuple[list[dict[str, Any]], tuple[int, int] | None]:
        """Requests of one adapter, or without: vLLM has room for one."""
        number = self.draw.randrange(4)
        adapter = self.named_adapter(served, number) if number else None
        ids = [self.prefix(self.draw.choice(PROMPTS)) for _ in range(self.draw.randrange(1, 4))]
        content = served.adapter[1] if number and served.adapter else None
        return [{"ids": each, "adapter": adapter} for each in ids], content

    def prefix(self, ids: list[int]) -> list[int]:
        return ids[: self.draw.choice((len(ids), len(ids), 100, 160))]

    # -- images -------------------------------------------------------------------------------------------------------

    def with_images(self, served: Served) -> tuple[list[dict[str, Any]], None]:
        """Without a name, or with one that clients choose; each process may have given it to another image."""
        found = []
        for _ in range(self.draw.randrange(1, 3)):
            colour, name = self.draw.choice(COLOURS), self.draw.choice((None, "mine", "yours", "photo"))
            if name is not None:
                colour = served.named.setdefault(name, colour)
            found.append({"colour": colour, "name": name, "text": TEXT * self.draw.randrange(1, 3)})
        return found, None


@contextmanager
def world(model: Path, folder: Path, url: str, seed: int, options: dict[str, Any]) -> Iterator[World]:
    tiers = {"local_disk": str(folder / "kv"), "max_local_disk_size": 1.0, "disk_min_free": 0.0, "remote_url": url}
    extra = {"chunk_size": 64, "max_local_cpu_size": 0.01, **tiers}
    plain = {**options, "connector": None, "enable_prefix_caching": False, "mm_processor_cache_gb": 0}
    engines = [Served(model, {**options, "extra": extra, "enable_prefix_caching": kept}) for kept in (True, False)]
    found = World(folder, random.Random(seed), engines, Served(model, plain))
    yield found
    # After an error they end with this process.
    found.close()
