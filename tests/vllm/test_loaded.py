"""KV belongs to the weights that workers have loaded, whatever the files say, before and after they change."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from lmkv.cli.checkpoint import SmallModel
from lmkv.vllm import loaded
from tests.kit import LIMIT
from tests.vllm.alone import Alone
from tests.vllm.harness import Engine, engine, external_hits, prompt

LENGTH = 600
IDS = prompt(80, LENGTH)
OTHER = prompt(81, LENGTH)


@contextmanager
def over_disk(model: Path, folder: Path, **options: Any) -> Iterator[Engine]:
    extra = {"local_disk": f"file://{folder}", "max_local_disk_size": 1.0, "disk_min_free": 0.0}
    with engine(model, extra=extra | options.pop("extra", {}), **options) as running:
        assert running.store.wait_indexed(LIMIT)
        yield running
        assert running.store.drain(LIMIT)


def answer(running: Engine, ids: list[int]) -> tuple[int, list[int]]:
    """The hit's tokens, and the answer."""
    (output,) = running.run([ids])
    return external_hits(output), list(output.outputs[0].token_ids)


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
        running.forget_local()
        (found,) = running.run([follow], logprobs=1)
    assert external_hits(found) == len(follow) - 1
    with engine(model, connector=None) as plain:
        plain.llm.apply_model(change)
        (right,) = plain.run([follow], logprobs=1)
    assert likelihoods(found) == pytest.approx(likelihoods(right), abs=1e-3)
    with over_disk(model, tmp_path) as restarted:
        assert answer(restarted, follow)[0] == 512, "what it had stored before the change"


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
    assert (
        loaded._digest(padded)
        == loaded._digest(whole.t().contiguous().t())
        != loaded._digest(whole.flip(0).t().contiguous().t())
    )


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
