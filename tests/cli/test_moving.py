"""Settings of people who move to lmkv, in tests/moving: one answer from every command and from the server's start."""

from __future__ import annotations

import json
import os
import shlex
import time
import tomllib
from collections.abc import Mapping
from itertools import takewhile
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import yaml
from typer.testing import CliRunner

from lmkv import Config
from lmkv.cli.app import app
from lmkv.cli.findings import examine
from lmkv.config import SettingsResult, lmcache
from lmkv.errors import ConfigError

HERE = Path(__file__).parents[1] / "moving"


class Right(NamedTuple):
    """What is right for an input: exit status, settings, and what has to be said."""

    status: int
    settings: Mapping[str, object] = {}
    says: tuple[str, ...] = ()


EACH = "LMCache takes this size per rank, lmkv per engine; --tensor-parallel-size N multiplies it"
FILES = {
    "s3_host_style.yaml": Right(
        0,
        {"remote_url": "s3://kv-bucket?region=us-east-1", "remote_username": "name", "remote_password": "secret"},
        ("extra_config.s3_num_io_threads has no effect",),
    ),
    "s3_with_port.yaml": Right(
        0, {"remote_url": "s3://kv?endpoint=http://localhost:8080&region=us-west-04a", "remote_timeout": 10.0}
    ),
    "valkey_login.yaml": Right(
        0, {"remote_url": "valkey://127.0.0.1:18490/3", "remote_username": "default", "remote_password": "letmein"}
    ),
    "mooncake_extra.yaml": Right(
        0,
        {
            "remote_url": "mooncakestore://localhost:50051/?local_hostname=localhost&metadata_server=http://localhost:8080/"
            "metadata&protocol=rdma&device_name=mlx5_0&local_buffer_size=0&segment_size=21474836480"
        },
    ),
    "folder_url.yaml": Right(0, {"remote_url": "file:///mnt/share/kv", "local_cpu": False}),
    "lm_and_codec.yaml": Right(
        2, {"chunk_size": 256}, ("lmkv has no cache server: name a store", "remote_serde cannot be used")
    ),
    "sentinel.yaml": Right(
        1,
        {"remote_url": "redis-sentinel://localhost:26379,localhost:26380,localhost:26381", "chunk_size": 256},
        ("names no service: write /SERVICE after the URL's hosts, or set REDIS_SERVICE_NAME",),
    ),
    "cluster_nodes.yaml": Right(0, {"remote_url": "valkey+cluster://a.example:6379,b.example:6379,c.example:6379"}),
    "old_names.yaml": Right(
        2, {}, ("max_local_cache_size", "set the size of host memory with max_local_cpu_size, in GiB")
    ),
    "old_path.yaml": Right(2, {}, ("weka_path cannot be used: lmkv cannot store in this medium",)),
    "unset_variable.yaml": Right(2, {}, ("has a placeholder that nothing replaces: write the value of ${CACHE_DIR}",)),
    "bytes.yaml": Right(2, {}, ("if these are bytes, write 10",)),
    "codec_without_store.yaml": Right(
        0, {"local_disk": "/tmp/kv"}, ("remote_serde has no effect: remote_url is not set", EACH)
    ),
}
VARIABLES = {
    "per_rank.env": Right(
        0,
        {"local_disk": "/kv-store", "max_local_disk_size": 640.0},
        (f"max_local_cpu_size: {EACH}", f"max_local_disk_size: {EACH}"),
    ),
    "disk_true.env": Right(2, {}, ("local_disk = 'True' must be a path or file:///path, not a switch or a number",)),
    "disk_size_zero.env": Right(
        1, {"max_local_cpu_size": 100.0}, ("lmkv uses no local_disk, because max_local_disk_size is 0, as in LMCache",)
    ),
}
EXTRAS = {
    "engine_own.json": Right(
        2, {}, ("'cpu_bytes_to_use'", "vLLM's own offloading: write 'max_local_cpu_size', in GiB", "'local_disk'")
    ),
    "use_native.json": Right(0, {}, ("use_native has no effect",)),
    "dotted.args": Right(0, {"max_local_cpu_size": 0.5}),
}


def run(*words: str, **env: str) -> Any:
    none = {name: None for name in os.environ if name.startswith(("LMKV_", "LMCACHE_"))}
    return CliRunner().invoke(app, list(words), env={**none, **env, "COLUMNS": "400"})


def given(name: str) -> tuple[dict[str, str], dict[str, Any]]:
    """The environment and the extra configuration of an input."""
    path = HERE / name
    if path.suffix == ".yaml":
        return {"LMCACHE_CONFIG_FILE": str(path)}, {}
    if path.suffix == ".env":
        lines = [line for line in path.read_text().splitlines() if not line.startswith("#")]
        return dict(line.split("=", 1) for line in lines), {}
    if path.suffix == ".json":
        return {}, json.loads(path.read_text())["kv_connector_extra_config"]
    # As vLLM reads dotted arguments.
    return {}, {"lmkv": {"max_local_cpu_size": 0.5}}


@pytest.mark.parametrize("name", [*FILES, *VARIABLES, *EXTRAS])
def test_the_server_says_what_the_commands_say(name: str) -> None:
    right = {**FILES, **VARIABLES, **EXTRAS}[name]
    env, extra = given(name)
    answer = SettingsResult.to(env=env, extra=extra)
    assert answer.status == right.status
    shown = run("config", "show", "--json", "--extra", json.dumps(extra), **env)
    found = json.loads(shown.stdout)
    assert (shown.exit_code, found["problems"]) == (right.status, list(answer.problems))
    said = "\n".join([*map(str, answer.readings), *(text for _, text in answer.notes), *answer.problems])
    assert [text for text in right.says if text not in said] == []
    assert "letmein" not in said
    if right.status == 2:
        with pytest.raises(ConfigError) as caught:
            Config.load(env=env, extra=extra)
        assert str(caught.value).splitlines() == found["problems"]
    else:
        config = Config.load(env=env, extra=extra)
        assert {key: str(value) for key, value in plain(answer.values).items() if key in right.settings} == {
            key: str(value) for key, value in right.settings.items()
        }
        assert (config.local_disk is None) or name != "disk_size_zero.env"
        assert [text for _, text in answer.notes if text not in [line for _, line in config.remarks]] == []


def plain(values: Mapping[str, Any]) -> dict[str, Any]:
    """Values as a file has them."""
    return {
        key: getattr(value, "value", " ".join(each.text for each in value) if isinstance(value, tuple) else value)
        for key, value in values.items()
    }


@pytest.mark.parametrize("name", FILES)
def test_check_and_migrate_say_the_same(name: str, tmp_path: Path) -> None:
    right, file = FILES[name], str(HERE / name)
    checked = run("config", "check", file)
    assert checked.exit_code == right.status
    assert [text for text in right.says if text not in checked.output] == []
    migrated = run("config", "migrate", file)
    assert migrated.exit_code == right.status
    assert [text for text in right.says if text not in migrated.output] == []
    found = yaml.safe_load(migrated.stdout) or {}
    assert {key: found.get(key) for key in right.settings} == dict(right.settings)
    if right.status < 2:
        (tmp_path / "own.yaml").write_text(migrated.stdout)
        theirs = Config.load(env={"LMCACHE_CONFIG_FILE": file})
        assert Config.load(env={}, file=tmp_path / "own.yaml") == theirs
    else:
        assert checked.stderr == migrated.stderr, "the same reasons"


@pytest.mark.parametrize("name", [*FILES, *VARIABLES, *EXTRAS])
def test_doctor_says_the_same(name: str) -> None:
    env, extra = given(name)
    answer = SettingsResult.to(env=env, extra=extra)
    # Its first findings: it has not looked at anything else yet.
    findings = list(takewhile(lambda finding: finding.area == "configuration", examine(env, extra)))
    assert [finding.problem for finding in findings if finding.problem] == list(answer.problems)
    assert [note for _, note in answer.notes if note not in [finding.value for finding in findings]] == []
    unused = {each.key for each in answer.readings if each.kind not in ("used", "refused")}
    assert unused <= {finding.name for finding in findings}


COMMANDS: dict[str, tuple[str, Right]] = {
    "LMCache's server": (
        (
            "lmcache server --l1-size-gb 100 --chunk-size 512 --eviction-policy ARC --shm-name kv --port 6555 "
            """--l2-adapter '{"type": "resp", "host": "cache", "port": 6379, "username": "me", "password": "secret"}'"""
        ),
        Right(
            0,
            {"shared_memory": "/dev/shm/kv", "max_shared_memory_size": 100.0, "chunk_size": 512, "cache_policy": "ARC"}
            | {"remote_url": "redis://cache:6379", "remote_username": "me", "remote_password": "secret"},
            ("--port has no effect: lmkv has no cache server", "max_local_cpu_size (5 GiB) in addition"),
        ),
    ),
    "its tiers": (
        (
            """lmcache server --l2-adapter '{"type": "fs", "base_path": "/mnt/kv"}' """
            """--l2-adapter '{"type": "raw_block"}' """
            "--gds-l1-path /nvme --what"
        ),
        Right(
            2,
            {"remote_url": "file:///mnt/kv"},
            ("raw_block cannot be used: lmkv has no such tier", "--gds-l1-path cannot be used", "--what is unknown"),
        ),
    ),
    "a shell's": (
        "/bin/sh -c 'exec lmcache server --l1-size-gb 60'",
        Right(0, {"shared_memory": "/dev/shm/lmkv", "max_shared_memory_size": 60.0}),
    ),
    "several stores": (
        """lmcache server --l2-adapter '{"type":"resp","host":"a"}' --l2-adapter '{"type":"s3","s3_endpoint":"b"}'""",
        Right(0, {"remote_url": ["redis://a", "s3://b"]}),
    ),
    "several stores, and a login": (
        (
            """lmcache server --l2-adapter '{"type":"resp","host":"a","password":"p"}' """
            """--l2-adapter '{"type":"s3","s3_endpoint":"b"}'"""
        ),
        Right(2, {"remote_url": "redis://a"}, ("several stores need logins in remote_url",)),
    ),
    "misspelled keys": (
        """lmcache server --l1-size 5 --l2-adapter '{"type": "fs", "base_path": "/a", "numworkers": 3}'""",
        Right(
            1,
            {"remote_url": "file:///a"},
            ("--l1-size is unknown: did you mean --l1-size-gb?", "did you mean num_workers, which has no effect?"),
        ),
    ),
    "two connectors that become one": (
        (
            "vllm serve m --kv-transfer-config "
            """'{"kv_connector":"MultiConnector", "kv_role":"kv_both", "kv_connector_extra_config":{"connectors":["""
            """{"kv_connector":"OffloadingConnector", "kv_connector_extra_config":{"cpu_bytes_to_use":1073741824}}, """
            """{"kv_connector":"OffloadingConnector", "kv_connector_extra_config":{"shared_storage_path":"/kv"}}]}}'"""
        ),
        Right(0, {"max_local_cpu_size": 1.0, "remote_url": "file:///kv"}),
    ),
    "two connectors that differ": (
        (
            "vllm serve m --kv-transfer-config "
            """'{"kv_connector":"MultiConnector", "kv_role":"kv_both", "kv_connector_extra_config":{"connectors":["""
            """{"kv_connector":"OffloadingConnector", "kv_connector_extra_config":{"block_size":64}}, """
            """{"kv_connector":"OffloadingConnector", "kv_connector_extra_config":{"block_size":256}}]}}'"""
        ),
        Right(1, {"chunk_size": 256}, ("chunk_size: 256 (block_size) replaces 64 (block_size)",)),
    ),
    "requests that fail": (
        (
            """vllm serve m --kv-transfer-config '{"kv_connector": "LMCacheConnectorV1", "kv_role": "kv_both", """
            """"kv_load_failure_policy": "fail"}'"""
        ),
        Right(0, {}, ("kv_load_failure_policy: lmkv writes recompute, so that vLLM computes",)),
    ),
    "nothing in a shell's string": ("sh -c ''", Right(2, {}, ("give `lmcache server ...` or `vllm serve ...`",))),
    "a cluster of Valkey, and a bucket": (
        """lmcache server --l2-adapter '{"type": "valkey", "startup_nodes": "a:1,b:2", "cluster_mode": true}'""",
        Right(0, {"remote_url": "valkey+cluster://a:1,b:2"}),
    ),
    "an engine of LMCache's server": (
        (
            "vllm serve m --port 8000 --kv-transfer-config "
            """'{"kv_connector": "LMCacheMPConnector", "kv_role": "kv_both", """
            """"kv_connector_extra_config": {"lmcache.mp.host": "tcp://h", "lmcache.chunk_size": 128}}'"""
        ),
        Right(2, {"chunk_size": 128}, ("vllm serve m --port 8000", "mp.host cannot be used: lmkv has no cache server")),
    ),
    "vLLM's own flags": (
        "vllm serve m --kv-offloading-size=64 --kv-offloading-backend native --max-model-len 4096",
        Right(0, {"max_local_cpu_size": 64.0}, ("vllm serve m --max-model-len 4096",)),
    ),
    "vLLM's own connector": (
        (
            """vllm serve m --kv-transfer-config '{"kv_connector": "OffloadingConnector", "kv_role": "kv_both", """
            """"kv_connector_extra_config": {"cpu_bytes_to_use": 21474836480, "spec_name": "TieringOffloadingSpec", """
            """"secondary_tiers": [{"type": "fs", "root_dir": "/data/kv", "max_disk_gib": 200}]}}'"""
        ),
        Right(0, {"max_local_cpu_size": 20.0, "local_disk": "/data/kv", "max_local_disk_size": 200.0}),
    ),
    "a tier without a capacity": (
        (
            "vllm serve m --kv-transfer-config "
            """'{"kv_connector": "OffloadingConnector", "kv_connector_extra_config": """
            """{"secondary_tiers": [{"type": "fs", "root_dir": "/data/kv"}, {"type": "obj"}]}}'"""
        ),
        Right(2, {}, ("a folder needs a capacity", "secondary_tiers: obj cannot be used")),
    ),
    "lmkv's own": (
        (
            """vllm serve m --kv-transfer-config '{"kv_connector": "LMKVConnector", "kv_role": "kv_both", """
            """"kv_load_failure_policy": "recompute", """
            """"kv_connector_extra_config": {"lmkv.chunk_size": 64, "max_local_cpu_size": 2}}'"""
        ),
        Right(0, {"chunk_size": 64, "max_local_cpu_size": 2.0}),
    ),
    "lmkv's own, misspelled": (
        (
            """vllm serve m --kv-transfer-config '{"kv_connector": "LMKVConnector", """
            """"kv_connector_extra_config": {"chunk_siz": 64, "lmcache.local_cpu": false}}'"""
        ),
        Right(2, {}, ("unknown key 'chunk_siz' = 64; did you mean 'chunk_size'?", "local_cpu has no effect")),
    ),
    "another connector": (
        """vllm serve m --kv-transfer-config '{"kv_connector": "NixlConnector"}'""",
        Right(2, {}, ("lmkv cannot translate this connector: write LMKVConnector in its place",)),
    ),
    "no command": ("python x.py", Right(2, {}, ("give `lmcache server ...` or `vllm serve ...`",))),
}


@pytest.mark.parametrize("name", COMMANDS)
def test_a_command_becomes_lmkvs(name: str) -> None:
    line, right = COMMANDS[name]
    done = run("config", "migrate", "--", *shlex.split(line))
    assert done.exit_code == right.status
    assert [text for text in right.says if text not in done.output] == []
    if not done.stdout:
        return
    words = shlex.split(done.stdout.splitlines()[0])
    transfer = json.loads(words[words.index("--kv-transfer-config") + 1])
    assert (transfer["kv_connector"], transfer["kv_role"]) == ("LMKVConnector", "kv_both")
    found = transfer.get("kv_connector_extra_config", {})
    assert {key: found.get(key) for key in right.settings} == dict(right.settings)
    if right.status < 2:
        assert set(found) == set(right.settings)
        assert Config.load(env={}, extra=found).sources.keys() == found.keys(), "a server takes it"
    as_json = json.loads(run("config", "migrate", "--json", "--", *shlex.split(line)).stdout)
    assert as_json["settings"] == found


PUBLISHED = tomllib.loads((HERE / "published.toml").read_text("utf-8"))


@pytest.mark.parametrize("name", PUBLISHED)
def test_what_people_publish_is_used_as_meant_or_refused_with_a_way_out(name: str, tmp_path: Path) -> None:
    case = PUBLISHED[name]
    words = ["--", *shlex.split(case.get("command", ""))]
    if "file" in case:
        words = [str(tmp_path / case["file"])]
        Path(words[0]).write_text(case["text"])
    if "ranks" in case:
        words = ["--tensor-parallel-size", str(case["ranks"]), *words]
    done = run("config", "migrate", *words)
    found = json.loads(run("config", "migrate", "--json", *words).stdout)
    assert (done.exit_code, [text for text in case.get("says", ()) if text not in done.output]) == (case["status"], [])
    assert [text for text in ("of-nobody", *case.get("never", ())) if text in done.output] == []
    settings = found.get("settings", {})
    assert {key: settings.get(key) for key in case.get("settings", {})} == case.get("settings", {})
    if case["status"] < 2:
        assert Config.load(env={}, extra=settings).sources.keys() == settings.keys(), "a server takes it"
    if "file" in case:
        checked = run("config", "check", *words)
        assert (checked.exit_code, checked.stderr) == (case["status"], done.stderr), "the same reasons"


SERVER_KEYS = [key for key in lmcache.table() if key.startswith("mp.")]


@pytest.mark.parametrize("key", SERVER_KEYS)
def test_an_engine_of_lmcaches_server_is_answered_alike(key: str, tmp_path: Path) -> None:
    extra = {f"lmcache.{key}": "1"}
    transfer = {"kv_connector": "LMCacheMPConnector", "kv_role": "kv_both", "kv_connector_extra_config": extra}
    (tmp_path / "transfer.json").write_text(json.dumps(transfer, indent="\t"))
    started = [(each.kind, each.why) for each in SettingsResult.to(env={}, extra=extra).readings]
    for words in (["check", str(tmp_path / "transfer.json")], ["migrate", "--", "vllm", "serve", "m"]):
        more = ["--kv-transfer-config", json.dumps(transfer)] if "serve" in words else []
        done = run("config", words[0], "--json", *words[1:], *more)
        readings = json.loads(done.stdout)["readings"]
        assert done.exit_code == 2, "its connector has no server"
        assert [(each["kind"], each["why"]) for each in readings if each["key"].endswith(key)] == started


def test_a_file_of_options_is_read_as_vllm_reads_it(tmp_path: Path) -> None:
    text = "model: m\ntensor-parallel-size: 2\nenable-prefix-caching: false\nenforce_eager: true\nmiddleware: [a, b]\n"
    (tmp_path / "vllm.yaml").write_text(f"{text}hf-overrides: {{a: 3, b: [0.5, x], c: 007}}\n")
    words = ["LMCACHE_MAX_LOCAL_CPU_SIZE=4", "vllm", "serve", "--config", str(tmp_path / "vllm.yaml"), "--port", "1"]
    transfer = ["--kv-transfer-config", '{"kv_connector": "LMCacheConnectorV1"}']
    done = run("config", "migrate", "--", *words, *transfer)
    assert done.exit_code == 0
    assert done.stdout.startswith(
        "vllm serve --model m --tensor-parallel-size 2 --no-enable-prefix-caching --enforce-eager --middleware a b "
    )
    assert """'{"a": 3, "b": [0.5, "x"], "c": "007"}'""" in done.stdout
    assert '{"max_local_cpu_size": 8.0}' in done.stdout, "for each of two ranks there"
    gone = run("config", "migrate", "--", *words[:4], "/no/such.yaml", *transfer)
    assert (gone.exit_code, "the file of --config cannot be read: file /no/such.yaml: not found" in gone.output) == (
        1,
        True,
    )


def test_a_source_that_cannot_be_read_hides_no_other() -> None:
    env = {"LMCACHE_CONFIG_FILE": "/no/such.yaml", "LMCACHE_EXTRA_CONFIG": "{'use_odirect': True}"}
    answer = SettingsResult.to(env={**env, "LMCACHE_ENABLE_PD": "1", "LMCACHE_CHUNK_SIZE": "64"})
    assert [line.partition(": ")[0] for line in answer.problems] == [
        "file /no/such.yaml",
        "environment LMCACHE_EXTRA_CONFIG",
        "environment LMCACHE_ENABLE_PD",
    ]
    assert answer.values == {"chunk_size": 64}


def test_the_value_of_an_unknown_key_has_one_form(tmp_path: Path) -> None:
    (tmp_path / "own.yaml").write_text("max_local_cpu_siz: 64.0\nlocal_cpu: true\n")
    files = run("config", "check", str(tmp_path / "own.yaml")).stderr
    extras = run("config", "show", "--extra", '{"max_local_cpu_siz": 64.0, "local_cpu": true}').stderr
    assert {text.partition("unknown key ")[2] for text in (files, extras)} == {
        "'max_local_cpu_siz' = 64.0; did you mean 'max_local_cpu_size'?\n"
    }


def test_ten_thousand_unknown_keys_are_answered_at_once() -> None:
    keys = {f"max_local_gpu_size_{number}": 1 for number in range(10_000)}
    for extra in (keys, {f"lmcache.{key}": value for key, value in keys.items()}):
        start = time.process_time()
        answer = SettingsResult.to(env={}, extra=extra)
        said = "\n".join(answer.problems or map(str, answer.readings))
        assert time.process_time() - start < 1.0
        assert said.count("did you mean") == 20
    assert len(SettingsResult.to(env={}, extra=keys).problems) == 21
    assert SettingsResult.to(env={}, extra=keys).problems[-1] == "9980 more keys are unknown"


@pytest.mark.parametrize(("url", "here"), [("resp://", "redis://cache:6380"), ("resp://other:1", "redis://other:1")])
def test_the_environment_completes_an_address_without_a_host(url: str, here: str) -> None:
    env = {"LMCACHE_REMOTE_URL": url, "LMCACHE_RESP_HOST": "cache", "LMCACHE_RESP_PORT": "6380"}
    assert [each.text for each in Config.load(env=env).remotes] == [here]


@pytest.mark.parametrize(("ranks", "cpu", "disk"), [(None, 20.0, 80.0), (1, 20.0, 80.0), (8, 160.0, 640.0)])
def test_sizes_of_each_rank_become_those_of_all(ranks: int | None, cpu: float, disk: float) -> None:
    env = {"LMCACHE_MAX_LOCAL_CPU_SIZE": "20", "LMCACHE_LOCAL_DISK": "/kv", "LMCACHE_MAX_LOCAL_DISK_SIZE": "80"}
    config = Config.load(env=env, ranks=ranks)
    assert (config.max_local_cpu_size, config.max_local_disk_size) == (cpu, disk)
    own = {"LMKV_MAX_LOCAL_CPU_SIZE": "20", "LMKV_LOCAL_DISK": "/kv", "LMKV_MAX_LOCAL_DISK_SIZE": "80"}
    assert Config.load(env=own, ranks=ranks).max_local_cpu_size == 20.0, "lmkv's own are for all ranks"


FLAGS = (HERE / "lmcache-server-flags.txt").read_text().split()
"""All options of `lmcache server`, of 0.5.6 and of 0.5.7rc2."""


def test_every_option_of_lmcaches_server_is_in_one_class() -> None:
    known = lmcache.commands()["server"]
    assert sorted(set(FLAGS) - known.keys()) == []
    for flag in FLAGS:
        readings = SettingsResult.to_command(["lmcache", "server", flag, "1"])[0].readings
        assert {each.kind for each in readings} <= {"used", "without effect", "refused"}, flag


IDLE = {
    "remote_password": ("secret", "remote_url"),
    "remote_timeout": (5, "remote_url"),
    "disk_write": ("back", "local_disk"),
    "disk_min_free": (5, "local_disk"),
    "agent_token": ("secret", "agent_listen"),
}


@pytest.mark.parametrize("name", IDLE)
def test_a_setting_that_does_nothing_is_a_warning(name: str) -> None:
    value, needed = IDLE[name]
    answer = SettingsResult.to(env={}, extra={name: value})
    assert (answer.status, [text for _, text in answer.notes]) == (
        1,
        [f"kv_connector_extra_config: {name} has no effect without {needed}"],
    )
    more = {"local_disk": "/kv", "max_local_disk_size": 1, "remote_url": "redis://h", "agent_listen": "unix:/a"}
    assert SettingsResult.to(env={}, extra={"agent_token": "secret", **more, name: value}).notes == ()


def test_a_password_before_a_command_is_not_shown_and_is_said() -> None:
    words = ("LMCACHE_REMOTE_URL=redis://me:letmein@h:6379", "vllm", "serve", "m")
    assert "letmein" not in run("config", "check", "--", *words).output
    migrated = run("config", "migrate", "--", *words)
    assert "All users of this machine can see the command's password" in migrated.output
    assert "All users" not in run("config", "migrate", "--", "vllm", "serve", "m").output


def test_show_and_doctor_read_a_file_as_check_does(tmp_path: Path) -> None:
    file = tmp_path / "lmcache.yaml"
    file.write_text("chunk_size: 64\nextra_config: {save_only_first_rank: true}\n")
    assert run("config", "check", str(file)).exit_code == run("config", "show", str(file)).exit_code == 0
    # Its first findings: it has not looked at anything else yet.
    first = takewhile(lambda finding: finding.area == "configuration", examine({}, {}, file=file))
    found = [finding for finding in first if finding.name == "chunk_size"]
    assert [finding.value for finding in found] == ["64 tokens"]
    (tmp_path / "pod.yaml").write_text("containers: []\n")
    assert "of containers" in run("config", "show", str(tmp_path / "pod.yaml")).output


def test_a_variable_alone_is_no_command() -> None:
    done = run("config", "check", "LMCACHE_CHUNK_SIZE=256")
    assert (done.exit_code, "is a variable without a command" in done.output) == (2, True)


def test_a_model_on_the_command_line_replaces_that_of_the_file(tmp_path: Path) -> None:
    (tmp_path / "serve.yaml").write_text("model: other\nport: 9000\nkv-offloading-size: 4\n")
    for words, printed in (
        (["/local/path", "--seed", "1"], "vllm serve /local/path --port 9000 --seed 1"),
        (["--seed", "1"], "vllm serve --model other --port 9000 --seed 1"),
    ):
        done = run("config", "migrate", "--", "vllm", "serve", *words, "--config", str(tmp_path / "serve.yaml"))
        assert printed in done.output
