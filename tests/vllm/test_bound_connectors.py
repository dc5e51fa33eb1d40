"""The connectors that bound all others do what the benchmarks say of them, and nothing else."""

from __future__ import annotations

import os
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.users import SKIPPED
from tests.vllm.harness import BLOCK, Engine, engine, generated, parameters, prompt


@contextmanager
def engine_with(model: Path, connector: str, **settings: Any) -> Iterator[Engine]:
    module = {"kv_connector_module_path": "benchmarks.bound_connectors"}
    with engine(model, connector, extra=settings, transfer=module) as running:
        yield running


def answer(running: Engine, ids: list[int], **params: Any) -> list[int]:
    return generated(running.llm.generate({"prompt_token_ids": ids}, parameters(4, **params), use_tqdm=False))[0]


def worker_side() -> Any:
    from vllm.distributed.kv_transfer import get_kv_transfer_group

    return get_kv_transfer_group()


def rows(of: np.ndarray) -> set[bytes]:
    return {row.tobytes() for row in of}


def test_the_one_that_copies_has_copied_each_full_block_and_none_of_who_skips_it(model: Path) -> None:
    first, second, third = prompt(400, 9 * BLOCK + 12), prompt(401, 3 * BLOCK), prompt(406, 3 * BLOCK)
    with engine_with(model, "CopyingConnector", copied_tokens=10 * BLOCK) as running:
        assert answer(running, first) == answer(running, first, **SKIPPED), "vLLM's own cache answers this one"
        copying = worker_side()
        assert len(copying.layers) == 4
        for pages, copies in copying.layers:
            assert len(rows(copies[:9])) == 9
            assert rows(copies[:9]) <= rows(pages)
            assert (copies[9:] == 1).all()
        answer(running, second, **SKIPPED)
        assert copying.at == 9
        answer(running, third)
        assert copying.at == 2, "it begins anew where its memory ends"


def chunk_files(folder: Path, nbytes: int) -> list[bytes]:
    """Two files of a tier, of which a prompt has one."""
    folder.joinpath("kv").mkdir()
    contents = [os.urandom(nbytes) for _ in range(2)]
    for number, content in enumerate(contents):
        folder.joinpath("kv", f"{number}.kv1").write_bytes(content)
    return contents


def test_the_one_that_reads_has_a_request_wait_until_all_is_read(model: Path, tmp_path: Path) -> None:
    chunk_files(tmp_path, 8192)
    at_once, waits = prompt(402, 100), prompt(403, 100)
    settings = {"plain_folder": str(tmp_path), "waits": str(tmp_path / "waits"), "redis": None}
    with engine_with(model, "ReadingConnector", **settings) as running:
        answer(running, at_once)
        answer(running, at_once)
        assert not (tmp_path / "waits").exists()
        expected = answer(running, waits)
        assert len((tmp_path / "waits").read_text().split()) == 1

        may_read, core = threading.Event(), running.llm.llm_engine
        running.connector._read = may_read.wait
        core.add_request("waits", {"prompt_token_ids": waits}, parameters(4))
        try:
            for _ in range(20):
                assert core.step() == []
                assert not running.scheduler.running
        finally:
            # Else the thread that waits would outlive the test.
            may_read.set()
        found: list[Any] = []
        while not found:
            found = [output for output in core.step() if output.finished]
        assert generated(found) == [expected]
        assert len((tmp_path / "waits").read_text().split()) == 2
