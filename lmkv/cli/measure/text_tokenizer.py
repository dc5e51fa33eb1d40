"""A byte-level tokenizer with a chat template, so that text and chats work without a download."""

from __future__ import annotations

import json
from collections.abc import Iterable
from pathlib import Path
from typing import Any

END_OF_TURN = "<|im_end|>"
SPECIAL = ("<|endoftext|>", "<|im_start|>", END_OF_TURN)
CHAT_TEMPLATE = (
    "{% if tools %}<|im_start|>system\n{{ tools | tojson }}<|im_end|>\n{% endif %}"
    "{% for message in messages %}<|im_start|>{{ message.role }}\n{{ message.content or '' }}"
    "{% for call in message.tool_calls or [] %}<tool_call>{{ call.function | tojson }}</tool_call>{% endfor %}"
    "<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


def write_text_tokenizer(folder: Path, size: int, texts: Iterable[str] = ()) -> None:
    """Write a tokenizer of `size` tokens into `folder`. Without texts each byte is one token.

    With texts, their most frequent pairs of bytes are tokens too.
    """
    from transformers import PreTrainedTokenizerFast

    wrapped: Any = PreTrainedTokenizerFast(
        tokenizer_object=_filled_up(_trained(size, texts), size),
        eos_token=END_OF_TURN,
        additional_special_tokens=list(SPECIAL),
        clean_up_tokenization_spaces=False,
    )
    wrapped.chat_template = CHAT_TEMPLATE
    wrapped.save_pretrained(folder)


def _trained(size: int, texts: Iterable[str]) -> Any:
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(
        vocab_size=size, special_tokens=list(SPECIAL), initial_alphabet=alphabet, show_progress=False
    )
    tokenizer.train_from_iterator(texts, trainer)
    return tokenizer


def _filled_up(tokenizer: Any, size: int) -> Any:
    """Fill the vocabulary up to `size` with tokens that no text has: a model with random weights generates any id.

    Such an id is decoded as a blank and its number.
    """
    described = json.loads(tokenizer.to_str())
    vocabulary = described["model"]["vocab"]
    vocabulary.update({f"Ġ<{token}>": token for token in range(len(vocabulary), size)})
    return type(tokenizer).from_str(json.dumps(described))
