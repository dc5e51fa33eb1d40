"""What lmkv says when vLLM loads its plugins, in processes of their own: a process loads them once."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest
from attrs import frozen

from tests.pages import ROOT
from tests.vllm.server import child_environment

TRANSFER = '{"kv_connector": "LMKVConnector", "kv_role": "kv_both"}'
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


@frozen
class Start:
    """A start of vLLM, and whether lmkv warns."""

    program: str
    arguments: list[str]
    warns: bool


STARTS = [
    Start(SERVER, ["--kv-transfer-config", TRANSFER, "--kv-offloading-size", "4"], True),
    Start(SERVER, ["--kv-transfer-config", TRANSFER, "--kv_offloading_size=4"], True),
    Start(SERVER, ["--config", "both.yaml"], True),
    Start(SERVER, ["--kv-transfer-config", TRANSFER, "--config", "size.yaml"], True),
    Start(SERVER, ["--config", "transfer.yaml"], False),
    Start(SERVER, ["--kv-transfer-config", TRANSFER], False),
    Start(SERVER, ["--kv-offloading-size", "4"], False),
    Start(PROGRAM, ["4"], True),
    Start(PROGRAM, ["0"], False),
]


@pytest.fixture(scope="module")
def printed(tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    """The output of each start."""
    folder = tmp_path_factory.mktemp("starts")
    transfer, size = f"kv-transfer-config: '{TRANSFER}'\n", "kv_offloading_size: 4\n"
    for name, text in {"both": transfer + size, "transfer": transfer, "size": size}.items():
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
    assert done.stdout.split() == ["0"] * len(STARTS), [done.stderr, *logs]
    return logs


@pytest.mark.parametrize("number", range(len(STARTS)), ids=lambda number: " ".join(STARTS[number].arguments))
def test_a_setting_that_takes_the_connectors_place_is_warned_of(number: int, printed: list[str]) -> None:
    said = "--kv-offloading-size has vLLM use a connector of its own" in printed[number]
    assert said is STARTS[number].warns, printed[number]
