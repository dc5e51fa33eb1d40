"""`lmkv inspect`, `prune` and `clear` on folders that real backends have written."""

from __future__ import annotations

import json
import math
import os
import re
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from attrs import evolve
from typer.testing import CliRunner

import lmkv
from lmkv.backends.disk import LocalDiskBackend, folder
from lmkv.backends.disk.folder import DESCRIPTION_FILE, describe, description
from lmkv.backends.disk.root import Root
from lmkv.build import build_store
from lmkv.chunks.hashing import token_bytes
from lmkv.chunks.layout import KVLayout, LayerPages
from lmkv.chunks.namespace import Namespace
from lmkv.cli.app import app
from lmkv.cli.inspect import Content, Totals, contents, least_recently_used, show
from lmkv.config import Config
from lmkv.protocols import Chunk, Listed, ReadStatus, WriteStatus

SMALL = Namespace(model="small", dtype="float32", chunk_size=16, block_size=16, extra={"weights": "1"})
LARGE = Namespace(model="large-with-a-name-that-is-folded", dtype="bfloat16", chunk_size=16, block_size=16)
PAYLOAD = 300_000
TOKENS = token_bytes(range(16))
Fill = Callable[..., list[bytes]]


def run(*words: object) -> Any:
    return CliRunner().invoke(app, [str(word) for word in words], env={"COLUMNS": "80"})


def answer(*words: object) -> Any:
    done = run(*words, "--json")
    assert done.exit_code == 0, done.output
    return json.loads(done.stdout)


@pytest.fixture
def fill(tmp_path: Path) -> Fill:
    """Write chunks; the first was used an hour ago, the others each a minute later."""

    def fill(namespace: Namespace, count: int) -> list[bytes]:
        backend = LocalDiskBackend(tmp_path, namespace.digest)
        describe(backend.path, namespace)
        keys = [os.urandom(32) for _ in range(count)]
        chunks = [Chunk(key, memoryview(os.urandom(PAYLOAD)), tokens=TOKENS) for key in keys]
        for _ in keys:
            backend.reserve_bytes(backend.stored_bytes(PAYLOAD))
        assert {backend.write(chunk).status for chunk in chunks} == {WriteStatus.STORED}
        for number, key in enumerate(keys):
            used = time.time() - 3600 + 60 * number
            os.utime(file_of(tmp_path, namespace, key), (used, used))
        return keys

    return fill


def file_of(root: Path, namespace: Namespace, key: bytes) -> Path:
    return root / namespace.digest.hex() / key[:1].hex() / f"{key.hex()}.kv1"


def stored(root: Path, namespace: Namespace, keys: list[bytes]) -> list[bool]:
    backend = LocalDiskBackend(root, namespace.digest)
    into = memoryview(bytearray(PAYLOAD))
    return [backend.read(key, into).status is ReadStatus.HIT for key in keys]


def test_namespaces_are_described_and_added_up(tmp_path: Path, fill: Fill) -> None:
    fill(SMALL, 3)
    fill(LARGE, 2)
    found = {each["described"]["model"]: each for each in answer("inspect", tmp_path)["namespaces"]}
    assert found.keys() == {SMALL.model, LARGE.model}
    small = found["small"]
    assert (small["chunks"], small["tokens"], small["damaged"]) == (3, 48, {})
    assert small["bytes"] == sum(file.stat().st_size for file in tmp_path.glob(f"{SMALL.digest.hex()}/*/*.kv1"))
    assert small["described"]["extra"] == {"weights": "1"}
    assert 3600 <= small["oldest_use_seconds"] < 3700
    assert 3480 <= small["latest_use_seconds"] < 3580


def test_a_tier_describes_its_folder(tmp_path: Path) -> None:
    for kind in ("local_disk", "shared_memory"):
        below = {kind: f"file://{tmp_path / kind}", f"max_{kind}_size": 0.1}
        config = Config(max_local_cpu_size=0.01, disk_min_free=0.0, **below)  # type: ignore[arg-type]
        build_store(config, SMALL, KVLayout(16, [LayerPages(4096, 1)])).close()
        assert description(str(tmp_path / kind / SMALL.digest.hex())) == SMALL


def test_the_table_fits_a_terminal_of_80_columns(tmp_path: Path, fill: Fill) -> None:
    fill(SMALL, 3)
    fill(LARGE, 1)
    done = run("inspect", tmp_path)
    assert done.exit_code == 0
    assert {"small", "float32", "48", "58m to 1h ago", SMALL.digest.hex()[:12]} <= {
        cell for line in done.stdout.splitlines() for cell in re.split(r"\s{2,}", line.strip())
    }
    assert max(map(len, done.stdout.splitlines())) <= 80


def test_the_table_of_a_full_disk_still_names_its_models(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    now, namespace = time.time(), evolve(LARGE, model="org/model-70B")
    chunks = [Listed(b"", 20 << 20, now - ago) for ago in (59 * 60.0, *[0.0] * 49_999)]
    show([Content(tmp_path, namespace.digest, namespace, chunks, 0)], [Totals(tokens=12_800_000)])
    lines = capsys.readouterr().out.splitlines()
    assert max(map(len, lines)) <= 80
    assert "".join(line[14:27].strip() for line in lines).startswith("modelorg/model-70B"), "folded at most"


def test_verify_names_what_is_damaged_and_changes_nothing(tmp_path: Path, fill: Fill) -> None:
    keys = fill(SMALL, 4)
    flipped, cut = (file_of(tmp_path, SMALL, key) for key in keys[:2])
    content = bytearray(flipped.read_bytes())
    content[-PAYLOAD // 2] ^= 1
    used = flipped.stat().st_mtime
    flipped.write_bytes(content)
    os.utime(flipped, (used, used))
    os.truncate(cut, cut.stat().st_size - 4096)
    assert str(flipped) not in run("inspect", tmp_path).stderr, "its header is whole"
    done = run("inspect", tmp_path, "--verify")
    assert done.exit_code == 1
    assert f"damaged: {flipped}: segment" in done.stderr
    assert f"damaged: {cut}: the file has" in done.stderr
    assert flipped.stat().st_mtime == used, "to look is no use of a chunk"
    assert stored(tmp_path, SMALL, keys) == [False, False, True, True]


def test_prune_deletes_what_was_not_used_for_long(tmp_path: Path, fill: Fill) -> None:
    keys, others = fill(SMALL, 4), fill(LARGE, 2)
    done = answer("prune", tmp_path, "--older-than", "3510s", "--namespace", SMALL.digest.hex()[:8])
    assert done["chunks"] == 2
    assert stored(tmp_path, SMALL, keys) == [False, False, True, True]
    assert stored(tmp_path, LARGE, others) == [True, True]


def test_prune_leaves_so_many_gib_of_the_latest(tmp_path: Path, fill: Fill) -> None:
    keys = fill(SMALL, 4)
    size = file_of(tmp_path, SMALL, keys[0]).stat().st_size
    done = answer("prune", tmp_path, "--max-size", 2.5 * size / 2**30)
    assert (done["chunks"], done["bytes"]) == (2, 2 * size)
    assert stored(tmp_path, SMALL, keys) == [False, False, True, True]
    assert folder.Usage(Root(str(tmp_path))).reserve_bytes(0) == 2 * size, "engines know that there is room"
    assert answer("prune", tmp_path, "--max-size", 1)["chunks"] == 0


def test_a_size_that_is_no_number_deletes_nothing(tmp_path: Path, fill: Fill) -> None:
    """Older releases of typer let it through."""
    fill(SMALL, 2)
    assert least_recently_used(list(contents(tmp_path)), -math.inf, math.nan) == {}


def test_clear_asks_first(tmp_path: Path, fill: Fill) -> None:
    keys, others = fill(SMALL, 2), fill(LARGE, 2)
    assert run("clear", tmp_path).exit_code == 1, "there is nobody to say yes"
    asked = run("clear", tmp_path, "--json")
    assert (asked.exit_code, asked.stdout) == (1, ""), "what reads the answer is not asked"
    assert "Delete 4 chunks" in asked.stderr
    refused = CliRunner().invoke(app, ["clear", str(tmp_path)], input="no\n")
    assert refused.exit_code == 1
    assert stored(tmp_path, SMALL, keys) == [True, True]
    assert answer("clear", tmp_path, "--namespace", SMALL.digest.hex()[:4], "--yes")["chunks"] == 2
    assert stored(tmp_path, SMALL, keys) == [False, False]
    said = CliRunner().invoke(app, ["clear", str(tmp_path), "--json"], input="y\n")
    assert json.loads(said.stdout)["chunks"] == 2
    assert stored(tmp_path, LARGE, others) == [False, False]


def test_the_question_is_no_part_of_the_answer(tmp_path: Path, fill: Fill) -> None:
    fill(SMALL, 2)
    command = [sys.executable, "-c", "from lmkv.cli import main; main()", "clear", str(tmp_path), "--json"]
    done = subprocess.run(command, input="y\n", capture_output=True, text=True, timeout=500, check=True)
    assert json.loads(done.stdout)["chunks"] == 2
    assert "Delete 2 chunks" in done.stderr


def test_what_cannot_be_done_is_said(tmp_path: Path, fill: Fill) -> None:
    assert (run("inspect", tmp_path).exit_code, run("clear", tmp_path).exit_code) == (0, 0), "an empty folder"
    assert run("inspect", tmp_path).stdout == "No lmkv chunks: the folder is empty\n"
    (tmp_path / "mine").touch()
    for words, says in (
        ("inspect", f"{tmp_path} has no lmkv chunks"),
        ("clear --yes", f"{tmp_path} has no lmkv chunks"),
        ("prune", "give --older-than, --max-size or both"),
        ("prune --older-than soon", "not a duration"),
        ("inspect --namespace zz", "begins with zz"),
    ):
        if "zz" in words:
            fill(SMALL, 1)
        verb, *options = words.split()
        done = run(verb, tmp_path, *options)
        assert done.exit_code, words
        assert says in done.stderr


def test_a_description_that_is_not_the_folders_is_not_believed(tmp_path: Path, fill: Fill) -> None:
    fill(SMALL, 1)
    file, deep = tmp_path / SMALL.digest.hex() / DESCRIPTION_FILE, "[" * 60_000
    assert description(str(file.parent)) == SMALL
    for text in (
        *(deep, '{"a":' * 10_000, f'{{"model": {deep}', "9" * 60_000, "", "[]", "{}", '{"model": 1}'),
        '{"model": "other", "dtype": "float32"}',
    ):
        file.write_text(text)
        assert description(str(file.parent)) is None
        assert answer("inspect", tmp_path)["namespaces"][0]["described"] is None
        assert "not described" in run("inspect", tmp_path).stdout


def test_the_version() -> None:
    assert run("--version").stdout.strip() == lmkv.__version__


def test_a_description_that_writes_to_terminals_is_none(tmp_path: Path) -> None:
    hostile = evolve(SMALL, model="\x1b]0;title\x07")
    LocalDiskBackend(tmp_path, hostile.digest)
    describe(str(tmp_path), hostile)
    assert description(str(tmp_path / hostile.digest.hex())) is None
    assert "\x1b]0" not in run("inspect", tmp_path).output
