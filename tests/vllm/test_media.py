"""Images on a real model: whatever an image is called, a hit is one of its own."""

from __future__ import annotations

from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

import pytest

from tests.vllm.harness import Engine, engine, external_hits, generated, over_disk, parameters

SIDE, IMAGE_TOKENS = 56, 96
TEXT = "describe this please " * 8
WITHOUT_HASHES = {"mm_processor_cache_gb": 0, "enable_prefix_caching": False}
"""vLLM then names images by a counter, which begins anew with each process."""


def write_blip2(folder: Path) -> Path:
    """A BLIP-2 with random weights, whose answers depend on the image, and a token for each byte of text."""
    import torch
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers
    from transformers import (
        Blip2Config,
        Blip2ForConditionalGeneration,
        Blip2Processor,
        Blip2QFormerConfig,
        Blip2VisionConfig,
        OPTConfig,
        PreTrainedTokenizerFast,
    )
    from transformers.models.blip.image_processing_pil_blip import BlipImageProcessorPil

    vocabulary = {letter: number for number, letter in enumerate(sorted(pre_tokenizers.ByteLevel.alphabet()))}
    letters = Tokenizer(models.BPE(vocab={**vocabulary, "<eos>": 256, "<image>": 257}, merges=[]))
    letters.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    letters.decoder = decoders.ByteLevel()
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=letters, eos_token="<eos>", pad_token="<eos>", additional_special_tokens=["<image>"]
    )
    small = {"num_hidden_layers": 2, "num_attention_heads": 2}
    inner = {"hidden_size": 64, "intermediate_size": 128}
    config = Blip2Config(
        vision_config=Blip2VisionConfig(image_size=SIDE, patch_size=14, **inner, **small),
        qformer_config=Blip2QFormerConfig(vocab_size=320, encoder_hidden_size=64, **inner, **small),
        text_config=OPTConfig(
            vocab_size=320, hidden_size=128, word_embed_proj_dim=128, ffn_dim=256, max_position_embeddings=4096,
            bos_token_id=256, eos_token_id=256, pad_token_id=256, **small,
        ),
        num_query_tokens=IMAGE_TOKENS,
        image_token_index=257,
    )  # fmt: skip
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        model = Blip2ForConditionalGeneration(config).to(torch.float32)
        for name, parameter in model.named_parameters():
            if parameter.ndim > 1:
                torch.nn.init.normal_(parameter, std=1.0 if "language_projection" in name else 0.15)
        model.save_pretrained(folder)
    images = BlipImageProcessorPil(size={"height": SIDE, "width": SIDE})
    Blip2Processor(image_processor=images, tokenizer=tokenizer, num_query_tokens=IMAGE_TOKENS).save_pretrained(folder)
    return folder


@pytest.fixture(scope="module")
def blip2(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_blip2(tmp_path_factory.mktemp("blip2"))


def shown(blip2: Path, folder: Path, **options: Any) -> AbstractContextManager[Engine]:
    return over_disk(blip2, folder, extra={"chunk_size": 64, **options.pop("extra", {})}, **with_images(options))


def with_images(options: dict[str, Any]) -> dict[str, Any]:
    return {"skip_tokenizer_init": False, "limit_mm_per_prompt": {"image": 1}, **options}


def asks(running: Engine, colour: str, name: str | None = None) -> Any:
    """The answer to the same text with a picture of that colour, which the client may name."""
    from PIL import Image

    picture = {"prompt": TEXT, "multi_modal_data": {"image": Image.new("RGB", (SIDE, SIDE), colour)}}
    if name is not None:
        picture["multi_modal_uuids"] = {"image": [name]}
    [output] = running.llm.generate([picture], parameters(**{"lmkv.report": True}), use_tqdm=False)
    return output


def answer(output: Any) -> list[int]:
    return generated([output])[0]


@pytest.fixture(scope="module")
def expected(blip2: Path) -> dict[str, list[int]]:
    with engine(blip2, connector=None, **with_images(WITHOUT_HASHES)) as plain:
        found = {colour: answer(asks(plain, colour)) for colour in ("red", "blue")}
    assert found["red"] != found["blue"]
    return found


@pytest.mark.parametrize(
    ("options", "name"),
    [(WITHOUT_HASHES, None), (WITHOUT_HASHES, "mine"), ({}, "mine"), ({}, None)],
    ids=["counters", "a client's name, without caches", "a client's name", "hashes"],
)
def test_another_image_of_the_same_name_is_not_hit(
    blip2: Path, tmp_path: Path, expected: dict[str, list[int]], options: dict[str, Any], name: str | None
) -> None:
    """After a restart over the same disk: the first image of each process, or the one that a client names so."""
    with shown(blip2, tmp_path, **options) as first:
        assert answer(asks(first, "red", name)) == expected["red"]
    with shown(blip2, tmp_path, **options) as second:
        blue = asks(second, "blue", name)
        assert answer(blue) == expected["blue"]
        assert external_hits(blue) < 64, "no chunk that has the image"
    with shown(blip2, tmp_path, **options) as third:
        red = asks(third, "red", name)
        assert answer(red) == expected["red"]
        assert external_hits(red) == len(red.prompt_token_ids) - 1
        third.assert_nothing_leaked()


def test_who_names_his_image_by_the_hash_of_anothers_poisons_nothing(
    blip2: Path, tmp_path: Path, expected: dict[str, list[int]]
) -> None:
    seen: list[str] = []
    with shown(blip2, tmp_path / "of somebody else") as victim:
        add = victim.scheduler.add_request

        def noted(request: Any) -> None:
            seen.extend(feature.identifier for feature in request.mm_features)
            add(request)

        victim.scheduler.add_request = noted
        asks(victim, "red")
    with shown(blip2, tmp_path / "shared") as attacker:
        assert answer(asks(attacker, "blue", seen[0])) == expected["blue"]
    with shown(blip2, tmp_path / "shared") as restarted:
        red = asks(restarted, "red")
        assert answer(red) == expected["red"]
        assert external_hits(red) < 64


def test_in_one_process_two_images_of_one_name_are_vllms_affair_and_stored_by_nobody(
    blip2: Path, tmp_path: Path, expected: dict[str, list[int]]
) -> None:
    """vLLM answers by what it has cached under the name; what it computes from that is not stored as the other's."""
    options = {"mm_processor_cache_gb": 0}
    with shown(blip2, tmp_path, **options) as running:
        asks(running, "red", "mine")
        asks(running, "blue", "mine")
        running.assert_nothing_leaked()
    with shown(blip2, tmp_path, **options) as restarted:
        blue = asks(restarted, "blue")
        assert answer(blue) == expected["blue"]
        assert external_hits(blue) < 64


def test_names_that_the_operator_vouches_for_are_enough(blip2: Path, tmp_path: Path) -> None:
    """Also where vLLM's scheduler has no tensors. Whoever gives two images one name gets the first one's answer."""
    trusting = {"extra": {"media_by_name": True}, "mm_processor_cache_type": "shm", "enable_prefix_caching": False}
    with shown(blip2, tmp_path, **trusting) as running:
        cold, warm = asks(running, "red", "mine"), asks(running, "red", "mine")
    assert external_hits(cold) == 0
    assert external_hits(warm) == len(warm.prompt_token_ids) - 1
    assert answer(warm) == answer(cold)


def test_an_image_that_was_encoded_with_earlier_weights_is_not_cached(
    blip2: Path, tmp_path: Path, expected: dict[str, list[int]]
) -> None:
    """vLLM keeps what it has encoded until it is told to reset that, too."""

    def change(network: Any) -> None:
        network.language_projection.weight.data.mul_(-1)

    with shown(blip2, tmp_path) as running:
        assert answer(asks(running, "red")) == expected["red"]
        running.llm.apply_model(change)
        assert running.llm.reset_prefix_cache()
        stale = asks(running, "red")
        assert external_hits(stale) == 0
        core = running.llm.llm_engine.engine_core.engine_core
        core.reset_encoder_cache()
        assert running.llm.reset_prefix_cache()
        fresh = asks(running, "red")
        assert external_hits(fresh) < 64, "no chunk that has the image"
        assert answer(fresh) != expected["red"]
    with shown(blip2, tmp_path) as restarted:
        restarted.llm.apply_model(change)
        again = asks(restarted, "red")
        assert answer(again) == answer(fresh)
        assert external_hits(again) == len(again.prompt_token_ids) - 1
