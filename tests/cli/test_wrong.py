"""Configurations as people get them wrong: each has an answer that says what to write instead."""

from __future__ import annotations

import json
import socket
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from typer.testing import CliRunner, Result

from lmkv.cli import findings
from lmkv.cli.app import app
from lmkv.config import Config
from lmkv.errors import ConfigError
from lmkv.memory import machine
from tests.kit import every, raised

S3 = "for S3 write s3://BUCKET?endpoint=https://HOST:PORT&region=REGION"
FILES = {
    "# nothing\n": "sets nothing: write a line such as chunk_size: 256",
    "lmkv:\n  chunk_size: 64\n": "lmkv has no sections: write the settings of the section without 'lmkv' above them",
    "tiers: {disk: {size: 100}}\n": "lmkv has no sections",
    "LMKV_CHUNK_SIZE: 64\n": "did you mean 'chunk_size'?",
    "Chunk-Size: 64\n": "did you mean 'chunk_size'?",
    "config_file: kv.yaml\n": "name a file of settings in LMKV_CONFIG_FILE, or to Config.load as file=",
    "LMKV_CHUNK_SIZE=64\n": "a line such as chunk_size: 256, with a blank after the colon",
    "chunk_size:64\n": "with a blank after the colon",
    "- chunk_size: 64\n": "without a dash",
    "chunk_size: 64\nlocal_cpu:false\n": "line 3, column 1: could not find expected ':'; write key: value, with",
    "local_disk: {{ .Values.disk }}\n": "line 1, column 14: a key is in brackets: replace {{ name }} by the value",
    "local_disk: $HOME/kv\n": "write the value of $HOME",
    "remote_url: redis://$(REDIS_HOST):6379\n": "has $(REDIS_HOST), which Kubernetes replaces only if",
    "remote_url: redis://u:p@$HOST/0\n": "write the value of $HOST",
    "remote_url: '{{ redis_url }}'\n": "write the value of {{ redis_url }}",
    "remote_url: https://u:hunter2@minio:9000/bucket\n": S3,
    "remote_url: redis:cache:6379\n": "did you mean redis://?",
    "remote_url: localhost:6379\n": "has no scheme: write redis://HOST:PORT for Redis",
    "remote_url: my-bucket\n": "has no scheme: write redis://HOST:PORT for Redis, or s3://BUCKET for S3",
    "remote_url: /mnt/kv\n": "has no scheme: write file:///FOLDER",
    "remote_url: 'redis://a:1,b:2'\n": "write redis+cluster://HOST:PORT,HOST:PORT",
    "remote_url: redis://u:hunter2@h/lmkv\n": "must have a number as the database, such as /0",
    "local_disk: s3://bucket\nmax_local_disk_size: 1\n": "write the address of a store as remote_url",
    "remote_url: redis://:hunter2/x@h\n": "in its password: write / as %2F, ? as %3F and # as %23",
    "remote_url: redis://u:p@ss/hunter2@h\n": "in its password: write / as %2F, ? as %3F and # as %23",
    "remote_url: redis://u:p@ss/hunter2#x@h\n": "in its password: write / as %2F, ? as %3F and # as %23",
    "max_local_cpu_size: 8589934592\n": "must be at most 1000000000, in GiB: if these are bytes, write 8",
    "remote_url: s3://b?endpoint=minio:9000\n": "must have a whole endpoint, such as endpoint=http://HOST:PORT",
    "remote_url: redis://h\nremote_password: #x\n": "remote_password has no value: put the value into quotes",
    "remote_url: redis://h\nremote_password: $(PASSWORD)\n": "is the name of a variable, which nothing has replaced",
    "local_cpu: on\n  chunk_size: 64\n": "is indented more than the line above: begin each setting at the start",
    "local_disk: file://kv\nmax_local_disk_size: 1\n": "must be a path or file:///path, with three slashes",
    "local_disk: {path: /kv, size: 9}\n": "write the size as max_local_disk_size",
    "remote_url: redis://h?ssl_cert=none\n": "unsupported options: ssl_cert",
    "remote_url: s3://b?region=r\nremote_ttl: 60\n": "does not support remote_ttl: set a lifecycle rule",
    "remote_url: redis://h\nremote_ttl: 86400000\n": "is in seconds: divide milliseconds by 1000",
    "remote_url: s3://cache&endpoint=http://h:1&region=r\n": "has & where its options begin: write s3://NAME?endpoint=",
    f"agent_listen: unix:/{'x' * 107}\n": "has a path of more than 107 bytes, the limit of Unix sockets",
    "remote_url: s3://cache/x?endpoint=http://h:1/cache&region=r\n": "has the bucket in the endpoint, too",
    "local_disk: /kv\nmax_local_disk_size: 1\nremote_url: file:///kv\n": "are one folder, or nested: name two",
    "remote_url: [redis://a, redis://a]\n": "names one store twice: leave out one of the two",
    "remote_url: redis://a\nremote_urls: redis://a\n": "names one store twice: leave out one of the two",
    "max_local_cpu_size: 10,5\n": "must be a number, in GiB, with a point: 10.5",
    "max_local_cpu_size:\n": "must be a number, in GiB; leave the setting out for its default",
    "max_local_cpu_size: $CPU_GB\n": "must be a number, in GiB; nothing replaces this variable: write its value",
    "lmcache_config_file: /x.yaml\n": "name a file of settings in LMKV_CONFIG_FILE",
    "disk_io_threads: auto\n": "leave the setting out for its default",
    "audit_rate: 5%\n": "must be a number, as a share: 0.05",
    "pin_share: 50\n": "must be at most 1, as a share: 0.5",
    "chunk_size: 1k\n": "in tokens, without a unit: 1024",
    "quotas: {alice: 0.4, bob: 0.6}\n": "multiply each by 100",
    "local_disk: [/a, /b]\nmax_local_disk_size: 1\n": "must be a single path",
    "local_disk: /a,/b\nmax_local_disk_size: 1\n": "must be a single path",
    "local_disk: 500\n": "not a switch or a number",
    "shared_memory: 16GB\n": "write ./NAME for a folder NAME; write the size as max_shared_memory_size",
    "local_cpu: 40\n": "off; write the size as max_local_cpu_size",
    "disk: {path: /kv, size: 100}\n": "lmkv has no sections: write local_disk and max_local_disk_size",
    "cpu: {size: 4}\n": "lmkv has no sections: write max_local_cpu_size",
    "remote_url: s3://127.0.0.1:9000/cache\n": "names a server, not a bucket: write s3://BUCKET?endpoint=",
    "chunk_size: 64\nremote_url: s3://minio.example/kv\n": "names a bucket with a dot: if it is a server, write",
    "password_file: /x\n": "did you mean 'remote_password_file'?",
    "disk: /kv\n": "did you mean 'local_disk'?",
    "cpu_size: 10\n": "did you mean 'max_local_cpu_size'?",
    "pin_ttl: 5m\n": "must be a number, in seconds, without a unit: 300",
    "remote_ttl: 7d\n": "in seconds, without a unit: 604800",
    "remote_timeout: 500ms\n": "in seconds, without a unit: 0.5",
    "remote_url: redis://a\nremote_timeout: 500\n": "is in seconds: divide milliseconds by 1000",
    "prefetch_deadline: 30000\n": "is in seconds: divide milliseconds by 1000",
    "audit_rate: 1\n": "audits every hit, and vLLM computes half of these hits again: write 0.01",
    "pin_ttl: 300000\n": "is in seconds: divide milliseconds by 1000",
    "authentication_key: /run/secrets/lmkv/key\n": "is a path: name the file of the key in authentication_key_file",
    "agent_listen: 127.0.0.1:1\nagent_token: /run/secrets/token\n": "is a path: name the file of the token",
    "disk_admission: min_tokens:8k\n": "min_tokens:8192, or package.module:Class",
    "local_disk: C:\\kv\nmax_local_disk_size: 1\n": "write an absolute path",
    "local_cpu: no\nlocal_disk: /kv\nmax_local_disk_size: 1\ndisk_write: back\n": "works like through",
    "local_cpu: no\nlocal_disk: /kv\nmax_local_disk_size: 1\ndisk_admission: none\n": "no tier keeps chunks",
}
"""Content of a file -> what `lmkv config check` says of it."""


def run(*words: str, **env: str) -> Result:
    return CliRunner().invoke(app, list(words), env={"COLUMNS": "300", **env})


def test_a_file_that_is_wrong(tmp_path: Path) -> None:
    file = tmp_path / "kv.yaml"

    def check(text: str, said: str) -> None:
        file.write_text(text)
        done = run("config", "check", str(file))
        assert done.exit_code in (1, 2)
        assert said in done.output
        assert "hunter2" not in done.output

    every(list(FILES.items()), check)
    file.write_text("")
    assert "no settings to migrate" in run("config", "migrate", str(file)).output


TRANSFER = {"kv_connector": "LMKVConnector", "kv_connector_extra_config": {"lmkv.chunk_siz": 64}}


def test_settings_of_lmkv_inside_those_of_vllm(tmp_path: Path) -> None:
    """They were taken for LMCache's, whose unknown keys are no errors."""
    for content in (TRANSFER, {"model": "m", "kv-transfer-config": json.dumps(TRANSFER)}):
        (tmp_path / "kv.json").write_text(json.dumps(content))
        done = run("config", "check", str(tmp_path / "kv.json"))
        assert (done.exit_code, "did you mean 'chunk_size'?" in done.output) == (2, True)


VARIABLES: list[tuple[dict[str, str], str]] = [
    ({"LMKV_LOCAL_DISK": '"/nvme/kv"'}, "has quotes inside the value: leave out these quotes"),
    ({"LMKV_MAX_LOCAL_CPU_SIZE": '"10"'}, "must be a number, in GiB, without quotes inside the value"),
    ({"LMKV_DISK": "/kv"}, "did you mean 'local_disk'?"),
    ({"LMKV_REDIS_URL": "redis://h"}, "did you mean 'remote_url'?"),
    ({"LMKV_S3_URL": "s3://b"}, "did you mean 'remote_url'?"),
    ({"LMKV_VALKEY": "valkey://h"}, "did you mean 'remote_url'?"),
    ({"LMKV_CONFIG": "kv.yaml"}, "name a file of settings in LMKV_CONFIG_FILE"),
    ({"lmkv_chunk_size": "64"}, "environment lmkv_chunk_size is not read: write LMKV_CHUNK_SIZE"),
    ({"lmkv_config_file": "kv.yaml"}, "environment lmkv_config_file is not read: write LMKV_CONFIG_FILE"),
    (
        {"LMKV_LOG_LEVEL": "verbose"},
        "'verbose' is not a log level, and has no effect: write DEBUG, INFO, WARNING or ERROR",
    ),
    ({"LKMV_CHUNK_SIZE": "64"}, "environment LKMV_CHUNK_SIZE is not read: write LMKV_CHUNK_SIZE"),
    ({"LMKV_CHUNK_SIZE": ""}, "leave the setting out for its default"),
]


def test_variables_that_are_wrong() -> None:
    def check(env: dict[str, str], said: str) -> None:
        done = run("config", "show", **env)
        assert done.exit_code in (1, 2)
        assert done.output.count(said) == 1

    every(VARIABLES, check)
    assert run("config", "show", lmkv_other="1", LMKV_LOG_LEVEL="debug").exit_code == 0


def test_a_file_of_settings_in_the_home_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A shell does not expand it within quotes."""
    (tmp_path / "kv.yaml").write_text("chunk_size: 64\n")
    monkeypatch.setenv("HOME", str(tmp_path))
    assert Config.load(env={"LMKV_CONFIG_FILE": "~/kv.yaml"}).chunk_size == 64


def test_python_hears_of_all_errors_at_once() -> None:
    with pytest.raises(ConfigError) as caught:
        Config(chunk_size="x", pin_share=2, local_disk="/kv", max_local_cpu_size="10GB", agent_listen="127.0.0.1:1")  # type: ignore[arg-type]
    told = str(caught.value).splitlines()
    assert [line.split()[1] for line in told] == [
        *("chunk_size", "max_local_cpu_size", "pin_share", "local_disk", "agent_listen")
    ]
    # A refused setting has consequences, which are not separate errors.
    assert str(raised(ConfigError, "not a switch", Config, local_disk="true", max_local_disk_size=1)).count("\n") == 0


def test_numbers_of_numpy_are_numbers() -> None:
    config = Config(chunk_size=np.int64(64), max_local_cpu_size=np.float32(1.5))  # type: ignore[arg-type]
    assert (config.chunk_size, config.max_local_cpu_size) == (64, 1.5)
    assert (type(config.chunk_size), type(config.max_local_cpu_size)) == (int, float)


def test_arguments_in_python_that_are_wrong(tmp_path: Path) -> None:
    (tmp_path / "kv.yaml").write_text("chunk_size: 64\n")
    assert Config.load(tmp_path / "kv.yaml", env={}).chunk_size == 64
    for given, said in (
        ({"env": None}, "env must be a mapping, such as os.environ or {}, not a NoneType"),
        ({"env": ["LMKV_CHUNK_SIZE=64"]}, "env must be a mapping"),
        ({"file": {"chunk_size": 64}}, r"file must be a path \(settings are keywords\), not a dict"),
        ({"ranks": "4"}, "ranks must be a whole number, not a str"),
        ({"extra": [("chunk_size", 64)]}, "must be a mapping of keys to values"),
    ):
        raised(ConfigError, said, Config.load, **given)


COMMANDS: list[tuple[str, str]] = [
    ("check kv.yaml", "use lmkv config check"),
    ("doctor --extra chunk_size=64", """must be a JSON object, such as '{"chunk_size": 256}'"""),
    ("doctor --extra [1]", "must be a JSON object"),
    ("prune {} --max-size 10GB", "'10GB' must be a number, in GiB, without a unit: 10"),
    ("prune {} --max-size -1", "'-1' must be at least 0, in GiB"),
    ("top --url ftp://host", "give --url as unix:/path, HOST:PORT or http://..."),
    ("record {}/no/trace.jsonl", "no such file or directory; name a file in a folder that you can write to"),
    ("doctor --config kv.yaml", "name the file as an argument, without an option"),
    ("top 127.0.0.1:8377", "give a server's address with --url"),
    ("serve Qwen/Qwen3-8B", "use vllm serve MODEL --kv-transfer-config"),
    ("stats", "use lmkv top"),
    ("inspect s3://bucket", "for a remote store use lmkv doctor"),
    ("prune redis://u:hunter2@host --max-size 1", "'redis://u:***@host' must be a path"),
    ("clear 127.0.0.1:8377", "or a server with --url"),
    ("inspect file://{}/none", "is not a folder"),
    ("config check -- vllm bench", "give `lmcache server ...` or `vllm serve ...`"),
    ("doctor --model {}", "name a model's folder, with config.json in it"),
]


def test_command_lines_that_are_wrong(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")

    def check(line: str, said: str) -> None:
        done = run(*line.format(tmp_path).split())
        assert done.exit_code in (1, 2)
        assert said in done.output

    every(COMMANDS, check)


# -- what only doctor sees ----------------------------------------------------------------------------------


def told(area: Callable[[Config], Any], **settings: Any) -> list[str]:
    """Problems and warnings of a part of doctor."""
    return [each.problem or each.warning for each in area(Config(**settings)) if each.level != "ok"]


def test_doctor_takes_a_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(findings, "examine_vllm", lambda env: iter(()))
    (tmp_path / "kv.yaml").write_text("chunk_size: 100\n")
    for words in (("doctor",), ("config", "show")):
        assert "100 tokens" in run(*words, str(tmp_path / "kv.yaml")).output
    assert run("doctor", str(tmp_path / "kv.yaml"), "--strict").exit_code == 1


def test_chunks_of_a_size_that_is_not_meant() -> None:
    for tokens, said in ((100, "is not a multiple of vLLM's block size, 16"), (1 << 20, "reuses whole chunks only")):
        [warning] = told(findings.examine_configuration, chunk_size=tokens)
        assert said in warning
    assert told(findings.examine_configuration, chunk_size=4096) == []


def test_files_of_secrets_are_read_by_every_command(tmp_path: Path) -> None:
    (tmp_path / "key").write_text("REPLACE_ME_WITH_openssl_rand_-hex_32")
    (tmp_path / "token").write_text("")
    rows = {
        f"authentication_key_file: {tmp_path}/key\n": "has a placeholder instead of a key: make one with openssl",
        f"agent_listen: 127.0.0.1:1\nagent_token_file: {tmp_path}/token\n": "has no agent_token in its first line",
        "agent_listen: 127.0.0.1:1\nagent_token: <your token>\n": "must be ASCII without blanks",
        "agent_listen: 127.0.0.1:1\nagent_token: change-me\n": "has a placeholder instead of a token",
    }
    for text, said in rows.items():
        (tmp_path / "kv.yaml").write_text(text)
        for words in (("check",), ("show",)):
            done = run("config", *words, str(tmp_path / "kv.yaml"))
            assert (done.exit_code, said in done.output) == (2, True), done.output
    (tmp_path / "kv.yaml").write_text(f"authentication_key_file: {tmp_path}/elsewhere\n")
    assert "elsewhere is not on this machine" in run("config", "check", str(tmp_path / "kv.yaml")).output


def test_a_secret_that_cannot_be_read_is_said_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(findings, "examine_vllm", lambda env: iter(()))
    extra = {"remote_url": "redis://127.0.0.1:1", "remote_password_file": str(tmp_path / "none")}
    found = [each.problem for each in findings.examine({}, extra) if each.area in ("secrets", "remote stores")]
    assert len(found) == 1
    assert found[0].endswith("no such file or directory; name a file that the server's user may read")


def test_an_address_where_the_server_cannot_listen(tmp_path: Path) -> None:
    [problem] = told(findings.examine_agent, agent_listen=f"unix:{tmp_path}/no/lmkv.sock")
    assert "make that folder or name another" in problem
    assert told(findings.examine_agent, agent_listen=f"unix:{tmp_path}/lmkv.sock") == []
    with socket.create_server(("127.0.0.1", 0)) as taken:
        address = f"127.0.0.1:{taken.getsockname()[1]}"
        [warning] = told(findings.examine_agent, agent_listen=address, agent_token="t")
        assert (
            warning
            == f"agent_listen {address}: another process listens at this address: end that process or name another port"
        )
    assert told(findings.examine_agent, agent_listen=address, agent_token="t") == []


def test_folders_and_sizes_that_are_not_meant(tmp_path: Path) -> None:
    [warning] = told(findings.examine_memory, max_local_cpu_size=0.01)
    assert warning.startswith("max_local_cpu_size is 10.2 MiB, less than some chunks")
    if machine.file_system_of(str(tmp_path)) not in machine.IN_MEMORY:
        [warning] = told(findings.examine_shared_memory, shared_memory=str(tmp_path), max_shared_memory_size=0.1)
        assert "not in memory: name a folder in /dev/shm" in warning
    size = {"max_local_disk_size": 0.1, "disk_min_free": 0}
    [warning] = told(findings.examine_disk, local_disk="/dev/shm/lmkv-not-there", **size)
    assert "is in memory: name a folder on a disk" in warning
    [warning] = told(findings.examine_stores, remote_url=f"file://{tmp_path}/share/kv")
    assert "is the disk mounted?" in warning


def test_servers_that_would_never_hit() -> None:
    both = {"kv_connector": "LMKVConnector", "kv_role": "kv_both", "kv_load_failure_policy": "recompute"}
    large = {"chunk_size": 8192, "save_unfull_chunk": False}
    disk = {"local_disk": "/kv", "max_local_disk_size": 10}
    taken = "vLLM's server uses port 8000: name another port"
    rows: list[tuple[dict[str, Any], str, str]] = [
        (both | {"kv_role": "kv_consumer"}, "", "kv_role kv_consumer stores nothing, and no other server can store"),
        (both | {"kv_role": "kv_producer"}, "", "kv_role kv_producer loads nothing, and no other server can load"),
        (
            both | {"kv_connector_extra_config": large},
            "--max-model-len 4096",
            "is longer than any request (4096 tokens)",
        ),
        (
            both | {"kv_connector_extra_config": {"min_retrieve_tokens": 5000}},
            "--max-model-len 4096",
            "is longer than any request (4096 tokens), so lmkv loads nothing",
        ),
        (
            both | {"kv_connector_extra_config": {**disk, "disk_admission": "min_tokens:65536"}},
            "--max-model-len 32768",
            "is longer than any request (32768 tokens), so the disk tier stores nothing",
        ),
        (
            both | {"kv_role": "kv_producer", "kv_connector_extra_config": {**disk, "disk_write": "back"}},
            "",
            "hides chunks from other servers until eviction: set disk_write to through",
        ),
        (both | {"kv_connector_extra_config": {"agent_listen": "127.0.0.1:8000", "agent_token": "t"}}, "", taken),
        (
            both | {"kv_connector_extra_config": {"agent_listen": "127.0.0.1:7999", "agent_token": "t"}},
            "--data-parallel-size 4",
            taken,
        ),
        (both, "--nnodes 2", "caches nothing if the ranks of an engine are on several machines"),
        (
            {
                "kv_connector": "MultiConnector",
                "kv_connector_extra_config": {**disk, "connectors": [both, {"kv_connector": "ExampleConnector"}]},
            },
            "",
            "vLLM ignores local_disk, max_local_disk_size: in a MultiConnector, each setting belongs in",
        ),
        (both | {"kv_load_failure_policy": "fail"}, "", 'add "kv_load_failure_policy": "recompute"'),
        ({"kv_connector": "LMKVConnector", "kv_role": "kv_both"}, "", 'add "kv_load_failure_policy": "recompute"'),
        (both | {"kv_connector_extra_config": {"use_layerwise": True}}, "-pp 2", "use_layerwise = True has no effect"),
    ]
    for transfer, more, says in rows:
        command = ("vllm", "serve", "m", *more.split(), "--kv-transfer-config", json.dumps(transfer))
        done = run("config", "check", "--", *command)
        assert (done.exit_code, says in done.output) == (1, True), done.output
    shared = both | {"kv_role": "kv_consumer", "kv_connector_extra_config": {"remote_url": "redis://h"}}
    assert run("config", "check", "--", "vllm", "serve", "m", "--kv-transfer-config", json.dumps(shared)).exit_code == 0


AGENT = "-e LMKV_AGENT_LISTEN=127.0.0.1:7000 -e LMKV_AGENT_TOKEN=t"
SHARED = "-e LMKV_SHARED_MEMORY=/dev/shm/lmkv -e LMKV_MAX_SHARED_MEMORY_SIZE=8"
CONTAINERS: list[tuple[str, str, int]] = [
    ("docker run -v /var:/cache -e LMKV_LOCAL_DISK=/var -e LMKV_MAX_LOCAL_DISK_SIZE=4 image", "is in no volume of", 1),
    ("docker run -v /var:/cache -e LMKV_LOCAL_DISK=/cache/kv -e LMKV_MAX_LOCAL_DISK_SIZE=4 image", "settings", 0),
    ("docker run -e LMKV_REMOTE_URL=redis://localhost:6379 image", "means the container itself", 1),
    ("docker run --network host -e LMKV_REMOTE_URL=redis://localhost:6379 image", "settings", 0),
    ("docker run --memory=32g -e LMKV_MAX_LOCAL_CPU_SIZE=40 image", "is more than the container's --memory 32g", 1),
    (f"docker run {SHARED} image", "is more than the container's /dev/shm (64m): add --ipc=host", 1),
    (f"docker run --shm-size 4g {SHARED} image", "is more than the container's /dev/shm (4g)", 1),
    (f"docker run --shm-size=9gb {SHARED} image", "settings", 0),
    (f"docker run --ipc=host {SHARED} image", "settings", 0),
    ("LMKV_QUOTAS=alice=40 team:red=20 vllm serve", "team:red=20 is no part of the value of LMKV_QUOTAS: put the", 1),
    ("env LMKV_REMOTE_URL=redis://a redis://b vllm serve", "redis://b is no part of the value of LMKV_REMOTE_URL", 1),
    ("docker run -e LMKV_CHUNK_SIZE=64 host:5000/image:tag", "settings", 0),
    ("LKMV_CHUNK_SIZE=64 vllm serve", "environment LKMV_CHUNK_SIZE is not read: write LMKV_CHUNK_SIZE", 1),
    ("LMKV_CHUNK_SIZE=64 docker run image", "LMKV_CHUNK_SIZE before docker does not reach the container: write -e", 1),
    ("LMKV_CHUNK_SIZE=64 docker run -e LMKV_CHUNK_SIZE image", "settings", 0),
    ("sudo -E docker run -e LMKV_REMOTE_URL=redis://localhost:6379 image", "means the container itself", 1),
    (
        "HF_TOKEN=x podman run -e LMKV_LOCAL_DISK=/c -e LMKV_MAX_LOCAL_DISK_SIZE=4 image",
        "add -v /FOLDER/OF/THE/HOST:/c",
        1,
    ),
    (
        "docker run --mount type=bind,src=/x,dst=/c -e LMKV_LOCAL_DISK=/c/kv -e LMKV_MAX_LOCAL_DISK_SIZE=4 image",
        "settings",
        0,
    ),
    (f"docker run -p 7000:7000 {AGENT} image", "agent_listen 127.0.0.1:7000 means the container itself: use unix:", 1),
    (f"docker run -p 7000:7000 --network host {AGENT} image", "settings", 0),
    ("docker run --env-file /not/there.env image", "--env-file /not/there.env is not on this machine", 1),
    ("LMKV_CONFIG_FILE=/not/there.yaml vllm serve", "LMKV_CONFIG_FILE /not/there.yaml is not on this machine", 0),
    ("LMCACHE_CHUNK_SIZE=64 LMKV_LOCAL_CPU=1 vllm serve", "does not read LMCache's settings LMCACHE_CHUNK_SIZE", 1),
    ("P=a LMKV_REMOTE_URL=redis://:$(P)@h:1 vllm serve", "remote_url = redis://:***@h:1", 0),
    ("LMKV_REMOTE_URL=redis://:$(P)@h:1 P=a vllm serve", "Kubernetes replaces only if", 2),
    ("env LMKV_CHUNKSIZE=5 vllm serve", "unknown key 'chunksize' = 5; did you mean 'chunk_size'?", 2),
    ("LMKV_MAX_LOCAL_CPU_SIZE=40x vllm serve", "must be a number, in GiB", 2),
]


def test_variables_before_a_program_and_containers(tmp_path: Path) -> None:
    right = {"kv_connector": "LMKVConnector", "kv_role": "kv_both", "kv_load_failure_policy": "recompute"}
    transfer = ("--kv-transfer-config", json.dumps(right))
    for words, said, status in CONTAINERS:
        done = run("config", "check", "--", *words.split(), "m", *transfer)
        assert (done.exit_code, said in done.output) == (status, True), done.output
    late = run("config", "check", "--", "docker", "run", "image", "m", *transfer, "-e", "LMKV_CHUNK_SIZE=64")
    assert (late.exit_code, "LMKV_CHUNK_SIZE stands among vLLM's options" in late.output) == (1, True)
    after = ("docker", "run", "--gpus", "all", "-d", "-v", "/d:/c", "image", "m", "-e", "LMKV_CHUNK_SIZE=64", *transfer)
    assert "LMKV_CHUNK_SIZE stands among vLLM's options" in run("config", "check", "--", *after).output
    (tmp_path / "kv.env").write_text("HF_TOKEN=hunter2\nLMKV_CHUNK_SIZE=x\n")
    file = run(
        "config", "check", "--", "docker", "run", "--env-file", str(tmp_path / "kv.env"), "image", "m", *transfer
    )
    assert (file.exit_code, "chunk_size = 'x' must be a whole number" in file.output) == (2, True), file.output
    folder = run("config", "check", "--", "docker", "run", "--env-file", str(tmp_path), "image", "m", *transfer)
    assert (folder.exit_code, "the path is a folder" in folder.output) == (2, True), folder.output
    kept = run("config", "migrate", "--", "LMKV_CHUNK_SIZE=64", "vllm", "serve", "m", *transfer).output
    assert kept.startswith("LMKV_CHUNK_SIZE=64 vllm serve m ")
    assert "chunk_size" not in kept


def test_a_command_line_is_checked_as_a_file_is() -> None:
    rows: list[tuple[dict[str, Any], str]] = [
        (TRANSFER, "did you mean 'chunk_size'?"),
        ({"kv_connector": "LMKVConnectorV1"}, "did you mean LMKVConnector?"),
        ({"kv_connector": "LmkvConnector"}, "did you mean LMKVConnector?"),
        ({"kv_connector": "LMKVConnector", "local_disk": "/kv"}, "write the key inside kv_connector_extra_config"),
        ({"kv_connector": "LMKVConnector"}, 'vLLM needs a role: add "kv_role": "kv_both"'),
        ({"kv_connector": "LMKVConnector", "kv_roles": "kv_both"}, "did you mean kv_role?"),
        ({"kv_connector": "LMKVConnector", "kv_parallel_size": 2}, "vLLM knows no such key: delete it"),
        ({"kv_connector": "LMKVConnector", "kv_load_failure_policy": "retry"}, "write recompute"),
        ({"kv_connector": "LMKVConnector", "kv_role": "both"}, "kv_role 'both' cannot be used: vLLM knows kv_both"),
        ({"kv_connector": "LMKVConnector", "kv_connector_module_path": "lmcache.v1"}, "delete this key"),
        (
            {"kv_connector": "LMKVConnector", "kv_connector_extra_config": {"kv_load_failure_policy": "recompute"}},
            "this key is vLLM's: write it beside kv_connector",
        ),
    ]
    for transfer, says in rows:
        done = run("config", "check", "--", "vllm", "serve", "m", "--kv-transfer-config", json.dumps(transfer))
        assert (done.exit_code, says in done.output) == (2, True), done.output
    none = run("config", "check", "--", "LMKV_CHUNK_SIZE=64", "vllm", "serve", "m")
    assert (none.exit_code, "the command does not start lmkv" in none.output) == (1, True)
    theirs = json.dumps({"kv_connector": "LMCacheConnectorV1", "kv_role": "kv_both"})
    command = ("vllm", "serve", "m", "--kv-transfer-config", theirs)
    assert "prints it with LMKVConnector" in run("config", "check", "--", *command).output
    mixed = run("config", "check", "--", "LMKV_CHUNK_SIZE=64", *command)
    assert (mixed.exit_code, "LMCacheConnectorV1 reads no LMKV_ variables" in mixed.output) == (1, True)
    bare = ("vllm", "serve", "m", "--kv-transfer-config", '{"kv_connector": "LMKVConnector", "kv_role": "kv_both"}')
    option = run("config", "check", "--", *bare, "--max-local-cpu-size", "4")
    assert (option.exit_code, "write LMKV_MAX_LOCAL_CPU_SIZE=VALUE before" in option.output) == (2, True)
    size = run("config", "check", "--", *bare, "--kv-offloading-size", "4")
    assert (size.exit_code, "vLLM uses its own connector instead of LMKVConnector" in size.output) == (2, True)
    without = run("config", "check", "--", *bare[:-1], "{kv_connector:", "LMKVConnector}")
    assert (without.exit_code, "put the whole JSON into single quotes" in without.output) == (2, True)
    file = run("config", "check", "--", *bare[:-1], "lmkv.json")
    assert (file.exit_code, 'write "$(cat lmkv.json)"' in file.output) == (2, True)


def test_variables_that_are_only_exported_are_named() -> None:
    done = run("config", "check", "--", "vllm", "serve", "m", LMKV_CHUNK_SIZE="x")
    assert (done.exit_code, "environment LMKV_CHUNK_SIZE: not checked, because only" in done.output) == (0, True)


def test_a_command_may_be_one_text_or_a_script(tmp_path: Path) -> None:
    right = {"kv_connector": "LMKVConnector", "kv_role": "kv_both", "kv_load_failure_policy": "recompute"}
    command = f"vllm serve m --kv-transfer-config '{json.dumps(right)}'"
    assert run("config", "check", command).exit_code == 0
    assert "chunk_size = 64" in run("config", "check", f"LMKV_CHUNK_SIZE=64 {command}").output
    script = f"#!/bin/sh\nset -e\nexport LMKV_LOCAL_DISK=$HOME/kv\nLMKV_MAX_LOCAL_DISK_SIZE=1x exec {command}\n"
    (tmp_path / "start.sh").write_text(script)
    done = run("config", "check", str(tmp_path / "start.sh"))
    assert (done.exit_code, "max_local_disk_size = '1x' must be a number" in done.output) == (2, True), done.output
    assert f"local_disk = {Path.home()}/kv" in done.output


def test_a_unit_of_systemd_is_read_as_systemd_reads_it(tmp_path: Path) -> None:
    unit = (Path(__file__).parents[2] / "docs/deploy/lmkv-vllm.service").read_text()
    file = tmp_path / "lmkv-vllm.service"
    file.write_text(unit)
    done = run("config", "check", str(file))
    assert (done.exit_code, "local_disk = /var/cache/lmkv/chunks" in done.output) == (0, True), done.output
    rows = {
        "Environment=LMKV_QUOTAS=alice=40 team:red=20": "team:red=20 is no part of the value of LMKV_QUOTAS",
        "Environment=LMKV_CHUNK_SIZE=1k": "chunk_size = '1k' must be a whole number",
        'Environment="LMKV_CHUNK_SIZE=64': "a quote is missing",
    }
    for line, says in rows.items():
        file.write_text(unit.replace("User=llm", line))
        assert says in run("config", "check", str(file)).output
    file.write_text("[Service]\nEnvironment=LMKV_CHUNK_SIZE=64\n")
    assert "the unit has no ExecStart" in run("config", "check", str(file)).output


def test_a_file_of_lmcache_in_the_variable_of_lmkv(tmp_path: Path) -> None:
    (tmp_path / "kv.yaml").write_text("chunk_size: 64\nremote_serde: naive\n")
    done = run("doctor", LMKV_CONFIG_FILE=str(tmp_path / "kv.yaml"))
    assert (done.exit_code, "has settings of LMCache: name the file in LMCACHE_CONFIG_FILE" in done.output) == (2, True)
