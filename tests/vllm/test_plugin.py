"""What lmkv says when vLLM loads its plugins, in processes of their own: a process loads them once."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from tests.pages import ROOT
from tests.vllm.server import child_environment

TRANSFER = '{"kv_connector": "LMKVConnector", "kv_role": "kv_both"}'
SERVER = """
from vllm.engine.arg_utils import AsyncEngineArgs
from vllm.utils.argparse_utils import FlexibleArgumentParser
print(AsyncEngineArgs.add_cli_args(FlexibleArgumentParser()).parse_args().kv_offloading_size)
"""
PROGRAM = """
import sys
from vllm.config import KVTransferConfig
from vllm.engine.arg_utils import EngineArgs
transfer = KVTransferConfig(kv_connector="LMKVConnector", kv_role="kv_both")
print(EngineArgs(model=".", kv_transfer_config=transfer, kv_offloading_size=float(sys.argv[1]) or None).model)
"""


@pytest.mark.parametrize(
    ("program", "arguments", "warns"),
    [
        (SERVER, ["--kv-transfer-config", TRANSFER, "--kv-offloading-size", "4"], True),
        (SERVER, ["--kv-transfer-config", TRANSFER, "--kv_offloading_size=4"], True),
        (SERVER, ["--config", "both.yaml"], True),
        (SERVER, ["--kv-transfer-config", TRANSFER, "--config", "size.yaml"], True),
        (SERVER, ["--config", "transfer.yaml"], False),
        (SERVER, ["--kv-transfer-config", TRANSFER], False),
        (SERVER, ["--kv-offloading-size", "4"], False),
        (PROGRAM, ["4"], True),
        (PROGRAM, ["0"], False),
    ],
)
def test_a_setting_that_takes_the_connectors_place_is_warned_of(
    program: str, arguments: list[str], warns: bool, tmp_path: Path
) -> None:
    transfer, size = f"kv-transfer-config: '{TRANSFER}'\n", "kv_offloading_size: 4\n"
    for name, text in {"both": transfer + size, "transfer": transfer, "size": size}.items():
        (tmp_path / f"{name}.yaml").write_text(text)
    command = [sys.executable, "-c", program, *arguments]
    environment = child_environment(PYTHONPATH=str(ROOT))
    done = subprocess.run(
        command, env=environment, capture_output=True, text=True, timeout=300, check=False, cwd=tmp_path
    )
    assert done.returncode == 0, done.stderr
    assert ("--kv-offloading-size has vLLM use a connector of its own" in done.stdout + done.stderr) is warns
