"""Arbitrary calls of an engine over arbitrary tensors, and arbitrary configuration.

Either a documented error, or right bytes: a retrieved block has the values that were stored for its tokens,
and no other byte of the tensors' memory, the canaries between and around their blocks included, has changed.
"""

from __future__ import annotations

import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager
from pathlib import Path
from typing import Any

import torch
from attrs import define, evolve, field, frozen
from hypothesis import event, given, settings, strategies as st

from lmkv import Config, Engine
from lmkv.config import lmcache
from lmkv.errors import ConfigError, UsageError
from tests.kit import LIMIT, MEMORY

CANARY = 0xA5
BLOCK, PAGES = 4, 2
CHUNK = BLOCK * PAGES
ALIKE = {torch.float32: torch.int32, torch.bfloat16: torch.int16, torch.int8: torch.uint8, torch.int64: torch.float64}
"""Types of the same size."""


@frozen
class Layer:
    """How a tensor lies in memory: `inner`, the order of axes inside a block; `gap`, items between blocks."""

    dtype: torch.dtype
    heads: int
    inner: tuple[int, int]
    blocks: int
    axis: int
    gap: int

    def build(self) -> tuple[torch.Tensor, torch.Tensor]:
        """`(memory, tensor)`: all bytes, and [block, token, head] or [2, block, token, head] among them."""
        shape = (BLOCK, self.heads)
        strides = (self.heads, 1) if self.inner == (0, 1) else (1, BLOCK)
        item = torch.empty(0, dtype=self.dtype).element_size()
        step = BLOCK * self.heads + self.gap
        planes = 2 if self.axis else 1
        first = 8
        total = (2 * first + planes * self.blocks * step) * item
        memory = torch.full((total,), CANARY, dtype=torch.uint8)
        sizes, steps = (self.blocks, *shape), (step, *strides)
        if self.axis:
            sizes, steps = (2, *sizes), (self.blocks * step, *steps)
        return memory, torch.as_strided(memory.view(self.dtype), sizes, steps, first)


layers = st.builds(
    Layer, dtype=st.sampled_from(sorted(ALIKE, key=str)), heads=st.integers(1, 3), blocks=st.just(9), axis=st.just(0),
    inner=st.sampled_from([(0, 1), (1, 0)]), gap=st.sampled_from([0, 0, 2]),
)  # fmt: skip


@st.composite
def models(draw: st.DrawFn) -> list[Layer]:
    """One block axis for all; sometimes a layer with fewer blocks than the others."""
    axis = draw(st.sampled_from([0, 0, 1]))
    found = [evolve(layer, axis=axis) for layer in draw(st.lists(layers, min_size=1, max_size=3))]
    if draw(st.integers(1, 100)) > 80:
        found[-1] = evolve(found[-1], blocks=5)
    return found


@st.composite
def mostly(draw: st.DrawFn, valid: st.SearchStrategy[Any], other: st.SearchStrategy[Any]) -> Any:
    """Most draws valid: a history in which every second call is refused tries little."""
    return draw(valid if draw(st.integers(1, 100)) > 12 else other)


whole = st.permutations(range(9)).map(lambda order: order[:8])
ids = mostly(
    st.one_of(whole, whole.map(torch.tensor), st.lists(st.integers(0, 8), min_size=4, max_size=9)),
    st.one_of(
        st.lists(st.integers(-2, 10), max_size=9),
        st.lists(st.one_of(st.integers(0, 8), st.floats(0, 8), st.booleans(), st.none()), max_size=9),
        whole.map(lambda found: [block + 0.5 for block in found]),
        whole.map(lambda found: torch.tensor(found, dtype=torch.float32)),
        st.sampled_from([None, "01234567", 3, {0: 1}, [[0, 1]], b"\x00\x01\x02\x03"]),
    ),
)
chains = st.lists(st.integers(0, 1), max_size=3).map(lambda chunks: [0, *chunks])
prompts = mostly(
    chains.map(lambda chunks: [token for token in chunks for _ in range(CHUNK)]),
    st.one_of(
        st.lists(st.integers(0, 1), max_size=5 * CHUNK),
        st.lists(st.one_of(st.integers(-1, 2**33), st.floats()), max_size=2 * CHUNK),
        st.sampled_from([None, "tokens", {1: 2}, [[1, 2]] * CHUNK, 5]),
    ),
)
skips = mostly(
    st.sampled_from([0, 0, 0, 1, CHUNK, CHUNK + 1, 3 * CHUNK]),
    st.one_of(st.integers(-2 * CHUNK, -1), st.sampled_from([None, 1.5, "8", True])),
)


@define
class Machine:
    """An engine over memory with canaries. `stored`: by the tokens of a prefix, pages of each layer."""

    model: list[Layer]
    folder: Path
    stored: dict[tuple[int, ...], list[list[torch.Tensor]]]
    built: list[tuple[torch.Tensor, torch.Tensor]] = field(init=False)
    engine: Engine = field(init=False)

    def __attrs_post_init__(self) -> None:
        self.built = [layer.build() for layer in self.model]
        generator = torch.Generator().manual_seed(len(self.stored))
        for _, tensor in self.built:
            tensor.copy_(torch.randint(-50, 50, tensor.shape, generator=generator))
        below = {"local_disk": str(self.folder), "max_local_disk_size": 0.1, "disk_min_free": 0, "disk_io_threads": 2}
        config = Config(chunk_size=CHUNK, max_local_cpu_size=0.0005, **below)  # type: ignore[arg-type]
        tensors = [tensor for _, tensor in self.built]
        axis = self.model[0].axis
        self.engine = Engine.open(tensors, block_size=BLOCK, model="fuzz", config=config, block_axis=axis)
        assert self.engine.wait_indexed(LIMIT)

    def page(self, layer: int, block: int) -> torch.Tensor:
        return self.built[layer][1].select(self.model[layer].axis, block)

    def snapshot(self) -> list[torch.Tensor]:
        return [memory.clone() for memory, _ in self.built]

    def unchanged(self, before: list[torch.Tensor]) -> None:
        assert all(torch.equal(now, then) for (now, _), then in zip(self.built, before, strict=True))

    def store(self, tokens: Any, blocks: Any, wait: float) -> None:
        before = self.snapshot()
        found = self.engine.lookup(tokens)
        done = self.engine.store(tokens, blocks, wait=wait)
        self.unchanged(before)
        for first in range(found, done, CHUNK):
            own = [int(block) for block in blocks[first // BLOCK : (first + CHUNK) // BLOCK]]
            pages = [[self.page(layer, block).clone() for block in own] for layer in range(len(self.model))]
            self.stored[tuple(tokens[: first + CHUNK])] = pages
        event(f"stored {int(done > found)}")

    def retrieve(self, tokens: Any, blocks: Any, skip: Any) -> None:
        before = self.snapshot()
        done = self.engine.retrieve(tokens, blocks, skip_tokens=skip)
        assert 0 <= done <= len(tokens)
        first = min(skip // CHUNK * CHUNK, done)
        filled: dict[int, tuple[tuple[int, ...], int]] = {}
        for at in range(first, done, BLOCK):
            end = (at // CHUNK + 1) * CHUNK
            filled[int(blocks[at // BLOCK])] = tuple(tokens[:end]), at // BLOCK % PAGES
        for block, (prefix, page) in filled.items():
            for layer in range(len(self.model)):
                found = self.page(layer, block)
                assert torch.equal(found, self.stored[prefix][layer][page]), "other values came back"
                # Where they belong and nowhere else: put back what was there, then all must be as before.
                found.copy_(self.page_of(before[layer], layer, block))
        self.unchanged(before)
        event(f"retrieved {min(done - first, 1)}")

    def page_of(self, memory: torch.Tensor, layer: int, block: int) -> torch.Tensor:
        tensor = self.built[layer][1]
        view = torch.as_strided(memory.view(tensor.dtype), tensor.size(), tensor.stride(), tensor.storage_offset())
        return view.select(self.model[layer].axis, block)


@contextmanager
def documented() -> Iterator[None]:
    try:
        yield
    except UsageError as error:
        assert len(str(error)) < 500  # noqa: PT017
        event("refused")


calls = st.one_of(
    st.tuples(st.just("store"), prompts, ids, st.sampled_from([0.0, LIMIT])),
    st.tuples(st.just("retrieve"), prompts, ids, skips),
)


def same(model: list[Layer]) -> list[Layer]:
    return model


def transposed(model: list[Layer]) -> list[Layer]:
    """The same shapes, other strides."""
    return [evolve(layer, inner=layer.inner[::-1]) for layer in model]


def retyped(model: list[Layer]) -> list[Layer]:
    """Another type of the last layer."""
    return [*model[:-1], evolve(model[-1], dtype=ALIKE[model[-1].dtype])]


sessions = st.lists(
    st.tuples(st.sampled_from([same, same, transposed, retyped]), st.lists(calls, min_size=4, max_size=9)),
    min_size=1,
    max_size=3,
)


@given(models(), sessions)
def test_any_calls_over_any_tensors(
    first: list[Layer], sessions: list[tuple[Callable[[list[Layer]], list[Layer]], list[tuple[Any, ...]]]]
) -> None:
    """Engines one after the other over one folder: of the same layout, or of another."""
    kept: dict[tuple[object, ...], dict[Any, Any]] = {}
    with tempfile.TemporaryDirectory(prefix="lmkv-fuzz-", dir=MEMORY) as folder:
        for other, actions in sessions:
            model = other(first)
            # The blocks' places differ between engines, the meaning of a chunk does not depend on them.
            identity = tuple((layer.dtype, layer.heads, layer.inner, layer.axis) for layer in model)
            with documented():
                machine = Machine(model, Path(folder), kept.setdefault(identity, {}))
                with closing(machine.engine):
                    for verb, *arguments in actions:
                        with documented():
                            getattr(machine, verb)(*arguments)
                    assert machine.engine.drain(LIMIT)


# -- configuration -------------------------------------------------------------------------------------

names = st.sampled_from([setting.name for setting in Config().describe()])
spellings = st.one_of(
    st.sampled_from(
        ["none", "Null", "false", "False", "no", "off", "./none", "file:///none", "yes", "on", "~", "'off'"]
    ),
    st.from_regex(r"[-+]?[0-9]{1,3}([_:.eExo][0-9]{1,3}){0,3}", fullmatch=True),
)
values = st.recursive(
    st.one_of(
        *(st.none(), st.booleans(), st.integers(), st.floats(), st.text(max_size=20), st.binary(max_size=4)),
        st.integers(10**300, 10**310),
        spellings,
        st.sampled_from(["file:///a?b", "file:/a", "/a\0b", " /a", "1e999", "on", "LRU", "9" * 5000]),
    ),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=3), inner, max_size=3),
    max_leaves=8,
)
lmcaches = st.sampled_from([*lmcache.table(), "extra_config", "nothing"])
keys = st.one_of(
    names,
    names.map(lambda name: f"lmkv.{name}"),
    lmcaches.map(lambda name: f"lmcache.{name}"),
    st.text(max_size=20),
    st.integers(),
)


def loads_or_refuses(load: Callable[[], Config]) -> None:
    started = time.process_time()
    try:
        config = load()
        shown = {setting.name: setting.value for setting in config.describe()}
        # URLs with passwords are masked.
        secrets = ("remote_url", "remote_urls", "remote_password", "agent_token", "authentication_key")
        masked = {name: getattr(config, name) for name in secrets}
        assert Config(**{**shown, **masked}) == config
        event("loaded")
    except ConfigError as error:
        assert len(str(error)) < 2000  # noqa: PT017
    assert time.process_time() - started < 5.0, "a message must not cost more than what it speaks of"


@given(
    st.dictionaries(keys, values, max_size=4)
    | st.dictionaries(lmcaches.map(lambda name: f"lmcache.{name}"), values, max_size=4)
)
def test_any_extra_configuration(extra: dict[Any, object]) -> None:
    loads_or_refuses(lambda: Config.load(env={}, extra=extra))


@given(
    st.one_of(
        st.binary(max_size=300),
        st.text(max_size=300).map(str.encode),
        st.lists(st.tuples(names, spellings | st.text(max_size=30)), max_size=4).map(
            lambda rows: "\n".join(f"{name}: {value}" for name, value in rows).encode("utf-8", "replace")
        ),
        st.text(alphabet="[]{}:,&*!|>-'\"# \nab019.", max_size=400).map(str.encode),
    )
)
def test_any_file(content: bytes) -> None:
    with tempfile.NamedTemporaryFile(dir=MEMORY) as file:
        file.write(content)
        file.flush()
        loads_or_refuses(lambda: Config.load(env={}, file=file.name))


variables = st.one_of(
    names.map(lambda name: f"LMKV_{name.upper()}"), lmcaches.map(lambda name: f"LMCACHE_{name.upper()}")
)


@given(st.dictionaries(variables, st.text(max_size=20) | spellings, max_size=4))
@settings(max_examples=200)
def test_any_environment(env: dict[str, str]) -> None:
    loads_or_refuses(lambda: Config.load(env=env))
