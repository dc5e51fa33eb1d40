"""Images, sounds and videos in keys: what the model sees of them, whatever they are called."""

from __future__ import annotations

import tracemalloc
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from hypothesis import given, strategies as st

from lmkv.vllm.plan.identity import Media, UnnamedMediaError, digest_of
from tests.tables import raised
from tests.vllm.scheduler.requests_kept_apart import image
from tests.vllm.scheduler.simulated_vllm import request_for
from tests.vllm.scheduler.test_explain import engine_of


def asked(*items: Any) -> Any:
    return SimpleNamespace(mm_features=list(items))


def test_items_mark_the_chunks_they_overlap() -> None:
    media = Media()
    one = media.extras(asked(image("x", 250, 10)), 256)
    assert set(one) == {0, 1}
    assert one != media.extras(asked(image("y", 250, 10)), 256)
    assert one != media.extras(asked(image("x", 251, 10)), 256)
    assert media.extras(asked(), 256) == {}
    sound = image("x", 250, 10)
    sound.modality = "audio"
    assert one != media.extras(asked(sound), 256)


def test_the_content_counts_and_not_its_name() -> None:
    """Counters begin anew with each process, and clients may name an item by the hash of another one."""
    by_hash = Media().extras(asked(image("red", 0)), 16)
    assert Media().extras(asked(image("red", 0, identifier="renderer0-mm-1-image-0")), 16) == by_hash
    assert Media().extras(asked(image("blue", 0, identifier="red")), 16) != by_hash


def test_two_contents_of_one_name_have_no_identity() -> None:
    """vLLM looks its caches up by the name alone: it may compute with the first one's embeddings."""
    media = Media()
    media.extras(asked(image("red", 0, identifier="mine")), 16)
    for _ in range(2):
        with pytest.raises(UnnamedMediaError, match="cached another item"):
            media.extras(asked(image("blue", 0, identifier="mine")), 16)
    assert media.extras(asked(image("red", 0, identifier="mine")), 16)
    assert media.extras(asked(image("blue", 0)), 16)


@pytest.mark.parametrize("by_name", [False, True])
def test_long_names_take_no_memory(by_name: bool) -> None:
    """vLLM takes a name of any length from a client, and 65,536 are remembered."""
    media = Media(by_name)
    tracemalloc.start()
    try:
        for number in range(100):
            media.extras(asked(image("red", 0, identifier=f"{number}{'x' * 1_000_000}")), 16)
        assert tracemalloc.get_traced_memory()[0] < 10 << 20
    finally:
        tracemalloc.stop()


@pytest.mark.parametrize("data", [None, {}, {"pixel_values": None}, {"pixel_values": SimpleNamespace(data=None)}])
def test_an_item_without_its_tensors_has_no_identity(data: Any) -> None:
    item = image("red", 0)
    item.data = data
    raised(UnnamedMediaError, "the scheduler does not have", lambda: Media().extras(asked(item), 16))


tensors = st.one_of(
    st.lists(st.integers(0, 3), max_size=4).map(lambda found: torch.tensor(found, dtype=torch.uint8)),
    st.lists(st.integers(0, 3), max_size=4).map(lambda found: torch.tensor(found, dtype=torch.int16)),
    st.just(torch.zeros(2, 0)),
    st.just(torch.zeros(())),
    st.just(torch.zeros(2, 2, dtype=torch.bfloat16)),
    st.integers(0, 2),
    st.sampled_from(["", "a"]),
)
items = st.dictionaries(
    st.sampled_from(["a", "b", "ab"]), st.one_of(tensors, st.lists(tensors, max_size=3)), min_size=1
)


def described(value: Any) -> Any:
    """The same in a form that can be compared."""
    if isinstance(value, torch.Tensor):
        return "tensor", str(value.dtype), tuple(value.shape), value.float().tolist()
    if isinstance(value, list):
        return "list", [described(part) for part in value]
    return type(value).__name__, value


@given(one=items, other=items)
def test_digests_are_equal_where_names_and_tensors_are(one: dict[str, Any], other: dict[str, Any]) -> None:
    same = {name: described(each) for name, each in one.items()} == {
        name: described(each) for name, each in other.items()
    }
    assert (digest_of(one) == digest_of(other)) is same
    elements = {name: SimpleNamespace(data=each) for name, each in one.items()}
    assert digest_of(elements) == digest_of(one)


def test_a_tensor_that_is_a_view_has_its_own_content() -> None:
    whole = torch.arange(12, dtype=torch.int32).reshape(3, 4)
    assert digest_of({"x": whole.T}) == digest_of({"x": whole.T.contiguous()}) != digest_of({"x": whole.reshape(4, 3)})


def test_a_request_whose_item_has_no_identity_neither_stores_nor_loads() -> None:
    tokens = list(range(40))
    with engine_of() as engine:
        for name, picture in (("first", "red"), ("second", "blue"), ("third", "red")):
            request = request_for(name, tokens)
            request.mm_features.append(image(picture, 8, 8, identifier="mine"))
            engine.scheduler.on_new_request(request)
            options = engine.scheduler.requests[name].options
            assert (options.skip_save, options.skip_load) == ((picture == "blue",) * 2)
            engine.scheduler.request_finished(request)
