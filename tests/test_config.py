"""Settings: defaults, sources and their precedence, and that no mistake passes in silence."""

from __future__ import annotations

import copy
import fcntl
import json
import os
import pickle
import select
import struct
import sys
import threading
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from attrs import evolve
from attrs.exceptions import FrozenInstanceError

from lmkv.backends.remote.base import RemoteOptions
from lmkv.cli.report import interleaved
from lmkv.config import GIB, Config, Setting, lmcache, sources as named_file
from lmkv.config.urls import RemoteURL
from lmkv.errors import BackendError, ConfigError, mask_secrets, safe_repr, short_repr
from lmkv.policies import FIFO, make_admission, make_policy
from tests.kit import LIMIT, every, median_ratio, raised

DEFAULTS: dict[str, object] = {
    "chunk_size": 256, "local_cpu": True, "max_local_cpu_size": 5.0, "shared_memory": None,
    "max_shared_memory_size": 0.0, "local_disk": None, "max_local_disk_size": 0.0, "cache_policy": "LRU",
    "quotas": None, "save_decode_cache": True, "state_interval": 0, "save_unfull_chunk": True,
    "min_retrieve_tokens": 0, "disk_sync": "none", "disk_min_free": 1.0, "disk_io_threads": 16,
    "disk_direct": "auto", "disk_write": "through", "disk_admission": "all", "remote_url": None, "remote_urls": None,
    "remote_username": None, "remote_password": None, "remote_password_file": None, "remote_prefix": "lmkv:",
    "remote_ttl": 0, "remote_timeout": 1.0, "authentication_key": None, "authentication_key_file": None,
    "prefetch_share": 0.5, "pin_share": 0.5, "prefetch_deadline": 30.0, "load_or_recompute": True,
    "load_mode": "auto", "use_layerwise": False, "block_major": True, "device_staging_size": 1.0, "pin_ttl": 300.0,
    "audit_rate": 0.0, "audit_action": "drop", "media_by_name": False, "agent_listen": None, "agent_token": None,
    "agent_token_file": None,
}  # fmt: skip


TIOCGPTN, TIOCSPTLCK = 0x80045430, 0x40045431
"""The number of a terminal, and its lock, for `ioctl`."""


def load(**arguments: Any) -> Config:
    """`Config.load` that sees none of this process's environment."""
    return Config.load(**{"env": {}, **arguments})


def values(config: Config) -> dict[str, object]:
    return {row.name: row.value for row in config.describe()}


def refused(match: str, call: Callable[..., object] = load, **arguments: Any) -> str:
    """What the refusal says, which matches."""
    with pytest.raises(ConfigError, match=match) as caught:
        call(**arguments)
    return str(caught.value)


@pytest.fixture
def file(tmp_path: Path) -> Path:
    return tmp_path / "lmkv.yaml"


@pytest.fixture
def in_file(file: Path) -> Callable[[str | bytes], Config]:
    """What a file with that content gives."""

    def read(content: str | bytes) -> Config:
        file.write_bytes(content if isinstance(content, bytes) else content.encode())
        return load(file=file)

    return read


def test_defaults() -> None:
    assert values(load()) == DEFAULTS
    assert load() == Config() == load(**DEFAULTS)
    assert {type(value) for value in values(load()).values()} == {int, bool, float, str, type(None)}
    config = Config(chunk_size=64)
    assert (config.source("chunk_size"), config.source("pin_ttl")) == ("keyword", "default")


def test_names_of_policies_and_admissions_can_be_made() -> None:
    assert isinstance(make_policy(load(cache_policy="FIFO").cache_policy), FIFO)
    assert not make_admission(load(disk_admission="none").disk_admission).admit(bytes(32))


def test_later_sources_win_key_by_key(file: Path) -> None:
    file.write_text("chunk_size: 2\nmin_retrieve_tokens: 2\npin_ttl: 2\n")
    config = load(
        **dict.fromkeys(("chunk_size", "min_retrieve_tokens", "pin_ttl", "disk_io_threads"), 1),
        file=file,
        env={"LMKV_CHUNK_SIZE": "3", "LMKV_MIN_RETRIEVE_TOKENS": "3"},
        extra={"lmkv.chunk_size": 4},
    )
    expected = {
        "chunk_size": (4, "kv_connector_extra_config"),
        "min_retrieve_tokens": (3, "environment LMKV_MIN_RETRIEVE_TOKENS"),
        "pin_ttl": (2.0, f"file {file}"),
        "disk_io_threads": (1, "keyword"),
    }
    rows = {row.name: (row.value, row.source) for row in config.describe()}
    assert expected.items() <= rows.items()
    assert {source for name, (_, source) in rows.items() if name not in expected} == {"default"}


def test_describe_gives_everything_that_a_person_needs() -> None:
    row = load(env={"LMKV_PREFETCH_DEADLINE": "2"}).describe()[list(DEFAULTS).index("prefetch_deadline")]
    source = "environment LMKV_PREFETCH_DEADLINE"
    assert row == Setting("prefetch_deadline", value=2.0, source=source, default=30.0, unit="s", doc=row.doc)
    assert all(row.doc for row in Config().describe())


def test_the_environment_may_name_the_file(file: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file.write_text("chunk_size: 64\n")
    assert load(env={"LMKV_CONFIG_FILE": str(file)}).chunk_size == 64
    other = tmp_path / "other.yaml"
    other.write_text("chunk_size: 32\n")
    assert load(file=other, env={"LMKV_CONFIG_FILE": str(file)}).chunk_size == 32
    assert load(env={"LMKV_CONFIG_FILE": ""}).chunk_size == 256
    monkeypatch.setenv("LMKV_CHUNK_SIZE", "48")
    assert Config.load().chunk_size == 48, "the real environment is the default"


def test_reserved_and_foreign_variables_are_no_settings() -> None:
    names = (
        "LMKV_LOG_LEVEL LMKV_SERVICE_HOST LMKV_SERVICE_PORT LMKV_SERVICE_PORT_HTTP LMKV_PORT LMKV_PORT_8000_TCP "
        "LMKV_PORT_8000_TCP_ADDR LMKV_STORE_SERVICE_HOST LMKVX_CHUNK_SIZE XLMKV_CHUNK_SIZE"
    )
    assert [name for name in names.split() if load(env={name: "1"}) != Config()] == []
    assert not [name for name in DEFAULTS if lmcache.SERVICE_LINK.fullmatch(f"LMKV_{name.upper()}")]


def test_words_for_true_and_false() -> None:
    for word in ("true", "1", "yes", "on", "TRUE", "On", " yes "):
        assert load(local_cpu=False, env={"LMKV_LOCAL_CPU": word}).local_cpu is True, word
    for word in ("false", "0", "no", "off", "FALSE", "Off"):
        assert load(env={"LMKV_LOCAL_CPU": word}).local_cpu is False, word
    for value in (1, 0, True, False):
        assert load(extra={"local_cpu": value}).local_cpu is bool(value)


BAD: dict[str, list[Any]] = {
    "local_cpu": ["ture", "", 2, 1.0, None], "save_unfull_chunk": ["ture"], "load_or_recompute": ["maybe"],
    "chunk_size": [0, "abc", "", "256.0", 256.0, True, None, [256]],
    "max_local_cpu_size": [0, -1, "5GB", "nan", float("inf"), 10**400, True], "max_local_disk_size": [-0.1],
    "max_shared_memory_size": [-0.1], "shared_memory": [5, "redis://host"],
    "local_disk": [5, b"/x", "s3://bucket/x", "file://host/x", "file://x", "file:///", "/x\0y"],
    "cache_policy": ["LIRS", None], "min_retrieve_tokens": [-1], "disk_sync": ["yes"], "disk_min_free": [-1],
    "disk_io_threads": [0], "disk_direct": ["maybe", 1], "disk_write": ["around"], "disk_admission": [True],
    "prefetch_share": [1.01, -0.01], "prefetch_deadline": [-1], "pin_ttl": [0],
}  # fmt: skip


def test_a_bad_value_is_refused_with_key_value_and_source() -> None:
    def check(key: str, bad: Any) -> None:
        for arguments, source in (({key: bad}, "keyword"), ({"extra": {key: bad}}, "kv_connector_extra_config")):
            assert refused(key, **arguments).startswith(f"{source}: {key} = {short_repr(bad)} must ")
        refused(key, Config, **{key: bad})

    every([(key, bad) for key, found in BAD.items() for bad in found], check)
    refused(r"^environment LMKV_CHUNK_SIZE: chunk_size = 'abc' must be a whole", env={"LMKV_CHUNK_SIZE": "abc"})


def test_a_bound_itself_is_good() -> None:
    bounds = {"chunk_size": 1, "min_retrieve_tokens": 0, "disk_min_free": 0.0, "disk_io_threads": 1}
    for given in (bounds, {"prefetch_share": 0.0, "prefetch_deadline": 0.0}, {"max_local_cpu_size": 1e-3}):
        assert given.items() <= values(load(**given)).items()
    assert load(prefetch_share=1.0).prefetch_share == 1.0


def test_a_bad_value_is_refused_even_where_a_stronger_source_replaces_it(file: Path) -> None:
    file.write_text("chunk_size: abc\n")
    refused(r"file .*chunk_size = 'abc'", file=file, env={"LMKV_CHUNK_SIZE": "64"})


def test_an_unknown_key_is_refused_with_source_value_and_the_nearest_key() -> None:
    sources: list[tuple[dict[str, Any], str]] = [
        ({"chunk_siz": 1}, "keyword"),
        ({"env": {"LMKV_CHUNK_SIZ": "1"}}, "environment LMKV_CHUNK_SIZ"),
        ({"extra": {"lmkv.chunk_siz": 1}}, "kv_connector_extra_config"),
        ({"extra": {"chunk_siz": 1}}, "kv_connector_extra_config"),
    ]
    for arguments, source in sources:
        refused(f"^{source}: unknown key 'chunk_siz' = .*; did you mean 'chunk_size'\\?$", **arguments)
    refused(r"unknown key 'qqq' = 1$", qqq=1)


def test_a_key_of_lmcache_among_those_of_lmkv_gets_its_reason_or_its_name_here(file: Path) -> None:
    for key, why in (("use_gds", "gds_path"), ("storage_plugins", "does not load")):
        file.write_text(f"lmcache.{key}: 1\n")
        for given in ({"extra": {key: 1}}, {"file": file}, {"env": {f"LMKV_{key.upper()}": "1"}}):
            refused(f"this key is LMCache's: .*{why}", **given)
    for key, here in (
        ("pin_timeout_sec", "pin_ttl"),
        ("lmcache.chunk_size", "chunk_size"),
        ("use_odirect", "disk_direct"),
    ):
        file.write_text(f"{key}: 1\n")
        refused(f"LMCache's: write '{here}'", file=file)


def test_a_key_given_plain_and_with_prefix_is_refused() -> None:
    refused(r"both 'chunk_size' and 'lmkv\.chunk_size'", extra={"chunk_size": 1, "lmkv.chunk_size": 2})


FOLDERS: dict[str | Path, str] = {
    "file:///mnt/kv": "/mnt/kv", "file://localhost/mnt/kv": "/mnt/kv", "file:///mnt/a%20b": "/mnt/a b",
    "/mnt/kv/": "/mnt/kv", "relative/kv": "relative/kv", "/mnt/100%20": "/mnt/100%20", Path("/mnt/kv"): "/mnt/kv",
    "/some/kv": "/some/kv", "file:/some/kv": "/some/kv", "FILE://localhost/some/kv": "/some/kv",
    "file:///some%20kv%3Fx": "/some kv?x", "file:///a%253Fb": "/a%3Fb", "file:///x%3A//y": "/x:/y",
    "/a?b#c d": "/a?b#c d", "kv:1": "kv:1", "~/kv": "/home/someone/kv",
}  # fmt: skip
NO_FOLDERS: list[object] = [
    *(" /kv", "/kv ", "/kv\n", " ", "file:kv", "file://host/kv", "file:///kv?size=3", "file:///kv#3"),
    *("/a/..", "file:///..", "file:///%2e%2e", "/."),
    *("file:///", "/", "//", "http://host/kv", "redis://host", "/k\0v", "file:///k%00v", b"/kv", 3),
]


def test_the_disk_folder_is_a_path_or_a_file_url(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", "/home/someone")
    for given, path in FOLDERS.items():
        sources: list[dict[str, Any]] = [{"local_disk": given}, {"extra": {"local_disk": given}}]
        assert [load(**source, max_local_disk_size=1).local_disk for source in sources] == [path, path], given
    where = r"^kv_connector_extra_config: local_disk"
    every(NO_FOLDERS, lambda bad: refused(where, extra={"local_disk": bad, "max_local_disk_size": 1}))


def test_a_tier_of_files_needs_a_folder_and_a_capacity() -> None:
    assert load(local_disk="/mnt", env={"LMKV_LOCAL_DISK": ""}).local_disk is None
    config = load(shared_memory="file:///dev/shm/lmkv", max_shared_memory_size=1.5)
    assert (config.shared_memory, config.max_shared_memory_bytes) == ("/dev/shm/lmkv", 3 * 2**29)
    for name in ("local_disk", "shared_memory"):
        named, sized = f"LMKV_{name.upper()}", f"LMKV_MAX_{name.upper()}_SIZE"
        refused(rf"^environment {named}: {name} needs max_{name}_size \(GiB\), for example", env={named: "/mnt"})
        refused(rf"^environment {sized}: .* needs {name}", env={sized: "10"})
        refused(f"max_{name}_size", Config, **{name: "/mnt"})
        refused(f"needs {name}", env={named: "none", sized: "5"})
        assert load(env={named: "none", sized: "0"}) == Config()


def test_two_tiers_have_folders_apart(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Otherwise each would evict the other's files, or count them."""
    monkeypatch.chdir(tmp_path)
    for folder in ("kv", "other", "deep"):
        (tmp_path / folder).mkdir()
    (tmp_path / "link").symlink_to("kv")
    (tmp_path / "deep" / "link").symlink_to(tmp_path / "link" / "a")
    sizes = {"max_shared_memory_size": 1, "max_local_disk_size": 1}
    for both in (
        *("kv kv", "kv kv/disk", "kv/shm kv", "./kv other/../kv", "link kv", "link/a kv"),
        *("not/there not/there", "not not/there", "kv/a/b deep/link"),
    ):
        shared, disk = both.split()
        why = r"keyword: local_disk = .* and shared_memory = .* name two"
        refused(why, shared_memory=shared, local_disk=disk, **sizes)
    assert load(shared_memory="kv", local_disk="kv2", **sizes).local_disk == "kv2"
    assert load(shared_memory=f"{tmp_path}/kv/a", local_disk="kv/b", **sizes).local_disk == "kv/b"


def test_cross_checks_see_the_merge_and_not_a_single_source(file: Path) -> None:
    file.write_text("local_disk: /mnt\n")
    assert load(file=file, extra={"max_local_disk_size": 2}).max_local_disk_bytes == 2 * GIB


def test_sizes_in_bytes() -> None:
    config = load(max_local_cpu_size=0.5, disk_min_free="2", local_disk="/mnt", max_local_disk_size=1.5)
    assert config.max_local_cpu_bytes == 2**29
    assert config.disk_min_free_bytes == 2**31
    assert config.max_local_disk_bytes == 3 * 2**29


def test_names_of_choices_in_any_case() -> None:
    config = load(cache_policy="fifo", disk_sync=" Full ")
    assert (config.cache_policy, config.disk_sync) == ("FIFO", "full")


def test_a_whole_file(file: Path) -> None:
    file.write_text(
        "chunk_size: 128\nlocal_cpu: no\nmax_local_cpu_size: 1.5\nlocal_disk: file:///mnt/kv\n"
        "max_local_disk_size: 100\ndisk_sync: none\n"
    )
    config = load(file=str(file))
    assert config == Config(
        chunk_size=128, local_cpu=False, max_local_cpu_size=1.5, local_disk="/mnt/kv", max_local_disk_size=100.0
    )
    assert isinstance(config.max_local_disk_size, float)


def test_an_empty_file_sets_nothing(in_file: Callable[[str], Config]) -> None:
    assert [text for text in ("", "# nothing\n", "---\n") if in_file(text) != Config()] == []


def test_a_file_that_cannot_be_used_is_refused_by_name(file: Path, in_file: Callable[[str | bytes], Config]) -> None:
    where = r"^file .*lmkv\.yaml: "
    refused(where, file=file)
    for content in (
        *(b"- chunk_size\n", b"chunk_size\n", b"chunk_size: [\n", b"\xff\xfe\xfa", b"chunk_siz: 1\n", b"5: 1\n"),
        *(b"!!python/object/apply:builtins.dict [[[chunk_size, 64]]]\n", b"lmkv.chunk_size: 1\n"),
    ):
        refused(where, lambda content=content: in_file(content))
    # Which one is meant nobody knows.
    for text, lines in (
        ("chunk_size: 64\nsave_decode: on\n'chunk_size': 128\n", "'chunk_size' is given twice, in lines 1 and 3"),
        ("{chunk_size: 64, chunk_size: 64}", "'chunk_size' is given twice, in lines 1 and 1"),
        ("extra_config:\n  a: 1\n  a: 2\n", "'a' is given twice, in lines 2 and 3"),
    ):
        refused(f"{where}{lines}: leave one out$", lambda text=text: in_file(text))


def test_a_config_is_a_frozen_value() -> None:
    config = load(chunk_size=64)
    with pytest.raises(FrozenInstanceError):
        config.chunk_size = 1  # type: ignore[misc]
    assert config == Config(chunk_size=64)
    assert hash(config) == hash(Config(chunk_size=64))
    assert pickle.loads(pickle.dumps(config)) == copy.deepcopy(config) == config
    raised(ConfigError, "chunk_size = -1", evolve, config, chunk_size=-1)


def test_yaml_is_needed_for_files_alone(file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file.write_text("chunk_size: 64\n")
    monkeypatch.setitem(sys.modules, "yaml", None)
    assert load(chunk_size=32).chunk_size == 32
    raised(ImportError, "yaml", load, file=file)


# -- careless and hostile sources ----------------------------------------------------------------------

ALIASES = f"[&b0 [{'x, ' * 10}], {', '.join(f'&b{at} [' + f'*b{at - 1}, ' * 10 + ']' for at in range(1, 9))}, *b8]"
"""A few hundred bytes that stand for a billion texts."""


NO_CONFIGURATIONS = [
    *("chunk_size: 2026-13-45", "2026-01-01: 1", "chunk_size: 2026-01-01", "chunk_size: " + "9" * 5000),
    *("chunk_size: " + "[" * 20_000, "max_local_cpu_size: 1e308", "max_local_cpu_size: 1" + "0" * 400),
    *("chunk_size: 1" + "0" * 400, "? [1, 2]\n: 3", "!!python/object/apply:os.getpid []", "chunk_size: *nobody"),
    *(ALIASES, "x" * (1 << 21), "chunk_size: .nan", "chunk_size: \x00", "- 1"),
    '"' + "k" * 100_000 + '": ' + "v" * 100_000,
]


def test_what_is_no_configuration_is_one_short_error(file: Path, in_file: Callable[[str], Config]) -> None:
    def check(text: str) -> None:
        assert len(refused("file ", lambda: in_file(text))) < 1000 + len(str(file))

    every(NO_CONFIGURATIONS, check)
    for value in (10**400, "9" * 5000, 1e308, 10**5000, "1" + "0" * 400):
        for name in ("chunk_size", "max_local_cpu_size", "disk_io_threads"):
            assert len(refused(name, Config, **{name: value})) < 300


def test_the_source_of_an_error_is_where_the_value_came_from() -> None:
    refused(r"^environment LMKV_MAX_LOCAL_DISK_SIZE: ", env={"LMKV_MAX_LOCAL_DISK_SIZE": "3"})
    refused(r"^kv_connector_extra_config: unknown key 7", extra={7: 1})
    refused(r"^file .*null (byte|character)", file="/k\0v")


# -- remote stores ---------------------------------------------------------------------------------------


def test_remote_urls_are_one_text_or_a_list(in_file: Callable[[str], Config]) -> None:
    parts = ["redis://a", "valkeys://u:p@b/3"]
    for given in (",".join(parts), " ".join(parts), parts):
        config = load(extra={"remote_url": given})
        assert [url.text for url in config.remote_url] == parts
        assert [url.scheme for url in config.remote_url] == ["redis", "valkeys"]
        assert in_file(json.dumps({"remote_url": given})) == config
        assert load(remote_url=config.remote_url) == config
        assert load(remote_urls=given).remote_urls == config.remote_url


def test_a_url_of_sentinels_names_several_hosts() -> None:
    text = "redis+sentinel://me:hunter2@a:26379,b,[::1]:1/master/2?sentinel_password=hunter2"
    config = load(remote_url=f"redis://c, {text},valkey+sentinel://d,e/m redis://f,")
    assert [url.text for url in config.remote_url] == ["redis://c", text, "valkey+sentinel://d,e/m", "redis://f"]
    assert {url.store_kind for url in config.remote_url} == {"redis"}
    assert str(config.remote_url[1]) == "redis+sentinel://me:***@a:26379,b,[::1]:1/master/2?sentinel_password=***"


NO_URLS: list[Any] = [
    *("localhost:6379", "ftp://u:hunter2@host", 5, ["redis://a", 5], "redis-sentinels://h"),
    *("redis+sentinel://a,b:port/m", "redis+sentinel://:hunter2/x@a,b/m", "redis://a:1,b:2"),
    *(["ftp://u:hunter2@h"], {"a": "redis://u:hunter2@h"}, ["redis://u:hunter2@h", 5]),
    *("redis://u:hunter2@[::1", "redis://u:hunter2@h\0", "s3://[x/y"),
    *("redis://:hunter2/x@h", "rediss://u:x?hunter2@h/1", "valkey://u:hunter2#x@h", "s3://id:a/hunter2@bucket"),
    *("redis://h:port", "redis://h:65536"),
    *("redis:/me:hunter2@h", "redis://user:hun://hunter2@h", ["redis://a:b@h1 redis://c:hunter2@h2"]),
]


def test_what_is_refused_does_not_show_its_secrets(in_file: Callable[[str], Config]) -> None:
    def check(match: str, call: Callable[..., object] = load, **arguments: Any) -> None:
        told = refused(match, call, **arguments)
        assert "hunter2" not in told

    every(NO_URLS, lambda bad: check("remote_url = ", remote_url=bad))
    check("remote_uri", remote_uri="redis://me:hunter2@host")
    for name, value in (
        ("remote_passwort", "hunter2"),
        ("agent_token", ["hunter2"]),
        ("AUTHENTICATION_KEY", "hunter2"),
    ):
        check(name, extra={name: value})
    # A variable of the environment may have any bytes.
    for name in ("remote_password", "agent_token", "authentication_key"):
        env = {f"LMKV_{name.upper()}": "hunter2\udcff" * 9}
        check(rf"^environment LMKV_{name.upper()}: {name} = .*UTF-8", env=env)
    for value in ("%hunter2", "@hunter2", "hun: hunter2", "'hunter2", "!hunter2", "[hunter2", '"\\hunter2"'):
        text = f"chunk_size: 256\nremote_password: {value}\n"
        check(r"lmkv\.yaml: line [23], column .* in quotes", lambda text=text: in_file(text))


def test_passwords_are_in_no_repr_and_no_table() -> None:
    env = {"LMKV_REMOTE_URL": "redis://me:hunter2@host/1?ssl_password=hunter2", "LMKV_REMOTE_PASSWORD": "hunter2"}
    config = load(env=env)
    assert config.password == "hunter2"
    assert "hunter2" in config.remote_url[0].text
    for text in (repr(config), str(config.remote_url), repr(config.describe()), str(config.remote_password)):
        assert "hunter2" not in text
    assert values(config)["remote_url"] == "redis://me:***@host/1?ssl_password=***"


MASKED = {
    "redis://me:a/hunter2?x#y@host:6379/0": "redis://me:***@host:6379/0",
    "redis://one:6379,redis://:a/hunter2@two:6379": "redis://one:6379,redis://:***@two:6379",
    "s3://id:a@b/hunter2@bucket?endpoint=http://host:9000": "s3://id:***@bucket?endpoint=http://host:9000",
    "s3://bucket?proxy_url=http%3A%2F%2Fme:hunter2%40proxy&region=a": "s3://bucket?proxy_url=***&region=a",
    "redis://me@corp:hunter2@host": "redis://me@corp:***@host",
    "redis://u/s?e#r:hunter2@host": "redis://u/s?e#r:***@host",
    "redis://@me:hun://hunter2@host": "redis://@me:***@host",
    "redis://host?p%61ssword=a#hunter2&db=1": "redis://host?p%61ssword=***&db=1",
    "gs://b?base_url=http%3A%2F%2Fme%3Ahunter2%40host&a=b": "gs://b?base_url=http://me:***@host&a=b",
    "redis:/me:hunter2@host": "redis:/me:***@host",
    "redis:me:hunter2@host": "redis:me:***@host",
}


def test_passwords_that_are_not_encoded_are_not_shown_either() -> None:
    assert {url: str(RemoteURL(url)) for url in MASKED} == MASKED
    assert [url for url in MASKED if "hunter2" in repr(RemoteURL(url))] == []


@pytest.mark.parametrize(
    "piece", ["://a a://b:c?a=%3A%2F%2F", "?a", "&a", "?a=b#", "?=", "redis:/", " a:", "'a:b@", " a://b:c@", "=a://"]
)
def test_masking_takes_time_by_the_length_alone(piece: str) -> None:
    texts = {f"{size}": piece * size for size in (1_000, 20_000)}
    times = interleaved({size: partial(mask_secrets, text) for size, text in texts.items()}, 3, clock=time.thread_time)
    assert median_ratio(times, "20000", "1000") < 200, "20 times as long; squared it is 400"


def test_a_name_in_the_environment_takes_time_by_its_length_alone() -> None:
    names = {f"{size}": "LMKV_" + "PORT_1_TCP_" * size + "-" for size in (100, 2_000)}
    looked = {size: partial(lmcache.SERVICE_LINK.fullmatch, name) for size, name in names.items()}
    times = interleaved(looked, 3, clock=time.thread_time)
    assert median_ratio(times, "2000", "100") < 200, "20 times as long; squared it is 400"


def test_what_a_library_says_is_shown_in_a_line_and_without_its_passwords() -> None:
    said = f"no\n\x1b[2J\u202e: redis://me:hunter2@host {' ' * 7_960}redis://me:hunter2{'x' * 400}@host"
    for shown in (str(BackendError("redis", "read", "", said)), safe_repr(RuntimeError(said))):
        assert shown.isprintable()
        assert "redis://me:***@host" in shown
        assert "hunter2" not in shown
    assert len(safe_repr(RuntimeError("x" * 10**6))) <= 1000


def test_a_password_from_a_file(tmp_path: Path) -> None:
    (tmp_path / "secret").write_text("hunter2\n")
    given = {"remote_password_file": str(tmp_path / "secret")}
    assert load(**given).password == "hunter2"
    refused("both given", remote_password="x", **given)
    (tmp_path / "secret").unlink()
    refused("cannot be read", lambda: load(**given).password)


def test_a_password_is_read_again_from_a_file_but_not_from_a_pipe(tmp_path: Path) -> None:
    (tmp_path / "secret").write_text("hunter2\n")
    config = load(remote_password_file=str(tmp_path / "secret"))
    renew = config.renew_password
    assert renew is not None
    options = RemoteOptions(password=config.password, renew_password=renew)
    (tmp_path / "secret").write_text("hunter3\n")
    assert options.password_now() == renew() == "hunter3"
    (tmp_path / "secret").write_text("")
    assert options.password_now() == "hunter2", "it is just being written"
    (tmp_path / "secret").unlink()
    assert options.password_now() == "hunter2"
    assert "hunter" not in repr(options)
    os.mkfifo(tmp_path / "pipe")
    assert load(remote_password_file=str(tmp_path / "pipe")).renew_password is None
    assert load(remote_password="hunter2").renew_password is None


def test_a_password_from_a_pipe_and_from_what_is_no_file(tmp_path: Path) -> None:
    """As the shell's `<(...)` is one, with a writer that takes its time."""
    reads, writes = os.pipe()
    config = load(remote_password_file=f"/dev/fd/{reads}")
    answers: list[str | None] = []
    reader = threading.Thread(target=lambda: answers.append(config.password))
    reader.start()
    os.write(writes, b"hun")
    os.write(writes, b"ter2\n")
    os.close(writes)
    reader.join(LIMIT)
    os.close(reads)
    assert answers == ["hunter2"]
    os.mkfifo(tmp_path / "pipe")
    (tmp_path / "huge").write_bytes(b"x" * (1 << 18))
    for name in ("/dev/zero", str(tmp_path), str(tmp_path / "pipe"), str(tmp_path / "huge")):
        password, key = load(remote_password_file=name), load(authentication_key_file=name)
        refused(r"remote_password_file .*cannot be read: the ", lambda config=password: config.password)
        refused(r"authentication_key_file .*cannot be read: the ", lambda config=key: config.authentication_bytes)


def test_what_is_no_file_is_not_opened() -> None:
    """Some devices act on that: at a terminal that is opened and closed its other end hangs up."""
    master = os.open("/dev/ptmx", os.O_RDWR | os.O_NOCTTY)
    fcntl.ioctl(master, TIOCSPTLCK, bytes(4))
    (number,) = struct.unpack("i", fcntl.ioctl(master, TIOCGPTN, bytes(4)))
    raised(ConfigError, "the path is not a file", load, file=f"/dev/pts/{number}")
    poll = select.poll()
    poll.register(master, select.POLLHUP)
    assert not poll.poll(0)
    os.close(master)


def test_aliases_are_refused_before_they_are_gigabytes(in_file: Callable[[str], Config]) -> None:
    merged = (f"a{at}: &a{at} {{<<: [{', '.join([f'*a{at - 1}'] * 20)}]}}" for at in range(1, 6))
    for text in (
        *(f"quotas: {{alice: {ALIASES}}}", f"chunk_size: {ALIASES}", "\n".join(["a0: &a0 {k: 1}", *merged])),
        "local_cpu: &mine true\nlocal_disk: *mine",
    ):
        refused(r"line [12], column \d+: aliases .* are not allowed", lambda text=text: in_file(text))


def test_a_value_that_is_not_what_its_tag_says_is_refused_and_not_shown(in_file: Callable[[str], Config]) -> None:
    for value in ("!!bool hunter2", "!!int hunter2", "!!int ''", "!!float ''", "!!timestamp hunter2"):
        text = f"pin_ttl: 9\nremote_password: {value}\n"
        told = refused("line 2: the value does not fit its !!tag: leave the tag out", lambda text=text: in_file(text))
        assert "hunter2" not in told


def test_a_share_that_is_no_number_is_refused() -> None:
    every([[5], {"a": 5}, None, True], lambda bad: refused(r"quotas .* must be a number", quotas={"alice": bad}))


@pytest.mark.parametrize("written", [b"", b"chunk_size: 256\n"], ids=["silent", "begun"])
def test_a_pipe_whose_writer_says_nothing_more_is_refused_soon(
    written: bytes, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert named_file._SILENCE <= 5 < named_file._PATIENCE <= 10
    monkeypatch.setattr(named_file, "_SILENCE", 0.1)
    os.mkfifo(tmp_path / "pipe")
    writer = os.open(tmp_path / "pipe", os.O_RDWR)
    os.write(writer, written)
    with pytest.raises(ConfigError, match=r"pipe: the path is a pipe, and the writer is slow: nothing came for 0 s"):
        load(file=tmp_path / "pipe")
    monkeypatch.setattr(named_file, "_PATIENCE", 0.0)
    os.write(writer, written)
    raised(ConfigError, r"not all within 0 s", load, file=tmp_path / "pipe")
    os.close(writer)


def test_the_agent_api_needs_a_token_where_anybody_may_connect(tmp_path: Path) -> None:
    port, file = {"agent_listen": "127.0.0.1:8377"}, {"agent_token_file": str(tmp_path / "token")}
    refused(r"agent_listen .*needs agent_token or", **port)
    assert load(agent_listen="unix:/run/lmkv.sock").token is None
    (tmp_path / "token").write_text("letmein\n")
    assert load(**port, agent_token="letmein").token == load(**port, **file).token == "letmein"
    assert "letmein" not in repr(load(agent_token="letmein"))
    refused("both given", agent_token="letmein", **file)


def test_a_file_without_a_secret_is_refused(tmp_path: Path) -> None:
    """Rather than an agent API that asks for no token."""
    for content in (b"", b"\n", b"\nletmein", b"\xff\xfe"):
        (tmp_path / "file").write_bytes(content)
        for name in ("agent_token", "remote_password"):
            config = load(**{f"{name}_file": str(tmp_path / "file")})
            why = rf"{name}_file = .* (has no {name} in its first line|is not a text file)"
            refused(why, lambda config=config: (config.token, config.password))


def test_a_token_that_no_header_can_have_is_refused(tmp_path: Path) -> None:
    """Rather than an agent API that refuses everybody."""
    for token in ("letmeïn", "letmein ", "let me in"):
        (tmp_path / "token").write_text(token)
        for given in ({"agent_token": token}, {"agent_token_file": str(tmp_path / "token")}):
            why = rf"{next(iter(given))} = .* must be ASCII without blanks"
            assert token not in refused(why, lambda given=given: load(**given).token)


def test_an_authentication_key_comes_from_a_setting_or_a_file(tmp_path: Path) -> None:
    assert load().authentication_bytes is None
    assert load(authentication_key="k" * 32).authentication_bytes == b"k" * 32
    file = tmp_path / "key"
    for content, key in (
        (b"k" * 64 + b"\n", b"k" * 64),
        (b"k" * 64 + b"\r\n", b"k" * 64),
        (b"\xff\n\0" * 12 + b"k", b"\xff\n\0" * 12 + b"k"),
    ):
        file.write_bytes(content)
        assert load(authentication_key_file=str(file)).authentication_bytes == key
    raised(ConfigError, "both given", load, authentication_key_file=str(file), authentication_key="k" * 32)
    assert "kkkk" not in repr(load(authentication_key="k" * 32))


def test_what_is_too_short_for_an_authentication_key_is_refused_and_not_shown(tmp_path: Path) -> None:
    why = r"authentication_key = .*\*\*\*.* has 31 bytes, fewer than 32"
    assert "kkkk" not in refused(why, authentication_key="k" * 31)
    (tmp_path / "key").write_bytes(b"k" * 31 + b"\n")
    for name in ("key", "none"):
        config = load(authentication_key_file=str(tmp_path / name))
        why = r"authentication_key_file = .* (has 31 bytes|cannot be read)"
        refused(why, lambda config=config: config.authentication_bytes)


# -- spellings -----------------------------------------------------------------------------------------

OPTIONAL = [name for name, value in DEFAULTS.items() if value is None]
NOTHINGS = ["", "none", "None", "NULL", "null", "false", "False", "no", "off"]


def test_every_option_that_need_not_be_set_is_unset_by_the_same_words(in_file: Callable[[str], Config]) -> None:
    """As `lmkv config show` prints it: none."""
    for word in NOTHINGS:
        for config in (
            load(env={f"LMKV_{name.upper()}": word for name in OPTIONAL}),
            load(extra=dict.fromkeys(OPTIONAL, word)),
            in_file("".join(f"{name}: '{word}'\n" for name in OPTIONAL)),
        ):
            assert {name for name in OPTIONAL if values(config)[name] is not None} == set(), word
            assert config.sources.keys() >= {*OPTIONAL}
    for written in ("", "~", "null", "none", "None", "false"):
        for name in OPTIONAL:
            if written == "false" and name in {"remote_password", "authentication_key", "agent_token"}:
                refused("in quotes", lambda name=name: in_file(f"{name}: false\n"))
            else:
                assert values(in_file(f"{name}: {written}\n"))[name] is None, (name, written)


def test_a_folder_of_that_name_can_be_given() -> None:
    for path in ("./none", "./null", "file:///x/none", "./a/../false"):
        config = load(local_disk=path, max_local_disk_size=1)
        assert config.local_disk is not None
        assert Config(local_disk=config.local_disk, max_local_disk_size=1) == config


READ: dict[str, dict[str, object]] = {
    "chunk_size": {"0400": 400, "256": 256, "+256": 256, " '0400'": 400, "0x100": None, "1:30": None, "1_024": None},
    "max_local_cpu_size": {
        "1.5": 1.5, "1e1": 10.0, "1.0e+1": 10.0, ".5": 0.5, "5": 5.0, "1:30": None, "1:30.5": None, "1_0.5": None,
    },
    "disk_direct": {"on": "on", "off": "off", "auto": "auto", "'on'": "on"},
    "remote_username": {"0123": "0123", "1_000": "1_000", "12:34": "12:34", "'no'": None, "'none of it'": "none of it"},
    "remote_password": {
        "123": "123", "0123": "0123", "2026-01-02": "2026-01-02", "1.50": "1.50", "1_000": "1_000", "12:34": "12:34",
        "'no'": None, "'none of it'": "none of it", "'yes'": "yes",
    },
}  # fmt: skip
"""What is written in a file for a setting, and what it is then; None for a number: it is refused."""


def test_a_whole_number_in_a_file_is_what_it_looks_like(in_file: Callable[[str], Config]) -> None:
    """So is every other number, choice and text."""
    why = {"chunk_size": "a whole number, with digits only", "max_local_cpu_size": "a number"}

    def check(name: str, written: str, read: object) -> None:
        text = f"{name}: {written}\n"
        if read is None and name in why:
            refused(rf"{name} = '{written}' must be {why[name]}", lambda: in_file(text))
        else:
            config = in_file(text)
            assert (config.password if name == "remote_password" else getattr(config, name)) == read

    every([(name, *row) for name, table in READ.items() for row in table.items()], check)
    refused(r"remote_password = .*\*\*\*.* in quotes", lambda: in_file("remote_password: yes\n"))
    for name in ("LMKV_CHUNK_SIZE", "LMKV_MAX_LOCAL_CPU_SIZE"):
        every(["1_024", "1,024", "1:30"], lambda word, name=name: refused("number", env={name: word}))
