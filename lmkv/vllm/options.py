"""What a single request may ask of lmkv, through vLLM's `kv_transfer_params`."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Self

from attrs import define


@define
class RequestOptions:
    """`lmkv.skip_save`, `lmkv.skip_load`, `lmkv.report`, and `lmkv.tag.<name>` which separates keys."""

    skip_save: bool = False
    skip_load: bool = False
    report: bool = False
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
            tags=tuple(
                sorted((str(k)[9:], str(v)) for k, v in params.items() if str(k).startswith("lmkv.tag."))
            ),
        )


def _is_true(value: object) -> bool:
    return value is True or (isinstance(value, str) and value.lower() in ("1", "true", "yes", "on"))
