"""`build_pd_openai_app`: builds a Ray Serve application with separate servers for prefill and decode, which accepts
lmkv's request options.

Ray's own application rejects requests in which the client sets `kv_transfer_params`. This module needs Ray 2.60,
because it uses Ray's internals.
"""

from __future__ import annotations

import functools
from typing import TYPE_CHECKING, Any

from ray.llm._internal.serve.engines.vllm.kv_transfer.base import BaseConnectorBackend, DefaultPDProtocolMixin
from ray.llm._internal.serve.engines.vllm.kv_transfer.factory import KVConnectorBackendFactory
from ray.serve import llm

if TYPE_CHECKING:
    from ray.serve import Application

NAME = "LMKVConnector"


class LMKVBackend(DefaultPDProtocolMixin, BaseConnectorBackend):
    """Builds the prefill request and the decode request from a client's request, and keeps lmkv's options in both
    requests.
    """

    def prepare_prefill_request(self, *, request: Any, peer: dict[str, Any] | None) -> Any:
        return _shaped(super().prepare_prefill_request, request, peer=peer)

    def prepare_decode_request(self, *, request: Any, peer: dict[str, Any] | None, prefill_response: Any) -> Any:
        return _shaped(super().prepare_decode_request, request, peer=peer, prefill_response=prefill_response)


def _shaped(shape: Any, request: Any, **more: Any) -> Any:
    asked: dict[str, Any] = request.kv_transfer_params or {}
    shaped = shape(request=request.model_copy(update={"kv_transfer_params": None}), **more)
    shaped.kv_transfer_params = {**(shaped.kv_transfer_params or {}), **asked}
    return shaped


@functools.wraps(llm.build_pd_openai_app)
def build_pd_openai_app(pd_serving_args: dict[str, Any]) -> Application:
    if not KVConnectorBackendFactory.is_registered(NAME):
        KVConnectorBackendFactory.register_backend(NAME, f"{__name__}:{LMKVBackend.__name__}")
    return llm.build_pd_openai_app(pd_serving_args)
