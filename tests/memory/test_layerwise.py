"""Layer by layer on the CPU: what is there when, through the engine."""

from __future__ import annotations

import threading

import pytest
import torch

from lmkv import Config, Engine
from lmkv.errors import ClosedError
from tests.kit import LIMIT, raised

BLOCK, CHUNK, LAYERS, BLOCKS = 4, 8, 3, 10
TOKENS = list(range(3 * CHUNK + 5))


class Case:
    def __init__(self, *, block_major: bool = False) -> None:
        whole = torch.arange(BLOCKS * LAYERS * BLOCK * 16, dtype=torch.float32)
        shape = (BLOCKS, LAYERS, BLOCK, 16) if block_major else (LAYERS, BLOCKS, BLOCK, 16)
        self.layers = list(whole.view(shape).unbind(1 if block_major else 0))
        config = Config.load(chunk_size=CHUNK, max_local_cpu_size=0.001, env={})
        self.engine = Engine.open(self.layers, block_size=BLOCK, model="m", config=config)

    def stored(self) -> list[torch.Tensor]:
        self.engine.store(TOKENS, [0, 1, 2, 3, 4, 5])
        kept = [layer[:6].clone() for layer in self.layers]
        for layer in self.layers:
            layer.zero_()
        return kept


@pytest.mark.parametrize("block_major", [False, True])
def test_a_layer_is_filled_once_it_was_waited_for(block_major: bool) -> None:
    case = Case(block_major=block_major)
    kept = case.stored()
    with case.engine, case.engine.retrieve_layers(TOKENS, [4, 5, 6, 7, 8, 9]) as reader:
        assert reader.tokens == 3 * CHUNK
        for number in range(LAYERS):
            reader.wait(number)
            assert torch.equal(case.layers[number][4:], kept[number])
            untouched = [] if block_major else case.layers[number + 1 :]
            assert not any(bool(layer.any()) for layer in untouched), "no layer before its time"


def test_leaving_early_still_fills_everything_and_counts_it() -> None:
    case = Case()
    kept = case.stored()
    with case.engine as engine:
        with engine.retrieve_layers(TOKENS, [4, 5, 6, 7, 8, 9], skip_tokens=CHUNK) as reader:
            reader.wait(0)
        assert reader.complete
        assert all(torch.equal(layer[6:], old[2:]) for layer, old in zip(case.layers, kept, strict=True))
        assert not any(bool(layer[4:6].any()) for layer in case.layers), "what is skipped stays as it is"
        assert engine.stats().retrieved_tokens == 2 * CHUNK
        assert engine.stats().store.leased == 0


@pytest.mark.parametrize("tokens", [[99] * 30, [], TOKENS[: CHUNK - 1]])
def test_nothing_to_retrieve(tokens: list[int]) -> None:
    case = Case()
    case.stored()
    with case.engine, case.engine.retrieve_layers(tokens, [4, 5, 6, 7, 8, 9]) as reader:
        assert reader.tokens == 0
        reader.wait(LAYERS - 1)


@pytest.mark.parametrize("order", [[0, 1, 2], [2, 0, 1], [0]])
def test_layers_are_stored_as_they_are_when_saved(order: list[int]) -> None:
    case = Case()
    with case.engine as engine:
        kept = [layer[:6].clone() for layer in case.layers]
        with engine.store_layers(TOKENS, [0, 1, 2, 3, 4, 5]) as writer:
            assert writer.tokens == 3 * CHUNK
            for number in order:
                writer.save(number)
            assert engine.pin(TOKENS) == 0, "nothing is published before everything is there"
        assert engine.lookup(TOKENS) == 3 * CHUNK
        assert engine.retrieve(TOKENS, [4, 5, 6, 7, 8, 9]) == 3 * CHUNK
        assert all(torch.equal(layer[4:], old) for layer, old in zip(case.layers, kept, strict=True))


def store_and_break(engine: Engine) -> None:
    with engine.store_layers(TOKENS, [0, 1, 2, 3]) as writer:
        writer.save(0)
        raise RuntimeError("the model broke")


def test_an_exception_publishes_nothing_and_frees_everything() -> None:
    case = Case()
    with case.engine as engine:
        raised(RuntimeError, "the model", store_and_break, engine)
        assert engine.lookup(TOKENS) == 0
        stats = engine.stats().store
        assert (stats.writing, stats.leased) == (0, 0)
        assert engine.store(TOKENS, [0, 1, 2, 3]) == 2 * CHUNK


def test_loading_a_prefix_and_storing_the_rest_at_once() -> None:
    """As a model does it: while the head is being loaded, what follows is computed and stored."""
    case = Case()
    with case.engine as engine:
        engine.store(TOKENS[: CHUNK + 1], [0, 1])
        head = [layer[:2].clone() for layer in case.layers]
        for layer in case.layers:
            layer[:2] = 0
        with (
            engine.retrieve_layers(TOKENS, [0, 1, 2, 3, 4, 5]) as reader,
            engine.store_layers(TOKENS, [0, 1, 2, 3, 4, 5]) as writer,
        ):
            assert (reader.tokens, writer.tokens) == (CHUNK, 3 * CHUNK)
            for number in range(LAYERS):
                reader.wait(number)
                assert torch.equal(case.layers[number][:2], head[number])
                writer.save(number)
        assert engine.lookup(TOKENS) == 3 * CHUNK


def test_other_threads_copy_between_two_layers() -> None:
    case = Case()
    case.stored()
    with case.engine as engine, engine.retrieve_layers(TOKENS, [4, 5, 6, 7, 8, 9]) as reader:
        reader.wait(0)
        other = threading.Thread(target=engine.store, args=([7] * CHUNK, [0, 1]))
        other.start()
        other.join(LIMIT)
        assert not other.is_alive()


def retrieve_and_close(engine: Engine) -> None:
    with engine.retrieve_layers(TOKENS, [4, 5, 6, 7, 8, 9]) as reader:
        engine.close()
        reader.wait(0)


def test_an_engine_that_was_closed_meanwhile_says_so() -> None:
    case = Case()
    case.stored()
    raised(ClosedError, "", retrieve_and_close, case.engine)
