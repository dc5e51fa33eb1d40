"""Registers `LMKVConnector` with vLLM. `register` is lmkv's entry point in the group `vllm.general_plugins`."""

from __future__ import annotations

import inspect
import logging
import multiprocessing
import os
import re
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

from lmkv.config import SettingsResult, command_lines, read_yaml, vllm_options
from lmkv.errors import ConfigError

NAME = "LMKVConnector"
MODULE = "lmkv.vllm.connector"


def register() -> None:
    """Register `LMKVConnector` with vLLM. vLLM calls this function in each of its processes, perhaps several times.

    If lmkv's settings are invalid, end the process of a server, or raise ConfigError if a Python program starts the
    engine. All other errors are only logged, because an exception would end vLLM.
    """
    try:
        from vllm.distributed.kv_transfer.kv_connector.factory import KVConnectorFactory

        # vLLM refuses a name that is registered already.
        if NAME not in KVConnectorFactory._registry:
            KVConnectorFactory.register_connector(NAME, MODULE, NAME)
        from lmkv.vllm.loaded import watch_packing

        watch_packing()
        here = _started_here()
        problems = [] if here is None else _problems(here[0])
        for obstacle in () if here is None or problems else obstacles(here[0], offloads=here[1]):
            logging.getLogger("lmkv.vllm").warning("lmkv: %s", obstacle)
    except Exception as error:
        logging.getLogger(__name__).warning(
            "lmkv: registering %s with vLLM failed (%r); set kv_connector_module_path=%r", NAME, error, MODULE
        )
        return
    if problems and here is not None and here[2]:
        raise ConfigError("\n".join(problems))
    if problems:
        rule = "=" * 80
        sys.exit("\n".join([rule, "lmkv: this server cannot start with its settings:", *problems, rule]))


def obstacles(transfer: Mapping[str, Any], *, offloads: bool) -> Iterator[str]:
    """Yield the reasons why vLLM will not use lmkv although `transfer` (the `kv_transfer_config`) names lmkv.

    `offloads`: whether `kv_offloading_size` is set, which makes vLLM use another connector.
    """
    if NAME not in repr(transfer):
        return
    if offloads:
        yield f"vLLM ignores {NAME} because of --kv-offloading-size: leave out --kv-offloading-size"
    yield from _other_module(transfer)


def _other_module(transfer: Mapping[str, Any]) -> Iterator[str]:
    module = transfer.get("kv_connector_module_path")
    if transfer.get("kv_connector") == NAME and module not in (None, MODULE):
        yield f"kv_connector_module_path is {module!r}, but this module has no {NAME}: delete this setting"


def of_command_line(arguments: Sequence[str], folder: Path = Path()) -> tuple[dict[str, Any], bool]:
    """Read a command line and its `--config` file. Return `(transfer, offloads)`: the `kv_transfer_config`, and whether
    `--kv-offloading-size` is set.

    `folder`: the folder to which relative paths refer.
    """
    words = list(arguments)
    options = re.search(r"--config[ =](\S+)", " ".join(words))
    if options is not None:
        # Not from a pipe, whose content is for vLLM.
        with suppress(ValueError):
            # The command line has the last word.
            words = [*(command_lines.of_file(read_yaml(folder / options[1], pipes=False)) or []), *words]
    with suppress(ValueError):
        return vllm_options.connector_of(words), any(
            word.replace("_", "-").startswith("--kv-offloading-size") for word in words
        )
    return {}, False


def _problems(transfer: Mapping[str, Any]) -> list[str]:
    """Return the reasons why vLLM would fail later: another module for the connector, or invalid settings of lmkv."""
    if transfer.get("kv_connector") != NAME:
        return []
    try:
        extra = transfer.get("kv_connector_extra_config")
        # A pipe can be read once, and is for the engine.
        refused = SettingsResult.to(
            env=os.environ, extra=extra, read=lambda path: {} if path.is_fifo() else read_yaml(path)
        ).problems
    except ConfigError as error:
        refused = (str(error),)
    return [*_other_module(transfer), *refused]


def _started_here() -> tuple[dict[str, Any], bool, bool] | None:
    """Return `(transfer, offloads, by_program)` for the server or engine that starts in this process, or None in a
    child process.

    `transfer` and `offloads` are the results of `of_command_line`. `by_program`: whether a Python program starts the
    engine. A program's arguments are found on the call stack; a server's are on its command line.
    """
    if multiprocessing.parent_process() is not None:
        return None
    callers: list[Any] = [frame.frame.f_locals.get("self") for frame in inspect.stack(0)]
    for each in callers:
        if "EngineArgs" in {kind.__name__ for kind in type(each).__mro__}:
            transfer = each.kv_transfer_config
            found = transfer if isinstance(transfer, dict) else {} if transfer is None else vars(transfer)
            return dict(found), each.kv_offloading_size is not None, "--kv-transfer-config" not in " ".join(sys.argv)
    return *of_command_line(sys.argv), False
