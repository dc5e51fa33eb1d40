"""`lmkv doctor`: what it finds, and when it says that something will not work."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping
from importlib.util import find_spec
from itertools import takewhile
from pathlib import Path
from typing import Any

import pytest
import typer
from rich.errors import MarkupError
from typer.testing import CliRunner

from lmkv.cli import doctor, findings
from lmkv.cli.app import app
from lmkv.cli.findings import Finding
from lmkv.cli.server import json_object
from lmkv.config import Config
from lmkv.errors import how_to_install
from lmkv.vllm import plugin
from tests.kit import LIMIT, raised
from tests.servers import Proxy, RedisServer, any_kind, free_port, redis_server, without_limits

NOT_ROOT = pytest.mark.skipif(os.geteuid() == 0, reason="root may write everywhere")


CONNECTOR = '{"kv_connector": "LMKVConnector"}'
REPLACES = "kv-transfer-config: {kv_connector: LMKVConnector}\nkv-offloading-size: 4"


def make_process(folder: Path, arguments: list[str]) -> None:
    """A process with this command line, in a folder like /proc."""
    (folder / "123").mkdir()
    (folder / "123" / "cwd").symlink_to(folder)
    (folder / "123" / "cmdline").write_bytes("\0".join([*arguments, ""]).encode())


def by_name(findings: list[Finding]) -> Mapping[str, Finding]:
    return {found.name: found for found in findings}


def old_vllm(folder: Path) -> str:
    """A folder that, first on the path, has a vLLM installed that nobody would import."""
    info = folder / "old" / "vllm-0.1.dist-info"
    info.mkdir(parents=True)
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: vllm\nVersion: 0.1\n")
    return str(info.parent)


def disk(folder: Path, **settings: object) -> Mapping[str, Finding]:
    config = Config(local_disk=str(folder), **{"max_local_disk_size": 0.1, "disk_min_free": 0, **settings})  # type: ignore[arg-type]
    return by_name(list(findings.examine_disk(config)))


class TestConfiguration:
    def test_every_setting_says_where_it_comes_from(self) -> None:
        config = Config.load(env={"LMKV_CHUNK_SIZE": "512"}, extra={"lmkv.pin_ttl": 60})
        found = by_name(list(findings.examine_configuration(config)))
        assert list(found) == [setting.name for setting in config.describe()]
        assert (found["chunk_size"].value, found["chunk_size"].note) == ("512 tokens", "environment LMKV_CHUNK_SIZE")
        assert (found["pin_ttl"].value, found["pin_ttl"].note) == ("60.0 s", "kv_connector_extra_config")
        assert (found["local_disk"].value, found["local_disk"].note) == ("none", "default")

    def test_a_bad_setting_is_a_problem_and_the_rest_is_still_examined(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.syspath_prepend(old_vllm(tmp_path))
        first, *others = findings.examine({"LMKV_CHUNK_SISE": "1"}, {})
        assert "LMKV_CHUNK_SISE" in first.problem
        assert {"versions", "vllm"} <= {found.area for found in others}

    def test_what_is_no_json_object_is_refused(self) -> None:
        for text in ("{", "[]", "3"):
            raised(typer.BadParameter, "", json_object, text)


class TestSecrets:
    def test_files_that_have_none_are_problems(self, tmp_path: Path) -> None:
        (tmp_path / "empty").touch()
        names = ("remote_password_file", "agent_token_file", "authentication_key_file")
        config = Config(**dict.fromkeys(names, str(tmp_path / "empty")))  # type: ignore[arg-type]
        problems = [found.problem for found in findings.examine_secrets(config)]
        assert [name for name, problem in zip(names, problems, strict=True) if name in problem] == list(names)

    def test_a_file_that_everybody_may_read_is_a_warning(self, tmp_path: Path) -> None:
        (tmp_path / "key").write_bytes(b"k" * 32)
        config = Config(authentication_key_file=str(tmp_path / "key"))
        warnings = []
        for mode in (0o644, 0o640):
            (tmp_path / "key").chmod(mode)
            warnings.append([found.warning for found in findings.examine_secret_files(config)])
        ((told,), none) = warnings
        assert f"run chmod o-r {tmp_path / 'key'}" in told
        assert not none

    def test_the_key_is_named_and_not_shown(self, tmp_path: Path) -> None:
        (tmp_path / "key").write_bytes(b"k" * 32)
        (found,) = findings.examine_secrets(Config(authentication_key_file=str(tmp_path / "key")))
        (same,) = findings.examine_secrets(Config(authentication_key="k" * 32))
        assert found == same
        assert "kk" not in found.value
        assert list(findings.examine_secrets(Config())) == []


class TestMemory:
    def test_limits_are_named(self) -> None:
        found, cut, none = (
            by_name(list(findings.examine_memory(Config(max_local_cpu_size=size)))) for size in (0.01, 1e6, 1e-9)
        )
        assert list(found) == ["available", "control group's limit", "host memory"]
        assert (found["host memory"].value, found["host memory"].note) == ("0.01 GiB", "as configured")
        assert not any(item.problem for item in found.values())
        assert (cut["host memory"].note, cut["host memory"].problem) == ("cut from 1000000.00 GiB", "")
        assert "max_local_cpu_size" in none["host memory"].problem

    def test_shared_memory_is_tried(self, memory_path: Path) -> None:
        def found(folder: Path, gib: float) -> Finding:
            config = Config(shared_memory=str(folder), max_shared_memory_size=gib)
            [finding] = findings.examine_shared_memory(config)
            return finding

        folder = memory_path / "lmkv"
        given = found(folder, 0.01)
        assert (given.value, given.note, given.problem) == ("0.01 GiB", f"of 0.01 GiB in {folder}, on tmpfs", "")
        assert not folder.exists()
        assert found(folder, 1e6).note.startswith("of 1000000.00 GiB")
        (memory_path / "file").touch()
        assert "is not a folder" in found(memory_path / "file", 0.01).problem
        assert list(findings.examine_shared_memory(Config())) == []


@pytest.fixture(scope="module")
def redis(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RedisServer]:
    with redis_server(any_kind(), tmp_path_factory.mktemp("server")) as server:
        yield server


@pytest.fixture
def client(redis: RedisServer) -> Iterator[Any]:
    with without_limits(redis) as client:
        yield client


COMMANDS = {"lookups": "exists", "reads": "get", "writes": "set", "deletions": "unlink"}


def stores(*urls: str, **settings: object) -> tuple[list[Finding], list[str]]:
    config = Config.load(env={}, extra={"remote_urls": list(urls), **settings})
    found = list(findings.examine_stores(config))
    return found, [each.problem for each in found if each.problem]


class TestStores:
    def test_a_store_that_works_is_left_as_it_was(self, redis: RedisServer, client: Any) -> None:
        client.set("somebody", "else")
        [found], problems = stores(redis.url)
        assert (found.value, found.note) == (redis.url, "tried: lookups, reads, writes, deletions")
        assert problems == []
        assert client.keys("*") == [b"somebody"]
        assert stores() == ([], [])

    @pytest.mark.parametrize("verb", COMMANDS)
    def test_each_call_that_is_refused_is_said_with_its_remedy(
        self, redis: RedisServer, client: Any, verb: str
    ) -> None:
        client.execute_command("ACL SETUSER", "default", f"-{COMMANDS[verb]}")
        for _ in range(2):
            _, problems = stores(redis.url)
            # A write looks its name up first.
            assert {problem.split(": ")[1] for problem in problems} == (
                {"lookups fail", "writes fail"} if verb == "lookups" else {f"{verb} fail"}
            )
            assert all(problem.endswith(f"; give the store's user +{COMMANDS[verb]}") for problem in problems)
        assert client.dbsize() == (verb == "deletions"), "what may not be deleted is one chunk, however often"

    def test_a_full_server_refuses_writes_alone(self, redis: RedisServer, client: Any) -> None:
        client.config_set("maxmemory", "1mb")
        _, [problem] = stores(redis.url)
        assert "writes fail: " in problem
        assert "allkeys-lru" in problem

    def test_a_policy_that_evicts_nothing_is_a_warning(self, redis: RedisServer, client: Any) -> None:
        client.config_set("maxmemory", "1gb")
        policies = {"noeviction": {}, "volatile-lru": {}, "allkeys-lru": None}
        for policy, settings in {**policies, "volatile-lfu": {"remote_ttl": 60}}.items():
            client.config_set("maxmemory-policy", policy)
            evicts = settings is None or bool(settings)
            found, _ = stores(redis.url, **(settings or {}))
            [warning] = [each.warning for each in found]
            assert ("evicts no chunk when the server is full: set allkeys-lru" in warning) is not evicts
        client.config_set("maxmemory", "0")

    def test_a_password_that_is_wrong(self, redis: RedisServer, client: Any) -> None:
        client.execute_command("ACL SETUSER", "cache", "on", ">right", "~*", "+@all")
        _, [problem] = stores(redis.url, remote_username="cache", remote_password="wrong")
        assert "all calls fail" in problem
        assert "correct remote_password, and remote_username if" in problem
        assert "wrong;" not in problem

    def test_a_server_that_answers_nothing_is_given_up_in_time(self, redis: RedisServer) -> None:
        proxy = Proxy(redis.port)
        proxy.deaf = True
        started = time.monotonic()
        _, [problem] = stores(f"redis://127.0.0.1:{proxy.port}", remote_timeout=0.2)
        proxy.close()
        assert time.monotonic() - started < LIMIT
        assert "start the store or correct remote_url" in problem

    def test_nobody_listens(self, monkeypatch: pytest.MonkeyPatch) -> None:
        url = f"redis://:hunter2@127.0.0.1:{free_port()}"
        monkeypatch.setenv("LMKV_REMOTE_URL", url)
        monkeypatch.setattr(findings, "examine_vllm", lambda env: iter(()))
        done = CliRunner().invoke(app, ["doctor"])
        assert done.exit_code == 1
        assert "Nothing is wrong." not in done.output
        assert "hunter2" not in done.output
        [line] = [each for each in done.output.splitlines() if each.startswith("Will not work")]
        assert "all calls fail" in line
        assert line.endswith("; start the store or correct remote_url")


class TestDisk:
    def test_what_is_tried_and_left_as_it_was(self, tmp_path: Path) -> None:
        [none] = findings.examine_disk(Config())
        assert (none.value, none.problem) == ("none", "")
        (tmp_path / "mine").write_text("mine")
        found = disk(tmp_path)
        assert found["reads and writes"].value in {"O_DIRECT", "through the page cache"}
        assert not any(item.problem for item in found.values())
        assert disk(tmp_path / "a" / "b")["folder"].note == f"does not exist yet; lmkv tried {tmp_path}"
        assert disk(tmp_path, disk_direct="off")["reads and writes"].value == "through the page cache"
        assert (
            disk(tmp_path, max_local_disk_size=1e9)["free"].note
            == "less than max_local_disk_size and disk_min_free together"
        )
        assert "disk_min_free" in disk(tmp_path, disk_min_free=1e9)["free"].problem
        assert [path.name for path in tmp_path.iterdir()] == ["mine"]

    def test_a_file_in_the_way_is_a_problem_with_a_way_out(self, tmp_path: Path) -> None:
        file = tmp_path / "file"
        file.write_text("mine")
        for below in (".", "folder/of/it"):
            problem = disk(file / below)["folder"].problem
            assert f"{file} is not a folder: remove the file, or name another folder" in problem
        assert file.read_text() == "mine"
        found = disk(Path("/proc"))["folder"].problem
        assert "/proc: " in found, "a medium without files"
        assert "name a folder that the server's user can write to" in found

    @NOT_ROOT
    def test_a_folder_of_others_is_a_problem(self, tmp_path: Path) -> None:
        tmp_path.chmod(0o500)
        assert disk(tmp_path)["folder"].problem


class TestPlugin:
    def test_it_is_registered(self) -> None:
        found = findings.plugin_finding({})
        assert (found.value, found.problem) == ("registered", "")
        assert not findings.plugin_finding({"VLLM_PLUGINS": "other,lmkv"}).problem
        for chosen in ("", "other"):
            assert "kv_connector_module_path" in findings.plugin_finding({"VLLM_PLUGINS": chosen}).problem


class TestImport:
    @pytest.mark.parametrize(
        ("arguments", "replaced"),
        [
            (["vllm", "serve", "m", "--kv-transfer-config", CONNECTOR, "--kv-offloading-size", "4"], True),
            (["python", "-m", "vllm.entrypoints.openai.api_server", "--config", "server.yaml"], True),
            (["vllm", "serve", "m", "--kv-transfer-config", CONNECTOR], False),
            (["editor", "--kv-transfer-config", CONNECTOR, "--kv-offloading-size", "4"], False),
        ],
    )
    def test_a_server_that_replaces_it_is_a_problem(
        self, arguments: list[str], replaced: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        (tmp_path / "server.yaml").write_text(REPLACES)
        make_process(tmp_path, arguments)
        monkeypatch.setattr(findings, "PROCESSES", tmp_path)
        problems = [found.problem for found in findings.examine_servers()]
        assert len(problems) == replaced
        assert all(
            "process 123: vLLM ignores LMKVConnector because of --kv-offloading-size" in problem for problem in problems
        )

    def test_a_pipe_of_a_servers_is_left_to_it(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        os.mkfifo(tmp_path / "server.yaml")
        pipe = os.open(tmp_path / "server.yaml", os.O_RDWR | os.O_NONBLOCK)
        os.write(pipe, REPLACES.encode())
        make_process(tmp_path, ["vllm", "serve", "m", "--config", "server.yaml"])
        monkeypatch.setattr(findings, "PROCESSES", tmp_path)
        assert list(findings.examine_servers()) == []
        assert os.read(pipe, 1000) == REPLACES.encode()
        os.close(pipe)

    def test_there_is_an_end_to_how_long_servers_are_examined(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        make_process(tmp_path, ["vllm", "--config", "server.yaml"])
        monkeypatch.setattr(findings, "PROCESSES", tmp_path)
        monkeypatch.setattr(findings, "SERVERS_TIMEOUT", -1.0)
        (found,) = findings.examine_servers()
        assert (found.name, found.value, found.problem) == ("not examined", "1 processes", "")

    def test_what_cannot_be_imported_is_a_problem_with_its_reason(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(plugin, "MODULE", "json")
        found = findings.import_finding()
        assert (found.value, found.problem) == ("can be imported", "")
        monkeypatch.setattr(plugin, "MODULE", "json.nothing")
        found = findings.import_finding()
        assert found.value == "cannot be imported"
        assert "No module named 'json.nothing'" in found.problem


def told(findings: Any) -> tuple[list[str], list[str]]:
    """Warnings and problems."""
    found = list(findings)
    return [each.warning for each in found if each.warning], [each.problem for each in found if each.problem]


class TestLevels:
    """Each of these had been "Nothing is wrong."."""

    def test_a_store_whose_client_is_not_installed(self) -> None:
        if find_spec("mooncake") is not None:
            pytest.skip("it is installed")
        _, [problem] = stores("mooncake://localhost:1/")
        assert problem == f"remote_url mooncake://localhost:1/ needs the package mooncake: {how_to_install('mooncake')}"

    def test_an_address_that_the_server_would_refuse(self) -> None:
        extra = {"agent_listen": "0.0.0.0:8377", "agent_token": "secret"}
        _, [problem] = told(takewhile(lambda each: each.area == "configuration", findings.examine({}, extra)))
        assert problem.startswith("kv_connector_extra_config: agent_listen = '0.0.0.0:8377' must be unix:/path, or a")
        for allowed in ("127.0.0.1:0", "localhost:8377", "[::1]:8377", "unix:/run/lmkv.sock"):
            assert Config(agent_listen=allowed, agent_token="secret").agent_listen == allowed

    def test_host_memory_that_is_cut(self) -> None:
        [warning], problems = told(findings.examine_memory(Config(max_local_cpu_size=1e6)))
        assert problems == []
        assert warning.startswith("max_local_cpu_size is 1000000.00 GiB, but only ")

    def test_a_disk_that_is_smaller(self, tmp_path: Path) -> None:
        [warning], problems = told(disk(tmp_path, max_local_disk_size=1e6).values())
        assert problems == []
        assert warning.startswith("max_local_disk_size is 1000000.00 GiB, but only ")

    def test_a_folder_that_is_probably_not_meant(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, memory_path: Path
    ) -> None:
        monkeypatch.chdir(tmp_path)
        for folder, why in ((Path("kv"), "relative to the folder"), (tmp_path / "a" / "b", "is the disk mounted?")):
            [warning], problems = told(disk(folder).values())
            assert (why in warning, problems) == (True, [])
        assert told(disk(tmp_path / "kv").values()) == ([], [])
        assert (
            "lmkv will use"
            in told(
                findings.examine_shared_memory(
                    Config(shared_memory=str(memory_path / "kv"), max_shared_memory_size=1e6)
                )
            )[0][0]
        )

    def test_an_extra_that_a_setting_needs(self, monkeypatch: pytest.MonkeyPatch) -> None:
        config = Config(agent_listen="unix:/run/lmkv.sock", authentication_key="k" * 32)
        assert told(findings.examine_extras(config)) == ([], [])
        monkeypatch.setattr(findings, "find_spec", lambda name: None)
        assert told(findings.examine_extras(config)) == (
            [],
            [
                f"agent_listen needs fastapi and uvicorn: {how_to_install('agent')}",
                f"authentication_key needs cryptography: {how_to_install('auth')}",
            ],
        )
        _, [problem] = told(findings.examine_extras(Config(cache_policy="no.such:Policy")))
        assert "no.such" in problem

    @pytest.mark.parametrize(
        ("extra", "strict", "last", "code"),
        [
            ("{}", True, "Nothing is wrong.", 0),
            ('{"max_local_cpu_size": 1000000}', False, "1 warning", 0),
            ('{"max_local_cpu_size": 1000000}', True, "1 warning", 1),
            ('{"lmcache.chunk_siz": 1, "lmcache.local_cpu": false}', False, "2 warnings", 1),
            ('{"max_local_cpu_size": 1000000, "remote_url": "redis://127.0.0.1:1"}', False, "1 warning, 1 error", 1),
            ('{"chunk_size": "x", "pin_share": 2}', False, "2 errors", 2),
        ],
    )
    def test_the_last_line_counts_and_the_exit_code_says_so(
        self, extra: str, strict: bool, last: str, code: int, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr(findings, "examine_vllm", lambda env: iter(()))
        done = CliRunner().invoke(app, ["doctor", "--extra", extra, *["--strict"] * strict])
        assert (done.stdout.splitlines()[-1], done.exit_code) == (last, code), done.output
        assert done.stdout.count("Warning: ") == (int(last[0]) if "warning" in last else 0)
        as_json = json.loads(CliRunner().invoke(app, ["doctor", "--extra", extra, "--json"]).stdout)
        assert {each["level"] for each in as_json["findings"]} - {"ok"} == set(re.findall("warning|error", last))

    def test_settings_with_their_defaults_are_shown_where_they_are_asked_for(
        self, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr(findings, "examine_vllm", lambda env: iter(()))
        changed = CliRunner().invoke(app, ["doctor", "--extra", '{"chunk_size": 64}']).stdout
        whole = CliRunner().invoke(app, ["doctor", "--extra", '{"chunk_size": 64}', "--all"]).stdout
        assert ("chunk_size" in changed, "pin_share" in changed) == (True, False)
        assert ("chunk_size" in whole, "pin_share" in whole) == (True, True)
        assert "settings have their defaults: --all shows them" in changed


class TestShow:
    """Findings are printed verbatim: rich does not read square brackets in them as markup."""

    def test_values_are_no_markup(self, capsys: pytest.CaptureFixture[str]) -> None:
        for value in ("[/x]", "[red]", "lmkv[disk]", "[bold]a[/bold]", ":smile:", "\\[x]"):
            finding = Finding("area", value, value, note=value, problem=f"problem {value}")
            doctor.show([finding, Finding("disk", value, value)])
            shown = capsys.readouterr().out
            assert shown.count(value) == 6
            assert f"Will not work: problem {value}" in shown

    def test_no_word_is_broken_at_80_columns(
        self, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
    ) -> None:
        monkeypatch.setenv("COLUMNS", "80")
        path, note = f"/{'folder' * 8}", "environment LMKV_LOCAL_DISK"
        found = [Finding("area", "a_name_of_twenty_letters", path, note=note), Finding("area", "short", "1", note=note)]
        doctor.show(found)
        lines = [line.split() for line in capsys.readouterr().out.splitlines()]
        assert lines[1:4] == [["✓", "a_name_of_twenty_letters", path], note.split(), ["✓", "short", "1", *note.split()]]

    def test_the_command_shows_a_bad_value_as_it_is(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.syspath_prepend(old_vllm(tmp_path))
        for value in ("[/x]", "[red]"):
            result = CliRunner().invoke(app, ["doctor"], env={"LMKV_CHUNK_SIZE": value})
            assert result.exit_code == 2, result.output
            assert not isinstance(result.exception, MarkupError)
            assert f"chunk_size = '{value}'" in result.stdout


def test_the_command_exits_with_what_it_found(tmp_path: Path) -> None:
    """As a user runs it; a vLLM that is too old, so that it need not be imported."""
    command = [Path(sys.executable).with_name("lmkv"), "doctor", "--json"]
    env = {name: value for name, value in os.environ.items() if not name.startswith(("LMKV_", "VLLM_"))}
    env["PYTHONPATH"] = os.pathsep.join([old_vllm(tmp_path), *sys.path])
    extra = json.dumps({"local_disk": str(tmp_path), "max_local_disk_size": 0.01, "disk_min_free": 1e9})
    done = subprocess.run(
        [*command, "--extra", extra], env=env, capture_output=True, text=True, timeout=500, check=False
    )
    answer = json.loads(done.stdout)
    assert (done.returncode, done.stderr, answer["ok"]) == (1, "", False)
    full, old = answer["problems"]
    assert "disk_min_free" in full
    assert "0.1" in old
    areas = {"configuration", "memory", "disk", "versions", "device", "vllm"}
    assert areas == {found["area"] for found in answer["findings"]}
