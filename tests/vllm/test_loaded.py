"""KV belongs to the weights that workers have loaded, whatever the files say, before and after they change."""

from __future__ import annotations

import functools
import importlib
import json
import sys
from collections import OrderedDict
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from lmkv.cli.small_model import SmallModel
from lmkv.vllm import code, loaded
from tests.tables import raised
from tests.vllm.alone import Alone
from tests.vllm.harness import Engine, engine, external_hits, generated, over_disk, prompt

LENGTH = 600
IDS = prompt(80, LENGTH)
OTHER = prompt(81, LENGTH)


def answer(running: Engine, ids: list[int]) -> tuple[int, list[int]]:
    """The hit's tokens, and the answer."""
    (output,) = running.run([ids])
    return external_hits(output), generated([output])[0]


def change(network: Any) -> None:
    """Weights that are read as they are; called again, it takes the change back."""
    for layer in network.model.layers:
        weight = layer.input_layernorm.weight
        weight.data = weight.data.flip(0) * -1


def of_changed(plain: Engine) -> dict[str, list[list[int]]]:
    before = plain.ids([IDS, OTHER])
    plain.llm.apply_model(change)
    assert plain.llm.reset_prefix_cache()
    return {"before": before, "after": plain.ids([IDS, OTHER])}


@pytest.fixture(scope="module")
def right(model: Path, alone: Alone) -> dict[str, list[list[int]]]:
    answers: dict[str, list[list[int]]] = alone(model, {}, of_changed)
    assert answers["before"][0] != answers["after"][0]
    return answers


# -- files --------------------------------------------------------------------------------------------------


def one_row_of_embeddings(weights: dict[str, torch.Tensor]) -> None:
    weights["model.embed_tokens.weight"][IDS[3]].mul_(-1)


def one_number_of_a_linear_layer(weights: dict[str, torch.Tensor]) -> None:
    weights["model.layers.1.self_attn.v_proj.weight"][5, 7] += 0.5


def two_rows_of_a_linear_layer(weights: dict[str, torch.Tensor]) -> None:
    rows = weights["model.layers.0.mlp.down_proj.weight"]
    rows[[11, 12]] = rows[[12, 11]].clone()


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("checkpoint")
    SmallModel(layers=2, hidden=128, max_position=2048).write(folder)
    return folder


@pytest.fixture
def stored(checkpoint: Path, tmp_path: Path) -> Path:
    """A disk with the prompt's chunks, of the checkpoint as it was written."""
    with over_disk(checkpoint, tmp_path) as running:
        assert answer(running, IDS)[0] == 0
    return tmp_path


@pytest.mark.parametrize(
    "train", [one_row_of_embeddings, one_number_of_a_linear_layer, two_rows_of_a_linear_layer, None]
)
def test_a_checkpoint_of_which_a_little_was_trained_hits_nothing(
    checkpoint: Path, stored: Path, train: Callable[[Any], None] | None
) -> None:
    (file,) = checkpoint.glob("*.safetensors")
    before = file.read_bytes()
    weights = load_file(file)
    if train is not None:
        train(weights)
    try:
        save_file(weights, file, metadata={"format": "pt"})
        with over_disk(checkpoint, stored) as running:
            assert answer(running, IDS)[0] == (0 if train else LENGTH - 1)
    finally:
        file.write_bytes(before)


def test_weights_that_are_replaced_while_vllm_starts_are_not_those_it_serves(
    checkpoint: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The files are other ones by the time when lmkv could read them."""
    from vllm.model_executor.model_loader.base_loader import BaseModelLoader

    (file,) = checkpoint.glob("*.safetensors")
    before, weights = file.read_bytes(), load_file(file)
    one_number_of_a_linear_layer(weights)
    load = BaseModelLoader.load_model

    def replaced_meanwhile(self: Any, *args: Any, **options: Any) -> Any:
        model = load(self, *args, **options)
        save_file(weights, file, metadata={"format": "pt"})
        return model

    try:
        with monkeypatch.context() as patch:
            patch.setattr(BaseModelLoader, "load_model", replaced_meanwhile)
            with over_disk(checkpoint, tmp_path) as running:
                assert answer(running, IDS)[0] == 0
        with over_disk(checkpoint, tmp_path) as restarted:
            assert answer(restarted, IDS)[0] == 0
            restarted.forget_local()
            assert answer(restarted, IDS)[0] == LENGTH - 1
    finally:
        file.write_bytes(before)


MINE = """
from transformers.models.qwen3.modeling_qwen3 import Qwen3MLP, Qwen3Model

class MineMLP(Qwen3MLP):
    def forward(self, hidden):
        return super().forward(hidden) * FACTOR

class MineModel(Qwen3Model):
    def __init__(self, config):
        super().__init__(config)
        for layer in self.layers:
            layer.mlp.__class__ = MineMLP
"""


def test_other_code_in_the_models_folder_is_another_model(tmp_path: Path) -> None:
    folder = tmp_path / "mine"
    SmallModel(layers=2, hidden=128, max_position=2048).write(folder)
    config = json.loads((folder / "config.json").read_text())
    own = {"architectures": ["MineForCausalLM"], "auto_map": {"AutoModel": "modeling_mine.MineModel"}}
    (folder / "config.json").write_text(json.dumps(config | own))
    found = []
    for factor in (1, 3, 1):
        (folder / "modeling_mine.py").write_text(MINE.replace("FACTOR", str(factor)))
        with over_disk(folder, tmp_path / "kv", trust_remote_code=True, model_impl="transformers") as running:
            found.append(answer(running, IDS))
    assert [hit for hit, _ in found] == [0, 0, LENGTH - 1]
    assert found[0][1] == found[2][1] != found[1][1]


# -- changes in place ---------------------------------------------------------------------------------------


def core_of(running: Engine) -> Any:
    return running.llm.llm_engine.engine_core.engine_core


def by_rpc(running: Engine) -> None:
    """Through vLLM, and nothing is reset: not even vLLM's own prefix cache."""
    running.llm.apply_model(change)


def by_rpc_in_a_pause(running: Engine) -> None:
    core_of(running).pause_scheduler("keep", clear_cache=False)
    running.llm.apply_model(change)
    core_of(running).resume_scheduler()


def behind_its_back(running: Engine) -> None:
    """A trainer in the same process writes the weights, and then has vLLM reset its own cache."""
    change(core_of(running).model_executor.driver_worker.worker.model_runner.get_model())
    assert running.llm.reset_prefix_cache()


@pytest.mark.parametrize("how", [by_rpc, by_rpc_in_a_pause, behind_its_back])
def test_weights_that_change_in_place_change_the_keys(
    model: Path, tmp_path: Path, right: dict[str, list[list[int]]], how: Callable[[Engine], None]
) -> None:
    """An engine with the same weights finds their KV; one that starts with the checkpoint does not."""
    before, after = right["before"], right["after"]
    with over_disk(model, tmp_path) as running:
        assert answer(running, IDS) == (0, before[0])
        how(running)
        assert [answer(running, ids) for ids in (IDS, OTHER)] == [(0, after[0]), (0, after[1])]
        running.forget_local()
        assert answer(running, IDS) == (LENGTH - 1, after[0])
        how(running)
        assert answer(running, IDS) == (LENGTH - 1, before[0])
        assert answer(running, OTHER) == (0, before[1])
        how(running)
        assert answer(running, OTHER) == (LENGTH - 1, after[1])
    with over_disk(model, tmp_path) as restarted:
        assert answer(restarted, OTHER) == (LENGTH - 1, before[1])
        how(restarted)
        assert answer(restarted, OTHER) == (LENGTH - 1, after[1])


def test_a_number_of_a_layer_that_a_call_changes_changes_the_keys(model: Path, tmp_path: Path, alone: Alone) -> None:
    """It is in no tensor."""

    def scale(network: Any) -> None:
        for layer in network.model.layers:
            layer.self_attn.attn.impl.scale *= 3

    def of_scaled(plain: Engine) -> list[list[int]]:
        plain.llm.apply_model(scale)
        return plain.ids([IDS])

    (right,) = alone(model, {}, of_scaled)
    with over_disk(model, tmp_path) as running:
        assert answer(running, IDS)[1] != right
        running.llm.apply_model(scale)
        assert answer(running, IDS) == (0, right)
        running.llm.apply_model(lambda _: None)
        running.forget_local()
        assert answer(running, IDS) == (LENGTH - 1, right)
        running.llm.apply_model(scale)
        assert answer(running, OTHER)[0] == 0
    with over_disk(model, tmp_path) as restarted:
        assert answer(restarted, OTHER)[0] == 0


def test_a_checkpoint_that_is_loaded_again_is_the_same(model: Path, tmp_path: Path) -> None:
    with over_disk(model, tmp_path) as running:
        _, first = answer(running, IDS)
        running.llm.collective_rpc("reload_weights")
        running.forget_local()
        assert answer(running, IDS) == (LENGTH - 1, first)


RESIDENT = 7.0
"""The value of every number in device memory that sleep gave up."""


@pytest.fixture
def sleeping(monkeypatch: pytest.MonkeyPatch) -> None:
    """Have vLLM's CPU worker sleep as that of a device does: level 1 keeps a copy of weights, level 2 of buffers."""
    from vllm.v1.worker.cpu_worker import CPUWorker

    kept: list[tuple[torch.Tensor, torch.Tensor]] = []

    def sleep(worker: Any, level: int = 1) -> None:
        model = worker.model_runner.get_model()
        kept.extend((each, each.detach().clone()) for each in (*model.parameters(), *model.buffers()) if level == 1)
        kept.extend((each, each.clone()) for each in model.buffers() if level == 2)
        for each in (*model.parameters(), *model.buffers(), *worker.model_runner.kv_caches):
            each.data.fill_(RESIDENT)

    def wake_up(_: Any, tags: list[str] | None = None) -> None:
        if tags is None or "weights" in tags:
            for each, before in kept:
                each.data.copy_(before)
            kept.clear()

    monkeypatch.setattr(CPUWorker, "sleep", sleep)
    monkeypatch.setattr(CPUWorker, "wake_up", wake_up)


@pytest.mark.usefixtures("sleeping")
@pytest.mark.parametrize("level", [1, 2])
def test_weights_are_the_same_after_a_sleep_if_they_are(
    model: Path, tmp_path: Path, right: dict[str, list[list[int]]], level: int
) -> None:
    """Nobody asks for them while they are away."""
    with over_disk(model, tmp_path) as running:
        weights = running.llm.apply_model(lambda network: {n: p.clone() for n, p in network.named_parameters()})[0]

        def load(network: Any) -> None:
            for name, parameter in network.named_parameters():
                parameter.data.copy_(weights[name])

        assert answer(running, IDS) == (0, right["before"][0])
        running.llm.sleep(level)
        assert running.llm.reset_prefix_cache(), "as programs do that know nothing of sleep"
        running.llm.wake_up(["weights"])
        if level == 2:
            running.llm.apply_model(load)
        running.llm.wake_up(["kv_cache"])
        assert answer(running, IDS) == (LENGTH - 1, right["before"][0])
        if level == 2:
            running.llm.sleep(level)
            running.llm.wake_up()
            assert answer(running, OTHER)[0] == 0, "with whatever was in memory"
            running.llm.apply_model(load)
            assert answer(running, OTHER) == (0, right["before"][1])


@pytest.mark.parametrize("ended", [True, False])
def test_blocks_of_a_request_that_runs_across_a_change_get_no_name(model: Path, tmp_path: Path, ended: bool) -> None:
    """vLLM gives them to others: behind those that another request has computed anew."""
    with over_disk(model, tmp_path) as running:
        across = running.begin(IDS, 400)
        across(1)
        running.llm.apply_model(change)
        across(200)
        # The blocks before this are computed anew, those after it by the request that ran across the change.
        running.begin([*IDS, *across(1)[:200]], 1)(1)
        across(400 if ended else 320)
        follow = [*IDS, *across(1)[:300]]
        running.begin(follow, 1)(1)
        across(400)
        (found,) = running.again([follow], logprobs=1)
    assert external_hits(found) == len(follow) - 1
    with engine(model, connector=None) as plain:
        plain.llm.apply_model(change)
        (right,) = plain.run([follow], logprobs=1)
    assert likelihoods(found) == pytest.approx(likelihoods(right), abs=1e-3)
    with over_disk(model, tmp_path) as restarted:
        assert answer(restarted, follow)[0] == 512, "what it had stored before the change"


def test_a_load_ends_with_a_change_and_nobody_shares_its_blocks(model: Path, alone: Alone) -> None:
    """The prompt is too long for half of host memory, so that its load between steps takes several."""
    long = prompt(82, 1500)

    def of_long(plain: Engine) -> list[list[int]]:
        plain.llm.apply_model(change)
        return plain.ids([long])

    options = {"kv_cache_memory_bytes": 40 << 20}
    [expected] = alone(model, options, of_long)
    slot = 64 * 4 * 2 * 2 * 32 * 4
    extra = {"chunk_size": 64, "load_mode": "async", "max_local_cpu_size": 32 * slot / 2**30}
    with engine(model, extra=extra, **options) as running:
        running.run([long])
        running.forget_local()
        scheduler = running.connector.sides.scheduler
        running.begin(OTHER, 1)
        first = running.begin(long, 8)
        while not scheduler.loads.between_steps:
            running.step()
        state = next(iter(scheduler.loads._async_loads.values()))[0]
        running.llm.apply_model(change)
        running.begin(OTHER, 1)
        while scheduler.loads.between_steps:
            running.step()
        second = running.begin(long, 8)
        assert second(8) == expected
        assert len(first(8)) == 8
        assert state.unidentified
        running.assert_nothing_leaked()


def likelihoods(output: Any) -> list[float]:
    return [each.logprob for place in output.outputs[0].logprobs for each in place.values()]


def test_a_call_that_leaves_weights_alone_is_no_change(model: Path, tmp_path: Path) -> None:
    """Such as one that looks every second whether the workers live."""
    with over_disk(model, tmp_path) as running:
        across = running.begin(IDS, 200)
        across(1)
        running.llm.collective_rpc("check_health")
        across(200)
        running.forget_local()
        assert answer(running, [*IDS, *across(1)])[0] > LENGTH, "it stores what it has decoded"


def test_others_of_the_same_prompt_are_stored_while_a_request_runs_across_a_change(model: Path, tmp_path: Path) -> None:
    with over_disk(model, tmp_path) as running:
        across = running.begin(IDS, 400)
        across(1)
        running.llm.apply_model(change)
        for number in range(3):
            running.begin([*IDS, 7 + number], 1)(1)
        assert running.llm.llm_engine.has_unfinished_requests()
        across(400)
        running.forget_local()
        assert answer(running, [*IDS, 9])[0] == LENGTH


# -- what is in no file and no parameter --------------------------------------------------------------------


def config_of(model: Path | str = "", engines: int = 1, **built: Any) -> Any:
    """vLLM's configuration of a model that was built with these values."""
    hf_config = SimpleNamespace(to_dict=lambda: dict(built))
    config = SimpleNamespace(hf_config=hf_config, is_moe=True, model=str(model))
    return SimpleNamespace(parallel_config=SimpleNamespace(data_parallel_size=engines), model_config=config)


def identity_of(*layers: torch.nn.Module, vllm_config: Any = None, workers: Sequence[Any] = ()) -> str:
    named = [(f"model.layer{number or ''}", layer) for number, layer in enumerate(layers)]
    return loaded._identity(vllm_config or config_of(), named, workers)


def counts(identity: Callable[[Any], str], one: Any, other: Any) -> None:
    """What the identity is made of decides it, and nothing else does."""
    first, second, again = map(identity, (one, other, one))
    assert first == again != second


def test_what_the_model_was_built_with_counts() -> None:
    """Some models change their configuration while they are built, in the workers' process."""
    counts(lambda value: identity_of(torch.nn.Identity(), vllm_config=config_of(temperature=value)), 1, 2)


class OfAPlugIn(torch.nn.Module):
    """A layer whose package is not vLLM's."""

    class Numbers:
        def __init__(self, number: float) -> None:
            self.number = number


def buffered(scale: float, *, persistent: bool) -> torch.nn.Module:
    """Such as the scale that fp8 KV is written with."""
    layer = torch.nn.Module()
    layer.register_buffer("_k_scale", torch.tensor(scale), persistent=persistent)
    return layer


def scaled(place: str, scale: float) -> torch.nn.Module:
    """A scale that is a plain tensor, of the layer or of one of its parts."""
    layer = torch.nn.Module()
    owner: Any = layer
    if place:
        owner = SimpleNamespace()
        setattr(layer, place, owner)
    owner.__dict__["input_scale"] = torch.tensor(scale)
    return layer


def plugged_in(**held: Any) -> torch.nn.Module:
    layer = OfAPlugIn()
    layer.__dict__ |= {**held, "kv_cache": torch.rand(2)}
    return layer


PLACES = ("", "impl", "quant_method", "scheme")
LAYERS: dict[str, Callable[[float], torch.nn.Module]] = {
    "a buffer": lambda number: buffered(number, persistent=True),
    "a buffer of no checkpoint": lambda number: buffered(number, persistent=False),
    **{f"a scale in {place or 'the layer'}": functools.partial(scaled, place) for place in PLACES},
    "a plug-in's tensor": lambda number: plugged_in(steering=torch.tensor(number)),
    "in a dictionary": lambda number: plugged_in(held={"by": torch.full((2,), number)}),
    "in a list": lambda number: plugged_in(held=[torch.zeros(2), torch.full((2,), number)]),
    "two dictionaries deep": lambda number: plugged_in(held={"scales": {1: number}}),
    "in an object of the plug-in's": lambda number: plugged_in(held=OfAPlugIn.Numbers(number)),
    "in a namespace": lambda number: plugged_in(held=SimpleNamespace(number=number)),
}


@pytest.mark.parametrize("kind", LAYERS)
def test_what_is_in_a_layer_counts(kind: str) -> None:
    """Also what a plug-in's layer keeps in other objects."""
    counts(lambda number: identity_of(LAYERS[kind](number)), 1.0, 0.5)


@pytest.mark.parametrize("place", PLACES)
def test_a_scale_that_changes_in_place_counts(place: str) -> None:
    layer = scaled(place, 0.5)
    identity_of(layer)
    layer.__dict__.get(place, layer).__dict__["input_scale"].fill_(0.25)
    assert identity_of(layer) == identity_of(scaled(place, 0.25))


@pytest.fixture
def plugged(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[[str, int], Any]]:
    """Import a module of a plug-in's, whose `FACTOR`, in another package, is this number."""
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.setattr(sys, "dont_write_bytecode", True)
    for package in ("plugged", "arithmetic"):
        (tmp_path / package).mkdir()
        (tmp_path / package / "__init__.py").write_text("")
    (tmp_path / "plugged" / "layers.py").write_text(PLUGGED)
    (tmp_path / "plugged" / "numbers.py").write_text("import torch\nfrom arithmetic.scales import FACTOR\n" + LAYER)
    (tmp_path / "plugged" / "late.py").write_text("import torch\n" + LAYER + LATE)
    (tmp_path / "plugged" / "named.py").write_text("import torch\n" + LAYER + NAMED)

    def forget() -> None:
        for name in [name for name in sys.modules if name.partition(".")[0] in {"plugged", "arithmetic"}]:
            del sys.modules[name]

    def imported(name: str, factor: int) -> Any:
        forget()
        (tmp_path / "arithmetic" / "scales.py").write_text(
            f"import arithmetic.scales\nFACTOR = {factor}\ndef scaled(x): return FACTOR * x\n"
        )
        importlib.invalidate_caches()
        return importlib.import_module(name)

    yield imported
    forget()


LAYER = "class Layer(torch.nn.Module): pass\n"
LATE = """
def forward():
    from arithmetic import scales
"""
NAMED = """
import importlib
def forward():
    return importlib.import_module("arithmetic.scales").FACTOR
"""
PLUGGED = """
import torch
from arithmetic.scales import scaled

class Layer(torch.nn.Module): pass
class Impl: pass
class Worker: pass
def patched(self, x): return scaled(x)
"""


def of_a_model(module: Any) -> str:
    return identity_of(module.Layer())


def of_a_backend(module: Any) -> str:
    layer = torch.nn.Module()
    layer.impl = module.Impl()
    return identity_of(layer)


def of_a_worker(module: Any) -> str:
    return identity_of(torch.nn.Module(), workers=[module.Worker()])


def of_a_general_plug_in(module: Any) -> str:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(code, "packages_of_plug_ins", lambda: {module.__name__.partition(".")[0]})
        return identity_of(torch.nn.Module())


@pytest.mark.parametrize("identity", [of_a_model, of_a_backend, of_a_worker, of_a_general_plug_in])
def test_code_that_a_plug_in_calls_counts(plugged: Callable[[str, int], Any], identity: Callable[[Any], str]) -> None:
    """In another package, which only the plug-in's imports."""
    counts(lambda factor: identity(plugged("plugged.layers", factor)), 1, 3)


@pytest.mark.parametrize("name", ["plugged.numbers", "plugged.late", "plugged.named"])
def test_what_code_takes_from_another_module_counts(plugged: Callable[[str, int], Any], name: str) -> None:
    """A number, or something that it imports when it is called."""
    counts(lambda factor: of_a_model(plugged(name, factor)), 1, 3)


def by_function(layer: torch.nn.Module, wrap: Callable[[Any], Any] = lambda function: lambda call: call) -> None:
    forward = layer.forward
    layer.forward = wrap(forward)(lambda *given: forward(*given) * 2)


class Doubles:
    def __call__(self, given: torch.Tensor) -> torch.Tensor:
        return given * 2


HANGS: dict[str, Callable[[Any], object]] = {
    "hook": lambda layer: layer.register_forward_hook(lambda module, given, output: output * 2),
    "hook before": lambda layer: layer.register_forward_pre_hook(lambda module, given: (given[0] * 2,)),
    "function": by_function,
    "wrapper": lambda layer: by_function(layer, functools.wraps),
    "partial": lambda layer: layer.register_forward_hook(
        functools.partial(lambda by, module, given, output: output * by, 2)
    ),
    "decorated": lambda layer: layer.register_forward_hook(torch.no_grad()(lambda module, given, output: output * 2)),
    "object": lambda layer: setattr(layer, "forward", Doubles()),
    "backend": lambda layer: setattr(layer, "quant_method", SimpleNamespace(apply=lambda *given: given)),
    "everywhere": lambda layer: torch.nn.modules.module.register_module_forward_hook(lambda *_: None),
}


@pytest.mark.parametrize("how", HANGS)
def test_a_layer_that_calls_what_nobody_knows_has_no_identity(how: str, monkeypatch: pytest.MonkeyPatch) -> None:
    layer = torch.nn.Linear(2, 2)
    monkeypatch.setattr(torch.nn.modules.module, "_global_forward_hooks", OrderedDict())
    identity_of(layer)
    HANGS[how](layer)
    raised(ValueError, r"model\.layer calls .*neither to vLLM nor to the model", identity_of, layer)


def of_a_library(source: str, **names: Any) -> Any:
    """A function, or whatever else, of an installed package that has a version."""
    return eval(source, {"__name__": "numpy.steering", "torch": torch, **names})


class Steers:
    __module__ = "numpy.steering"

    def __init__(self) -> None:
        self.by = torch.ones(2)

    def __call__(self, *given: Any) -> Any:
        return given[-1] * self.by

    def steer(self, *given: Any) -> Any:
        return given[-1] * self.by


MADE_WITH: dict[str, Callable[[], Any]] = {
    "a default": lambda: of_a_library("lambda module, given, output, by=torch.ones(2): output * by"),
    "a closure": lambda: of_a_library("(lambda by: lambda module, given, output: output * by)(torch.ones(2))"),
    "an argument": lambda: functools.partial(
        of_a_library("lambda by, module, given, output: output * by"), torch.ones(2)
    ),
    "an object's method": lambda: Steers().steer,
    "an object": Steers,
}


def without_values() -> Any:
    """It may read them from the layer."""
    return of_a_library("lambda module, given, output: output * module.steering['by']")


@pytest.mark.parametrize("values", MADE_WITH)
@pytest.mark.parametrize("plug_in", [False, True])
def test_a_function_of_a_library_that_was_made_with_values_ends_the_identity(
    values: str, plug_in: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    if plug_in:
        monkeypatch.setattr(code, "packages_of_plug_ins", lambda: frozenset({"numpy"}))
    for hang in (
        lambda layer, call: layer.register_forward_hook(call),
        lambda layer, call: setattr(layer, "act", call),
    ):
        layer = torch.nn.Linear(2, 2)
        identity_of(layer)
        hang(layer, MADE_WITH[values]())
        raised(ValueError, r"model\.layer calls", identity_of, layer)


def test_hooks_and_replaced_methods_end_the_identity_whatever_they_were_made_with() -> None:
    for name in ("forward", "hook", "act"):
        layer = torch.nn.Linear(2, 2)
        if name == "hook":
            layer.register_forward_hook(without_values())
        else:
            setattr(layer, name, without_values())
        if name == "act":
            identity_of(layer)
            continue
        raised(ValueError, r"model\.layer calls", identity_of, layer)


def test_a_method_of_another_layer_counts_by_its_place() -> None:
    first, second, third = (torch.nn.Linear(2, 2) for _ in range(3))
    second.load_state_dict(first.state_dict())
    third.load_state_dict(first.state_dict())

    before = identity_of(first, second, third)
    first.forward = second.forward
    exchanged = identity_of(first, second, third)
    first.forward = third.forward
    assert len({before, exchanged, identity_of(first, second, third)}) == 3


def test_an_object_that_answers_anything_ends_the_identity_and_not_the_engine() -> None:
    class Proxy:
        __module__ = "vllm.proxy"

        def __getattr__(self, name: str) -> Any:
            return Proxy()

        def __call__(self) -> None: ...

    layer = torch.nn.Linear(2, 2)
    layer.client = Proxy()
    raised(ValueError, "without an end", identity_of, layer)


def test_a_model_whose_layers_are_unknown_has_no_identity() -> None:
    with pytest.raises(ValueError, match="cannot find the layers of model class function"):
        list(loaded._layers(SimpleNamespace(get_model=lambda: lambda: None)))


def test_packages_that_are_imported_with_a_module_count(tmp_path: Path, plugged: Callable[[str, int], Any]) -> None:
    """`import arithmetic.scales` runs `arithmetic/__init__.py`, which has other names."""

    def identity(factor: int) -> str:
        (tmp_path / "arithmetic" / "__init__.py").write_text(f"def scaled(x): return {factor} * x\n")
        return of_a_model(plugged("plugged.numbers", 1))

    counts(identity, 1, 2)


def test_code_in_no_file_has_no_identity(monkeypatch: pytest.MonkeyPatch) -> None:
    """As that of a notebook, or in a zip file."""
    module: Any = type(sys)("notebook")
    module.Layer = type("Layer", (torch.nn.Module,), {"__module__": "notebook"})
    monkeypatch.setitem(sys.modules, "notebook", module)
    raised(ValueError, "cannot read the code of module notebook", lambda: identity_of(module.Layer()))


def test_the_code_of_the_models_configuration_counts(plugged: Callable[[str, int], Any]) -> None:
    """Its attributes and properties are in no dictionary."""

    def identity(factor: int) -> str:
        config = config_of()
        config.model_config.hf_config = plugged("plugged.layers", factor).Impl()
        config.model_config.hf_config.to_dict = dict
        return identity_of(torch.nn.Linear(2, 2, bias=False).requires_grad_(False).to("meta"), vllm_config=config)

    counts(identity, 1, 2)


@pytest.mark.parametrize("drop", [lambda layer: setattr(layer, "weight", None), lambda layer: delattr(layer, "weight")])
def test_a_parameter_that_is_packed_and_dropped_counts(drop: Callable[[torch.nn.Module], None]) -> None:
    loaded.watch_packing()

    def identity(number: float) -> str:
        layer = torch.nn.Linear(2, 2, bias=False)
        torch.nn.init.constant_(layer.weight, number)
        drop(layer)
        return identity_of(layer)

    counts(identity, 1.0, 2.0)


def test_an_edited_file_of_vllms_counts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    kind = type("Layer", (torch.nn.Linear,), {"__module__": "vllm.edited"})
    path, known = tmp_path / "edited.py", code._file_of
    monkeypatch.setattr(code, "_file_of", lambda name: path if name == "vllm.edited" else known(name))
    layer = kind(2, 2)
    counts(lambda text: (path.write_text(text), identity_of(layer))[1], "x = 1", "x = 2")


def test_after_a_call_while_the_engine_sleeps_all_numbers_of_layers_are_looked_at_again() -> None:
    layer = torch.nn.Linear(2, 2)
    before = identity_of(layer)
    layer.scale = 3.0
    assert identity_of(layer) == before, "a step may have changed it"
    loaded.fold_constants(SimpleNamespace(model_runner=SimpleNamespace(get_model=lambda: layer)))
    assert identity_of(layer) != before


def test_a_method_that_replaces_one_of_another_package_counts(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its code is that of this package, whose digest becomes part of the identity."""
    layer = torch.nn.Linear(2, 2)
    before = identity_of(layer)
    monkeypatch.setattr(torch.nn.Linear, "forward", lambda self, given: given)
    assert identity_of(layer) != before
    factor = 2
    monkeypatch.setattr(torch.nn.Linear, "forward", lambda self, given: given * factor)
    raised(ValueError, "a method of Linear is in no package, or uses values", identity_of, layer)
    monkeypatch.setattr(torch.nn.Linear, "forward", eval("lambda self, given: given", {"__name__": "__main__"}))
    raised(ValueError, "a method of Linear is in no package, or uses values", identity_of, layer)


def test_after_a_call_that_hangs_a_hook_into_a_layer_nothing_is_cached(model: Path, tmp_path: Path) -> None:
    def steer(network: Any) -> None:
        network.model.layers[1].mlp.register_forward_hook(lambda module, given, output: output + 0.7)

    with over_disk(model, tmp_path) as running:
        answer(running, IDS)
        running.llm.apply_model(steer)
        first = answer(running, IDS)
        running.forget_local()
        assert answer(running, IDS) == first == (0, first[1])
        answer(running, OTHER)
    with over_disk(model, tmp_path) as restarted:
        assert answer(restarted, OTHER)[0] == 0


def test_experts_over_several_engines_count_by_their_files(tmp_path: Path) -> None:
    """No engine has all of them."""

    class FusedMoE(torch.nn.Module):
        def __init__(self, expert: int) -> None:
            super().__init__()
            self.weight = torch.nn.Parameter(torch.full((2,), float(expert)))

    engines = config_of(tmp_path, engines=2)
    raised(ValueError, "no file identifies the others", lambda: identity_of(FusedMoE(1), vllm_config=engines))
    (tmp_path / "config.json").write_text("{}")
    (tmp_path / "model.safetensors").write_bytes(b"1")
    before = identity_of(FusedMoE(1), vllm_config=engines)
    assert before == identity_of(FusedMoE(2), vllm_config=engines)
    (tmp_path / "model.safetensors").write_bytes(b"22")
    assert before != identity_of(FusedMoE(1), vllm_config=engines)
    assert identity_of(FusedMoE(1)) != identity_of(FusedMoE(2)), "an engine that has all knows them"


# -- the digest on a device ---------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32, torch.uint8, torch.float8_e4m3fn])
@pytest.mark.parametrize("size", [1, 3, 7, 4096, (1 << 20) * 4 + 5])
def test_the_digest_on_a_device_sees_each_bit_and_place(dtype: torch.dtype, size: int) -> None:
    data = torch.randint(
        0, 255, (size * dtype.itemsize,), dtype=torch.uint8, generator=torch.Generator().manual_seed(1)
    )
    digests = {loaded.digest_on_device(data.view(dtype))}
    assert loaded.digest_on_device(data.clone().view(dtype)) in digests
    changed = 0
    for place in {0, len(data) // 2, len(data) - 1}:
        for bit in (1, 128):
            other = data.clone()
            other[place] ^= bit
            digests.add(loaded.digest_on_device(other.view(dtype)))
            changed += 1
    swapped = data.roll(4)
    digests.add(loaded.digest_on_device(swapped.view(dtype)))
    digests.add(
        loaded.digest_on_device(torch.cat([data, data[:0], torch.zeros(dtype.itemsize, dtype=torch.uint8)]).view(dtype))
    )
    assert len(digests) == 1 + changed + 1 + (not torch.equal(swapped, data))


def test_numbers_that_do_not_lie_in_their_order_are_digested_in_it() -> None:
    """As weights that a kernel wants transposed, or padded."""
    whole = torch.arange(3000 * 1100, dtype=torch.float32).reshape(3000, 1100)
    padded = torch.zeros(3000, 1200)[:, :1100].copy_(whole)
    tensors = padded, whole.t().contiguous().t(), whole.flip(0).t().contiguous().t()
    same, as_ever, other = map(loaded._digest, tensors)
    assert same == as_ever != other


def test_a_view_that_begins_between_words_has_a_digest() -> None:
    data = torch.arange(1000, dtype=torch.int16)
    assert loaded.digest_on_device(data[1:]) == loaded.digest_on_device(data[1:].clone())


def test_layers_without_a_size_yet_are_made_as_ever() -> None:
    loaded.watch_packing()
    layer = torch.nn.LazyLinear(3)
    layer(torch.zeros(1, 2))
    assert layer.weight.shape == (3, 2)


def test_a_tensor_that_is_made_of_others_counts_by_them() -> None:
    from torch.testing._internal.two_tensor import TwoTensor

    def lines(*values: float) -> list[str]:
        module = torch.nn.Module()
        for number, value in enumerate(values):
            parts = torch.ones(2), torch.tensor([1.0, value])
            module.register_parameter(f"weight{number}", torch.nn.Parameter(TwoTensor(*parts), requires_grad=False))
        module.register_parameter("elsewhere", torch.nn.Parameter(torch.empty(2, device="meta"), requires_grad=False))
        return [line.partition(" ")[2] for line in loaded._tensors(module, {})]

    assert hasattr(
        torch.nn.Parameter(TwoTensor(torch.ones(2), torch.ones(2)), requires_grad=False), "__tensor_flatten__"
    )
    first, second, third = lines(2.0, 3.0, 2.0)
    assert first == third != second
    assert lines(2.0) == [first]
