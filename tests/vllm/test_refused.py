"""Models that lmkv does not cache: it says why at the start, and never hits."""

from __future__ import annotations

import logging
import os
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from tests.vllm.harness import ENVIRONMENT

FORM = {"block_size": 32, "num_kv_heads": 2, "head_size": 64, "dtype": torch.float32}


def mamba() -> Any:
    from vllm.v1.kv_cache_interface import MambaSpec

    return MambaSpec(block_size=32, shapes=((4, 4),), dtypes=(torch.float32,))


def chunked_local() -> Any:
    from vllm.v1.kv_cache_interface import ChunkedLocalAttentionSpec

    return ChunkedLocalAttentionSpec(**FORM, attention_chunk_size=64)


def cross_attention() -> Any:
    from vllm.v1.kv_cache_interface import CrossAttentionSpec

    return CrossAttentionSpec(**FORM)


@pytest.mark.parametrize("make", [mamba, chunked_local, cross_attention])
def test_a_layer_that_keeps_no_prefix(model: Path, make: Callable[[], Any], caplog: pytest.LogCaptureFixture) -> None:
    """Beside a layer of full attention, as in mixtures."""
    os.environ.update(ENVIRONMENT)
    from vllm.config import KVTransferConfig
    from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorRole
    from vllm.engine.arg_utils import EngineArgs
    from vllm.v1.kv_cache_interface import FullAttentionSpec, KVCacheConfig, KVCacheGroupSpec

    from lmkv.vllm.connector import LMKVConnector

    transfer = KVTransferConfig(kv_connector="LMKVConnector", kv_role="kv_both")
    vllm_config = EngineArgs(
        model=str(model), skip_tokenizer_init=True, kv_transfer_config=transfer
    ).create_engine_config()
    groups = [KVCacheGroupSpec(["attention"], FullAttentionSpec(**FORM)), KVCacheGroupSpec(["odd"], make())]
    with caplog.at_level(logging.WARNING, logger="lmkv"):
        connector = LMKVConnector(vllm_config, KVConnectorRole.SCHEDULER, KVCacheConfig(100, [], groups))
    assert any("this model is not cached" in record.getMessage() for record in caplog.records)
    request: Any = SimpleNamespace(request_id="r", num_tokens=1000, all_token_ids=list(range(1000)))
    connector.on_new_request(request)
    assert connector.get_num_new_matched_tokens(request, 0) == (0, False)
    connector.shutdown()


def test_a_device_without_copier(
    model: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Both sides say so once, and vLLM serves without lmkv: no order is ever made that would fail."""
    os.environ.update(ENVIRONMENT)
    from vllm.config import KVTransferConfig
    from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorRole
    from vllm.engine.arg_utils import EngineArgs
    from vllm.v1.kv_cache_interface import FullAttentionSpec, KVCacheConfig, KVCacheGroupSpec

    from lmkv.vllm.connector import LMKVConnector

    transfer = KVTransferConfig(kv_connector="LMKVConnector", kv_role="kv_both")
    vllm_config = EngineArgs(
        model=str(model), skip_tokenizer_init=True, kv_transfer_config=transfer
    ).create_engine_config()
    monkeypatch.setattr(vllm_config.device_config, "device_type", "xpu")
    groups = [KVCacheGroupSpec(["attention"], FullAttentionSpec(**FORM))]
    for role in KVConnectorRole:
        caplog.clear()
        with caplog.at_level(logging.WARNING, logger="lmkv"):
            connector = LMKVConnector(vllm_config, role, KVCacheConfig(100, [], groups))
            connector.register_kv_caches({})
        [record] = [found for found in caplog.records if found.name.startswith("lmkv")]
        assert "this is a device of type 'xpu'" in record.getMessage()
        connector.shutdown()


def test_the_padding_of_a_page_is_no_part_of_it() -> None:
    """vLLM pads pages where layers of several sizes share memory; tensors are views of what is in them."""
    os.environ.update(ENVIRONMENT)
    from vllm.v1.kv_cache_interface import FullAttentionSpec, KVCacheConfig, KVCacheGroupSpec

    from lmkv.vllm.compat import kv_groups

    plain = FullAttentionSpec(**FORM)
    padded = FullAttentionSpec(**FORM, page_size_padded=2 * plain.page_size_bytes)
    assert padded.page_size_bytes == 2 * plain.page_size_bytes
    config = KVCacheConfig(num_blocks=8, kv_cache_tensors=[], kv_cache_groups=[KVCacheGroupSpec(["layer"], padded)])
    assert kv_groups(config)[0].page_bytes == (plain.page_size_bytes,)
