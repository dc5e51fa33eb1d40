"""Registers `LMKVConnector` with vLLM: the entry point of the group `vllm.general_plugins`."""

from __future__ import annotations

import inspect
import logging
import multiprocessing
import re
import sys
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

NAME = "LMKVConnector"
MODULE = "lmkv.vllm.connector"


def register() -> None:
    """Called by vLLM in each of its processes, perhaps several times. Never raises, because that would end vLLM."""
    try:
        from vllm.distributed.kv_transfer.kv_connector.factory import KVConnectorFactory

        # vLLM refuses a name that is registered already.
        if NAME not in KVConnectorFactory._registry:
            KVConnectorFactory.register_connector(NAME, MODULE, NAME)
        from lmkv.vllm.loaded import watch_packing

        watch_packing()
        if _is_replaced():
            logging.getLogger("lmkv.vllm").warning(
                "lmkv: --kv-offloading-size has vLLM use a connector of its own instead of %s; leave it out", NAME
            )
    except Exception as error:
        logging.getLogger(__name__).warning(
            "lmkv: could not register %s with vLLM (%r); set kv_connector_module_path=%r", NAME, error, MODULE
        )


def replaces_connector(arguments: Sequence[str], folder: Path = Path()) -> bool:
    """Whether a command line, or its `--config` file, makes vLLM replace lmkv by its own connector.

    `folder`: where relative paths in it start.
    """
    given = " ".join(arguments).replace("_", "-")
    options = re.search(r"--config[ =](\S+)", " ".join(arguments))
    if options is not None:
        from lmkv.config import read_yaml

        # Not from a pipe, whose content is for vLLM.
        with suppress(ValueError):
            found = read_yaml(folder / options[1], pipes=False)
            given += " " + " ".join(f"--{name} {value}" for name, value in found.items()).replace("_", "-")
    return NAME in given and "--kv-offloading-size" in given


def _is_replaced() -> bool:
    """Whether vLLM was also given `kv_offloading_size`, which silently replaces any connector.

    A server has only its command line by now. A program's arguments are in the calling frames.
    """
    if replaces_connector(sys.argv):
        return multiprocessing.parent_process() is None
    callers: list[Any] = [frame.frame.f_locals.get("self") for frame in inspect.stack(0)]
    arguments = [each for each in callers if "EngineArgs" in {kind.__name__ for kind in type(each).__mro__}]
    return any(each.kv_offloading_size is not None and NAME in repr(each.kv_transfer_config) for each in arguments)
