"""`lmkv config`: show, check and migrate, as a user runs them."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from typer.testing import CliRunner, Result

from lmkv.backends.disk import LocalDiskBackend
from lmkv.cli.app import app
from lmkv.config import Config
from tests.kit import LIMIT

THEIRS = """\
chunk_size: 128
local_cpu: true
max_local_cpu_size: 5
local_disk: "file:///x/y z/"
max_local_disk_size: 3
pin_timeout_sec: 60
enable_pd: false
lookup_timeout_ms: 3
extra_config: {use_odirect: true}
bar: 3
"""


@pytest.fixture
def file(tmp_path: Path) -> Path:
    path = tmp_path / "lmcache_config.yaml"
    path.write_text(THEIRS)
    return path


@contextmanager
def piped(folder: Path, content: str) -> Iterator[Path]:
    """A file that can be read once, as a shell's <(...) is."""
    pipe = folder / "pipe"
    os.mkfifo(pipe)
    writer = threading.Thread(target=pipe.write_text, args=(content,), daemon=True)
    writer.start()
    yield pipe
    writer.join(LIMIT)


def run(*arguments: str | Path, **env: str) -> Result:
    none = {name: None for name in os.environ if name.startswith(("LMKV_", "LMCACHE_"))}
    return CliRunner().invoke(app, ["config", *map(str, arguments)], env={**none, **env})


class TestShow:
    def test_every_setting_has_its_value_and_source(self, file: Path) -> None:
        done = run("show", "--json", "--extra", '{"lmcache.chunk_size": 64}', LMCACHE_CONFIG_FILE=str(file))
        shown = json.loads(done.stdout)
        rows = {row["name"]: row for row in shown["settings"]}
        # A key is unknown.
        assert (done.exit_code, shown["ok"], list(rows)) == (1, True, [row.name for row in Config().describe()])
        assert (rows["chunk_size"]["value"], rows["chunk_size"]["source"]) == (64, "kv_connector_extra_config")
        assert (rows["pin_ttl"]["value"], rows["pin_ttl"]["source"]) == (60.0, f"file {file}: pin_timeout_sec")
        assert (rows["disk_sync"]["value"], rows["disk_sync"]["source"]) == ("none", "default")
        kinds = {reading["key"]: reading["kind"] for reading in shown["readings"]}
        assert (kinds["lookup_timeout_ms"], kinds["'bar'"]) == ("without effect", "unknown")

    def test_as_a_table(self) -> None:
        done = run("show", LMKV_CHUNK_SIZE="64", LMCACHE_CHUNK_SIZE="32")
        assert done.exit_code == 1, "settings are ignored"
        [row] = [line for line in done.stdout.splitlines() if "│ chunk_size" in line]
        assert [cell.strip() for cell in row.strip("│").split("│")] == [
            "chunk_size",
            "64 tokens",
            "environment LMKV_CHUNK_SIZE",
        ]
        assert "not read LMCache's settings LMCACHE_CHUNK_SIZE" in done.stdout

    def test_values_are_no_markup(self) -> None:
        done = run("show", LMKV_LOCAL_DISK="/[red]/[/x]", LMKV_MAX_LOCAL_DISK_SIZE="1")
        assert (done.exit_code, "/[red]/[/x]" in done.stdout) == (0, True)

    def test_passwords_are_not_shown(self) -> None:
        for how in ([], ["--json"]):
            done = run("show", *how, LMKV_REMOTE_URL="redis://user:secret@host", LMKV_REMOTE_PASSWORD="secret")
            assert done.exit_code == 0
            assert "redis://user:***@host" in done.stdout
            assert "secret" not in done.output

    def test_a_bad_setting_is_exit_code_2(self) -> None:
        done = run("show", LMCACHE_REMOTE_SERDE="cachegen", LMCACHE_REMOTE_URL="redis://user:secret@host")
        assert (done.exit_code, done.stdout) == (2, "")
        assert "environment LMCACHE_REMOTE_SERDE: LMCache's remote_serde cannot be used" in done.stderr
        assert "secret" not in done.stderr
        answer = json.loads(run("show", "--json", LMCACHE_GDS_PATH="/x", LMCACHE_ENABLE_PD="1").stdout)
        assert (answer["ok"], len(answer["problems"])) == (False, 2)


class TestCheck:
    def test_a_file_of_lmcache(self, file: Path) -> None:
        done = run("check", file)
        assert (done.exit_code, done.stderr) == (1, "")
        assert "LMCache's settings, which can be used, with remarks" in done.stdout
        assert "is used: disk_direct = on" in done.stdout
        assert "enable_pd has no effect: the option is switched off" in done.stdout
        assert "'bar' is unknown" in done.stdout

    def test_a_file_of_lmkv(self, file: Path) -> None:
        for text in ("pin_ttl: 60\nchunk_size: 64\n", "chunk_size: 64\ndisk_io_threads: 2\n"):
            file.write_text(text)
            # The environment does not matter.
            done = run("check", file, LMKV_CHUNK_SIZE="abc", LMCACHE_REMOTE_SERDE="cachegen")
            assert (done.exit_code, "lmkv's settings" in done.stdout) == (0, True)

    def test_a_file_of_settings_that_both_have_is_lmcaches_where_it_probably_is(self, tmp_path: Path) -> None:
        for name, options, whose in (
            ("kv.yaml", [], "lmkv's settings"),
            ("kv.yaml", ["--tensor-parallel-size", "2"], "LMCache's settings"),
            ("lmc_cpu.yaml", [], "LMCache's settings"),
        ):
            (tmp_path / name).write_text("chunk_size: 256\nlocal_cpu: true\nmax_local_cpu_size: 5\n")
            done = run("check", tmp_path / name, *options)
            assert (done.exit_code, whose in done.stdout) == (0, True)
            assert "rank" in done.stdout
            assert ("if this is a file of LMCache, max_local_cpu_size" in done.stdout) is (whose == "lmkv's settings")
        (tmp_path / "lmc_own.yaml").write_text("chunk_size: 256\npin_ttl: 60\n")
        assert "lmkv's settings" in run("check", tmp_path / "lmc_own.yaml").stdout

    def test_what_is_wrong_is_said_and_exit_code_2(self, file: Path) -> None:
        wrong = {
            "remote_serde: cachegen\nremote_url: redis://host\n": "has no codecs",
            "lookup_timeout_ms: 3\nchunk_size: abc\n": "chunk_size = 'abc' must be a whole number",
            "chunk_siz: 1\n": "did you mean 'chunk_size'?",
            "disk_sync: full\nremote_serde: cachegen\n": "unknown key 'remote_serde'",
            "- 1\n": "write each setting as a line",
            "\tchunk_size: 1\n": "use no tabs",
            "kv_role: kv_both\n": "write it beside kv_connector, outside kv_connector_extra_config",
            "remote_url: rediss//host\n": "did you mean rediss://?",
        }
        for text, said in wrong.items():
            file.write_text(text)
            done = run("check", file)
            assert done.exit_code == 2
            assert done.stderr.startswith(f"file {file}: ")
            assert said in done.stderr
        file.write_bytes(bytes(range(256)))
        assert "the file is not text: name a YAML file" in run("check", file).stderr
        file.unlink()
        done = run("check", file)
        assert (done.exit_code, file.name in done.stderr, "correct the path" in done.stderr) == (2, True, True)

    def test_as_json(self, file: Path) -> None:
        found = json.loads(run("check", file, "--json").stdout)
        assert (found["ok"], found["problems"], found["of"]) == (True, [], "LMCache")
        assert "local_disk" in found["settings"]
        assert "'bar'" in [reading["key"] for reading in found["readings"] if reading["kind"] == "unknown"]
        file.write_text("chunk_size: abc\n")
        done = run("check", file, "--json")
        found = json.loads(done.stdout)
        assert (done.exit_code, done.stderr, found["ok"]) == (2, "", False)
        assert "chunk_size = 'abc'" in found["problems"][0]


class TestMigrate:
    def test_the_file_means_the_same(self, file: Path, tmp_path: Path) -> None:
        done = run("migrate", file)
        assert (done.exit_code, done.stderr) == (1, "")
        own = tmp_path / "lmkv.yaml"
        own.write_text(done.stdout)
        assert run("check", own).exit_code == 0
        theirs = Config.load(env={"LMCACHE_CONFIG_FILE": str(file)})
        assert Config.load(file=own, env={}) == theirs
        assert theirs.local_disk == "/x/y z"

    def test_what_is_left_out_is_a_comment_with_its_reason(self, file: Path) -> None:
        comments = [line for line in run("migrate", file).stdout.splitlines() if line.startswith("#")]
        assert comments[1:] == [
            "# Left out: enable_pd has no effect: the option is switched off",
            next(line for line in comments if "lookup_timeout_ms has no effect: " in line),
            "# Left out: 'bar' is unknown",
            *(
                next(line for line in comments if line.startswith(f"# max_local_{kind}_size: LMCache takes"))
                for kind in ("cpu", "disk")
            ),
        ]

    def test_what_matters_is_left_out_with_exit_code_2(self, file: Path, tmp_path: Path) -> None:
        file.write_text(THEIRS + "remote_serde: cachegen\nremote_url: redis://user:secret@host\n")
        done = run("migrate", file)
        assert done.exit_code == 2
        assert "remote_serde" in done.stderr
        assert (
            "# Left out, although the setting matters: LMCache's remote_serde cannot be used: lmkv stores KV unchanged"
            in done.stdout
        )
        assert "remote_url: redis://user:secret@host" in done.stdout
        assert "secret" not in done.stderr
        own = tmp_path / "lmkv.yaml"
        own.write_text(done.stdout)
        assert run("check", own).exit_code == 0

    def test_as_json(self, file: Path, tmp_path: Path) -> None:
        found = json.loads(run("migrate", file, "--json").stdout)
        assert (found["ok"], found["problems"], len(found["left_out"])) == (True, [], 3)
        own = tmp_path / "lmkv.yaml"
        own.write_text(json.dumps(found["settings"]))
        assert Config.load(file=own, env={}) == Config.load(env={"LMCACHE_CONFIG_FILE": str(file)})
        file.write_text(THEIRS + "remote_serde: cachegen\nremote_url: redis://host\n")
        done = run("migrate", file, "--json")
        found = json.loads(done.stdout)
        assert (done.exit_code, found["ok"], done.stderr) == (2, False, "")
        assert "remote_serde" in found["problems"][0]

    def test_what_cannot_be_migrated_is_exit_code_2(self, file: Path) -> None:
        for text, said in (
            ("disk_sync: full\n", "already has lmkv's settings"),
            ("chunk_size: abc\n", "chunk_size = 'abc'"),
        ):
            file.write_text(text)
            done = run("migrate", file)
            assert (done.exit_code, said in done.stderr) == (2, True)


def test_the_command_is_installed(file: Path) -> None:
    command = [Path(sys.executable).with_name("lmkv"), "config", "check", file]
    done = subprocess.run(command, capture_output=True, text=True, timeout=500, check=False)
    assert (done.returncode, done.stderr) == (1, "")


class TestPipes:
    """A file is read once, or a pipe would be empty the second time."""

    def test_check(self, tmp_path: Path) -> None:
        for number, (content, code, said) in enumerate(
            [(THEIRS, 1, "LMCache's"), ("pin_ttl: 5\n", 0, "lmkv's"), ("pin_ttl: 0\n", 2, "must be")]
        ):
            (tmp_path / f"{number}").mkdir()
            with piped(tmp_path / f"{number}", content) as pipe:
                done = run("check", pipe)
            assert (done.exit_code, said in done.output, "pin_ttl" in done.output) == (code, True, True)
        with piped(tmp_path, THEIRS) as pipe:
            done = run("migrate", pipe)
        assert (done.exit_code, "pin_ttl: 60.0" in done.stdout) == (1, True)


@pytest.mark.parametrize("command", [["config", "show"], ["doctor"]])
def test_brackets_without_end_are_no_traceback(command: list[str]) -> None:
    done = CliRunner().invoke(app, [*command, "--extra", "[" * 100_000])
    assert (done.exit_code, type(done.exception)) == (2, SystemExit)
    assert "nested too deeply" in done.stderr


COMMANDS = [
    pytest.param("doctor", marks=pytest.mark.slow("lmkv doctor imports vLLM")),
    *("config show", "config show --json", "--version", "--help", "config --help", "inspect --json FOLDER"),
]
LMKV = [sys.executable, "-c", "from lmkv.cli import main; main()"]


@pytest.mark.parametrize("command", COMMANDS)
def test_an_output_that_cannot_be_written_is_one_sentence(command: str, tmp_path: Path) -> None:
    LocalDiskBackend(tmp_path, bytes(32)).close()
    words = [*LMKV, *command.replace("FOLDER", str(tmp_path)).split()]
    with open("/dev/full", "wb") as full:
        # doctor imports torch, and vLLM in a process of its own.
        done = subprocess.run(words, stdout=full, stderr=subprocess.PIPE, text=True, timeout=5 * LIMIT, check=False)
    assert done.stderr == "lmkv: the output cannot be written: No space left on device\n"
    assert done.returncode == 1


def test_an_output_that_nobody_reads_any_more_ends_quietly() -> None:
    reads, writes = os.pipe()
    os.close(reads)
    command = [*LMKV, "config", "show"]
    with os.fdopen(writes, "wb") as output:
        done = subprocess.run(command, stdout=output, stderr=subprocess.PIPE, text=True, timeout=LIMIT, check=False)
    assert (done.returncode, done.stderr) == (1, "")


def test_a_configuration_file_that_is_none_is_said_at_once(tmp_path: Path) -> None:
    (tmp_path / "folder").mkdir()
    os.mkfifo(tmp_path / "pipe")
    (tmp_path / "huge").write_bytes(b"#" * (1 << 20))
    for named in (Path("/dev/zero"), tmp_path / "folder", tmp_path / "pipe", tmp_path / "huge"):
        for verb in ("show", "check", "migrate"):
            started = time.monotonic()
            done = run(verb, LMKV_CONFIG_FILE=str(named)) if verb == "show" else run(verb, named)
            assert time.monotonic() - started < LIMIT
            assert (done.exit_code, type(done.exception)) == (2, SystemExit)
            assert done.stderr.startswith(f"file {named}: the ")
