"""What lmkv says when vLLM loads its plugins, in processes of their own: a process loads them once."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest
from attrs import frozen

from tests.pages import ROOT
from tests.vllm.server import child_environment

SERVER = """
from vllm.engine.arg_utils import AsyncEngineArgs
from vllm.utils.argparse_utils import FlexibleArgumentParser
print(AsyncEngineArgs.add_cli_args(FlexibleArgumentParser()).parse_args().kv_offloading_size)
"""
PROGRAM = """
from vllm.config import KVTransferConfig
from vllm.engine.arg_utils import EngineArgs
transfer = KVTransferConfig(kv_connector="LMKVConnector", kv_role="kv_both")
print(EngineArgs(model=".", kv_transfer_config=transfer, kv_offloading_size=float(sys.argv[1]) or None).model)
"""
REFUSING = """
from vllm.engine.arg_utils import EngineArgs
wrong = {"kv_connector": "LMKVConnector", "kv_connector_extra_config": {"chunk_size": "x"}}
EngineArgs(model=".", kv_transfer_config=wrong)
"""
FORKS = """
import json, os, sys, traceback
import vllm.config, vllm.engine.arg_utils, vllm.utils.argparse_utils
for number, (program, arguments) in enumerate(json.load(sys.stdin)):
    if not os.fork():
        log = os.open(f"{number}.log", os.O_CREAT | os.O_WRONLY)
        os.dup2(log, 1), os.dup2(log, 2)
        sys.argv[1:], code = arguments, 0
        try:
            exec(program, {"sys": sys})
        except BaseException:
            traceback.print_exc()
            code = 1
        sys.stdout.flush()
        os._exit(code)
    print(os.waitstatus_to_exitcode(os.wait()[1]))
"""
"""Imports vLLM once, without its plugins, and runs each program in a child of its own."""


REPLACED = "vLLM ignores LMKVConnector because of --kv-offloading-size: leave out --kv-offloading-size"
REFUSED = "lmkv: this server cannot start with its settings:\n"


@frozen
class Start:
    """A start of vLLM: what lmkv says, if anything, and the exit code."""

    program: str
    arguments: list[str]
    says: str = ""
    code: int = 0


def transfer(**more: object) -> str:
    return json.dumps({"kv_connector": "LMKVConnector", "kv_role": "kv_both", **more})


WRONG = transfer(kv_connector_extra_config={"chunk_size": "x"})
DOTTED = ["--kv-transfer-config.kv_connector", "LMKVConnector", "--kv-transfer-config.kv_role", "kv_both"]

STARTS = [
    Start(SERVER, ["--kv-transfer-config", transfer(), "--kv-offloading-size", "4"], REPLACED),
    Start(SERVER, ["--kv-transfer-config", transfer(), "--kv_offloading_size=4"], REPLACED),
    Start(SERVER, ["--config", "both.yaml"], REPLACED),
    Start(SERVER, ["--kv-transfer-config", transfer(), "--config", "size.yaml"], REPLACED),
    Start(SERVER, ["--config", "transfer.yaml"]),
    Start(SERVER, ["--kv-transfer-config", transfer()]),
    Start(SERVER, ["--kv-offloading-size", "4"]),
    Start(PROGRAM, ["4"], REPLACED),
    Start(PROGRAM, ["0"]),
    Start(
        SERVER,
        ["--kv-transfer-config", transfer(kv_connector_extra_config={"chunk_size": "x", "pin_share": 2})],
        f"{REFUSED}kv_connector_extra_config: chunk_size = 'x' must be a whole number, with digits only, in tokens\n"
        "kv_connector_extra_config: pin_share = 2 must be at most 1, as a share: 0.02\n=====",
        1,
    ),
    Start(
        SERVER,
        ["--kv-transfer-config", transfer(kv_connector_module_path="lmcache.integration.vllm.lmcache_connector_v1")],
        f"{REFUSED}kv_connector_module_path is 'lmcache.integration.vllm.lmcache_connector_v1', but this module has no",
        1,
    ),
    Start(
        SERVER,
        [*DOTTED, *("--kv-transfer-config.kv_connector_extra_config.lmkv.chunk_size", "x")],
        f"{REFUSED}kv_connector_extra_config: chunk_size = 'x' must be",
        1,
    ),
    Start(SERVER, ["--kv-transfer-config", transfer(kv_connector_extra_config={"chunk_size": 64})]),
    Start(SERVER, ["--config", "wrong.yaml"], f"{REFUSED}kv_connector_extra_config: chunk_size = 'x' must be", 1),
    # A wrong value that another option replaces ends nothing, because vLLM does not use it.
    Start(SERVER, ["--config", "wrong.yaml", "--kv-transfer-config", transfer()]),
    Start(SERVER, ["--kv-transfer-config", WRONG, "--kv-transfer-config", transfer()]),
    Start(SERVER, ["--kv-transfer-config", WRONG, *DOTTED]),
    Start(SERVER, [*DOTTED, "--kv-transfer-config.kv_connector_extra_config.lmkv.chunk_size", "1K"]),
    Start(REFUSING, ["program"], "lmkv.errors.ConfigError: kv_connector_extra_config: chunk_size = 'x' must be", 1),
]


@pytest.fixture(scope="module")
def printed(tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    """The output of each start."""
    folder = tmp_path_factory.mktemp("starts")
    connector, size = f"kv-transfer-config: '{transfer()}'\n", "kv_offloading_size: 4\n"
    for name, text in {
        "both": connector + size,
        "transfer": connector,
        "size": size,
        "wrong": f"kv-transfer-config: '{WRONG}'\n",
    }.items():
        (folder / f"{name}.yaml").write_text(text)
    done = subprocess.run(
        [sys.executable, "-c", FORKS],
        input=json.dumps([(start.program, start.arguments) for start in STARTS]),
        env=child_environment(PYTHONPATH=str(ROOT)),
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
        cwd=folder,
    )
    logs = [(folder / f"{number}.log").read_text() for number in range(len(STARTS))]
    assert done.stdout.split() == [str(start.code) for start in STARTS], [done.stderr, *logs]
    return logs


@pytest.mark.parametrize("number", range(len(STARTS)), ids=lambda number: " ".join(STARTS[number].arguments))
def test_what_keeps_lmkv_from_being_used_is_said_at_the_start(number: int, printed: list[str]) -> None:
    start = STARTS[number]
    assert (start.says in printed[number], bool(start.says) or "lmkv:" not in printed[number]) == (True, True)
