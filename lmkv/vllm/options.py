"""What a single request may ask of lmkv, through vLLM's `kv_transfer_params`."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Self

from attrs import define


@define
class RequestOptions:
    """What the keys mean, each with the prefix `lmkv.`:

    `skip_save`, `skip_load`: leave this request out. `report`: answer with what was loaded. `prefetch`: bring
    up and hold this prompt's chunks. `prefetch_tokens`: token ids of another prompt to bring up.
    `pin`: seconds to hold the request's chunks after it ends. `tag.<name>`: share only with equal tags.
    """

    skip_save: bool = False
    skip_load: bool = False
    report: bool = False
    prefetch: bool = False
    prefetch_tokens: tuple[int, ...] = ()
    pin_seconds: float = 0.0
    tags: tuple[tuple[str, str], ...] = ()

    @classmethod
    def of(cls, request: Any) -> Self:
        """Read them off a request. Prompts given as embeddings have no tokens to be found by: no caching."""
        params = getattr(request, "kv_transfer_params", None)
        params = params if isinstance(params, Mapping) else {}
        nameless = getattr(request, "prompt_embeds", None) is not None
        return cls(
            skip_save=nameless or _is_true(params.get("lmkv.skip_save")),
            skip_load=nameless or _is_true(params.get("lmkv.skip_load")),
            report=_is_true(params.get("lmkv.report")),
            prefetch=_is_true(params.get("lmkv.prefetch")),
            prefetch_tokens=_token_ids(params.get("lmkv.prefetch_tokens")),
            pin_seconds=_seconds(params.get("lmkv.pin")),
            tags=tuple(
                sorted((str(k)[9:], str(v)) for k, v in params.items() if str(k).startswith("lmkv.tag."))
            ),
        )


def _is_true(value: object) -> bool:
    return value is True or (isinstance(value, str) and value.lower() in ("1", "true", "yes", "on"))


def _token_ids(value: object) -> tuple[int, ...]:
    """What is not a list of token ids is ignored: a client's mistake must not cost the request."""
    if not isinstance(value, list | tuple):
        return ()
    valid = all(isinstance(token, int) and 0 <= token < 2**32 for token in value)
    return tuple(value) if valid else ()


def _seconds(value: object) -> float:
    return float(value) if isinstance(value, int | float) and 0 < value < 86_400 else 0.0
