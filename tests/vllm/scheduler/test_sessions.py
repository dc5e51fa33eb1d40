"""Inputs that are streamed into a session: the request that vLLM has of it grows, and images come later."""

from __future__ import annotations

from lmkv.protocols import ChunkKey
from tests.vllm.scheduler.requests_kept_apart import image
from tests.vllm.scheduler.simulated_vllm import SimulatedRequest, SimulatedVLLM, request_for, state_of

FIRST, PLACEHOLDERS = list(range(11)), [7] * 20


def keys(engine: SimulatedVLLM, request: SimulatedRequest) -> list[ChunkKey]:
    """Of three chunks of eight tokens, and of the tail."""
    found = state_of(engine.scheduler, request).keys_with_tail(3)
    engine.scheduler.request_finished(request)
    return found


def streamed(engine: SimulatedVLLM, picture: str) -> list[ChunkKey]:
    """As vLLM streams: a text, a token that is sampled and thrown away, and then an image."""
    request = request_for("streams", FIRST)
    engine.scheduler.on_new_request(request)
    request.all_token_ids.append(49)
    del request.all_token_ids[len(FIRST) :]
    request.mm_features.append(image(picture, len(FIRST), len(PLACEHOLDERS)))
    request.all_token_ids += PLACEHOLDERS
    request.num_prompt_tokens = request.num_tokens
    return keys(engine, request)


def whole(engine: SimulatedVLLM, *pictures: str) -> list[ChunkKey]:
    """Of the same prompt, all at once."""
    tokens = [*FIRST, *PLACEHOLDERS]
    request = request_for("whole", tokens)
    request.mm_features += [image(picture, len(FIRST), len(PLACEHOLDERS)) for picture in pictures]
    return keys(engine, request)


def test_an_image_that_is_streamed_decides_the_keys(engine: SimulatedVLLM) -> None:
    one, two = streamed(engine, "one"), streamed(engine, "two")
    assert len(one) == len(two) == 4
    assert one[0] == two[0]
    assert not set(one[1:]) & set(two[1:])
    assert not set(one[1:]) & set(whole(engine)), "whoever writes placeholders finds no image"
    assert one == whole(engine, "one")


def test_a_token_that_was_thrown_away_is_in_no_key(engine: SimulatedVLLM) -> None:
    """It was the last of a chunk, and its request was looked up before the next input came."""
    request = request_for("streams", range(15))
    engine.scheduler.on_new_request(request)
    request.all_token_ids.append(49)
    assert len(state_of(engine.scheduler, request).keys(2)) == 2
    request.all_token_ids[15:] = PLACEHOLDERS
    request.num_prompt_tokens = request.num_tokens
    fresh = request_for("fresh", request.all_token_ids)
    assert keys(engine, request)[:2] == keys(engine, fresh)[:2]
