"""Registers `LMKVConnector` with vLLM: the entry point of the group `vllm.general_plugins`."""

from __future__ import annotations

NAME = "LMKVConnector"
MODULE = "lmkv.vllm.connector"


def register() -> None:
    """Called by vLLM in each of its processes, possibly more than once. Never raises: that would end vLLM."""
    try:
        from vllm.distributed.kv_transfer.kv_connector.factory import KVConnectorFactory

        # To register a name twice is an error.
        if NAME not in KVConnectorFactory._registry:
            KVConnectorFactory.register_connector(NAME, MODULE, NAME)
    except Exception as error:
        import logging

        logging.getLogger(__name__).warning(
            "lmkv: could not register %s with vLLM (%r); set kv_connector_module_path=%r", NAME, error, MODULE
        )
