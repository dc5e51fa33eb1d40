"""LMCache's settings as they are: used, without effect or refused, and lmkv's own win."""

from __future__ import annotations

import json
import logging
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch

from lmkv import Config, Engine
from lmkv.config import SettingsResult, lmcache, read_yaml
from tests.tables import every
from tests.test_config import refused

HERE = Path(__file__).parent
KEYS = (HERE / "lmcache-0.5.6-keys.txt").read_text().split()
"""All keys of LMCache 0.5.6's configuration."""

EXTRA_KEYS = (HERE / "lmcache-extra-keys.txt").read_text().split()
"""All keys of `extra_config` that LMCache 0.5.6 and 0.5.7rc2 read, in process."""

DOCUMENT = "chunk_size: 256\n# Enable CPU memory backend\nlocal_cpu: true # default\nmax_local_cpu_size: 5\n"


def load(env: Mapping[str, str] | None = None, **arguments: Any) -> Config:
    return Config.load(env=env or {}, **arguments)


def given(config: Config) -> dict[str, object]:
    """The settings that do not have their default for want of a source."""
    return {name: getattr(config, name) for name in config.sources}


def remarks(config: Config, level: int) -> str:
    return "\n".join(text for at, text in config.remarks if at == level)


@pytest.fixture
def file(tmp_path: Path) -> Path:
    return tmp_path / "lmcache_config.yaml"


# -- the table -----------------------------------------------------------------------------------------


def test_the_table_has_every_key_of_lmcache() -> None:
    assert len(KEYS) == 108
    assert set(KEYS) - set(lmcache.table()) == {"extra_config"}, "whose keys have entries of their own"


def test_every_key_of_its_extra_config_is_in_one_class() -> None:
    known = {key.removeprefix("extra_config.") for key in lmcache.table() if key.startswith("extra_config.")}
    assert sorted(set(EXTRA_KEYS) - known) == []
    answer = SettingsResult.to(
        env={}, extra={"lmcache.extra_config": {key: "x" for key in EXTRA_KEYS if key != "use_odirect"}}
    )
    assert [each for each in answer.readings if each.kind == "unknown"] == []


VARIABLES = [
    "AEROSPIKE_HOSTS",
    "AEROSPIKE_PASSWORD",
    "AEROSPIKE_SET",
    "AEROSPIKE_USERNAME",
    "COORDINATOR_ADVERTISE_IP",
    "COORDINATOR_URL",
    "COORDINATOR_EVENT_FLUSH_INTERVAL",
    "COORDINATOR_HEARTBEAT_INTERVAL",
    "FORCE_SKIP_SAVE",
    "GPU_STAGING_BUFFER_BYTES",
    "LOG_LEVEL",
    "MQ_TIMEOUT",
    "OFFLOAD_RPC_PORT",
    "REQUEST_TELEMETRY_TYPE",
    "RESP_HOST",
    "RESP_PASSWORD",
    "RESP_PORT",
    "RESP_USERNAME",
    "RUNTIME_PLUGIN_CONFIG",
    "SERVER_URL",
    "TRACK_USAGE",
    "USAGE_TRACK_INTERVAL",
    "USAGE_TRACK_URL",
]
"""What LMCache reads of the environment besides its settings."""


def test_every_variable_of_its_is_in_one_class() -> None:
    answer = SettingsResult.to(env={f"LMCACHE_{name}": "1" for name in VARIABLES})
    assert [each for each in answer.readings if each.kind == "unknown"] == []
    login = {"LMCACHE_RESP_USERNAME": "me", "LMCACHE_RESP_PASSWORD": "secret"}
    config = load({"LMCACHE_REMOTE_URL": "resp://host:6379", **login})
    assert (config.remote_username, config.password, str(config.remote_url[0])) == ("me", "secret", "redis://host:6379")


def test_every_entry_says_what_it_is_and_none_is_there_twice() -> None:
    lines = (Path(lmcache.__file__).parent / "lmcache.toml").read_text().splitlines()
    text = "\n".join(line for line in lines if not line.startswith("needs"))
    settings = {setting.name for setting in Config().describe()}
    for entry in lmcache.table().values():
        assert entry.kind in {"mapped", "joined", "refused", "without_effect"}
        assert (entry.setting in settings) is (entry.kind == "mapped"), entry.key
        assert bool(entry.why) is (entry.kind != "mapped"), entry.key
        assert not entry.needs or entry.needs in lmcache.table()
        assert entry.kind == "mapped" or text.count(f'"{entry.key}"') == 1, entry.key
    assert [key for key in lmcache.table() if text.count(f'"{key}"') > 2] == []


def test_every_key_is_known_wherever_it_is_given(file: Path) -> None:
    for key in KEYS:
        file.write_text(f"{key}: null\n")
        env = {f"LMCACHE_{key.upper()}": ""}
        for source in ({"env": {"LMCACHE_CONFIG_FILE": str(file)}}, {"env": env}, {"extra": {f"lmcache.{key}": None}}):
            assert not lmcache.translate(source.get("env", {}), source.get("extra", {}), read_yaml).of("unknown")


# -- used ----------------------------------------------------------------------------------------------


def test_the_three_variables_of_the_first_document() -> None:
    config = load({"LMCACHE_CHUNK_SIZE": "128", "LMCACHE_LOCAL_CPU": "False", "LMCACHE_MAX_LOCAL_CPU_SIZE": "2.5"})
    assert given(config) == {"chunk_size": 128, "local_cpu": False, "max_local_cpu_size": 2.5}
    assert config.source("chunk_size") == "environment LMCACHE_CHUNK_SIZE"
    (_, sizes), (level, nothing) = config.remarks
    assert sizes.startswith("max_local_cpu_size: LMCache takes this size")
    assert (level, nothing.startswith("no tier keeps chunks")) == (logging.WARNING, True)


def test_the_file_of_the_first_document(file: Path) -> None:
    file.write_text(DOCUMENT)
    config = load({"LMCACHE_CONFIG_FILE": str(file), "LMCACHE_USE_EXPERIMENTAL": "True"})
    assert given(config) == {"chunk_size": 256, "local_cpu": True, "max_local_cpu_size": 5.0}
    assert {config.source(name) for name in config.sources} == {f"file {file}"}
    assert config == Config()


def test_keys_in_the_extra_configuration() -> None:
    config = load(extra={"lmcache.chunk_size": 64, "lmcache.use_layerwise": True, "lmcache_rpc_port": "producer1"})
    assert given(config) == {"chunk_size": 64, "use_layerwise": True}
    assert config.source("chunk_size") == "kv_connector_extra_config"


def test_a_later_source_is_stronger_as_in_lmcache(file: Path) -> None:
    file.write_text("chunk_size: 1\nmin_retrieve_tokens: 1\npin_timeout_sec: 1\nenable_pd: true\nextra_config: {a: 1}")
    env = {
        "LMCACHE_CONFIG_FILE": str(file), "LMCACHE_CHUNK_SIZE": "2", "LMCACHE_MIN_RETRIEVE_TOKENS": "2",
        "LMCACHE_ENABLE_PD": "false", "LMCACHE_EXTRA_CONFIG": '{"disk_io_threads": 8}',
    }  # fmt: skip
    config = load(env, extra={"lmcache.chunk_size": 3})
    assert given(config) == {"chunk_size": 3, "min_retrieve_tokens": 2, "pin_ttl": 1.0, "disk_io_threads": 8}
    assert not remarks(config, logging.WARNING), "LMCache takes the stronger extra_config as a whole"


CONVERTED: list[tuple[dict[str, object], dict[str, object]]] = [
    ({"local_disk": "file:///x/", "max_local_disk_size": 2}, {"local_disk": "/x", "max_local_disk_size": 2.0}),
    ({"local_disk": "/x/y", "max_local_disk_size": "2"}, {"local_disk": "/x/y", "max_local_disk_size": 2.0}),
    ({"max_local_disk_size": 2}, {}),
    ({"max_local_disk_size": 2, "local_disk": None}, {"local_disk": None}),
    ({"cache_policy": "FIFO"}, {"cache_policy": "FIFO"}),
    ({"save_decode_cache": False}, {"save_decode_cache": False}),
    ({"save_unfull_chunk": "False"}, {"save_unfull_chunk": False}),
    ({"discard_partial_chunks": True}, {"save_unfull_chunk": False}),
    ({"discard_partial_chunks": "1"}, {"save_unfull_chunk": False}),
    ({"discard_partial_chunks": False, "save_unfull_chunk": False}, {"save_unfull_chunk": False}),
    ({"pin_timeout_sec": 60}, {"pin_ttl": 60.0}),
    ({"use_local_cpu": "False"}, {"local_cpu": False}),
    ({"use_local_cpu": "False", "local_cpu": True}, {"local_cpu": True}),
    ({"extra_config": {"use_odirect": True}}, {"disk_direct": "on"}),
    ({"extra_config": '{"use_odirect": false, "disk_io_threads": 8}'}, {"disk_direct": "off", "disk_io_threads": 8}),
    ({"extra_config": ""}, {}),
    # Defaults of LMCache.
    *(({key: value}, {}) for key, value in (("remote_serde", "naive"), ("enable_pd", "0"), ("enable_p2p", 0))),
]


def test_values_are_converted() -> None:
    for extra, expected in CONVERTED:
        assert given(load(extra={f"lmcache.{key}": value for key, value in extra.items()})) == expected, extra
    # Quotes that a shell has left are no part of a value.
    env = {"LMCACHE_LOCAL_DISK": "'file:///x/'", "LMCACHE_MAX_LOCAL_DISK_SIZE": '"2"'}
    assert given(load(env)) == {"local_disk": "/x", "max_local_disk_size": 2.0}


# -- without effect, unknown, refused ------------------------------------------------------------------


def test_what_has_no_effect_is_named_in_one_line_at_info() -> None:
    config = load(
        {"LMCACHE_USE_EXPERIMENTAL": "True", "LMCACHE_TRACK_USAGE": "false", "LMCACHE_PD_BUFFER_DEVICE": "cpu"},
        extra={"lmcache.numa_mode": "auto"},
    )
    [(level, text)] = config.remarks
    assert level == logging.INFO
    assert all(name in text for name in ("use_experimental", "track_usage", "pd_buffer_device", "numa_mode"))
    assert config == Config()


def test_unknown_keys_are_named_in_a_warning(file: Path) -> None:
    file.write_text("local_cpu: true\nchunk_siz: 1\n5: 1\n2026-01-01: 1\n")
    env = {"LMCACHE_CONFIG_FILE": str(file), "LMCACHE_CHUNKS": "1"}
    text = remarks(load(env, extra={"lmcache.extra_config": {"use_odirct": 1}}), logging.WARNING)
    assert f"'chunk_siz' (file {file})" in text
    assert "'chunks' (environment LMCACHE_CHUNKS)" in text
    assert "'extra_config.use_odirct'" in text


def test_a_file_of_which_nothing_is_read_is_refused(file: Path) -> None:
    file.write_text("cache_config: {chunk_size: 64}\nchunk_siz: 1\n")
    answer = SettingsResult.to(env={"LMCACHE_CONFIG_FILE": str(file), "LMCACHE_CHUNK_SIZE": "64"})
    assert answer.problems[1:] == (f"file {file}: unknown key 'chunk_siz' = 1; did you mean 'chunk_size'?",)
    assert [(each.key, each.kind) for each in answer.readings if each.kind != "used"] == [
        ("'cache_config'", "refused"),
        ("'chunk_siz'", "refused"),
    ]


def test_a_flood_of_unknown_keys_is_one_short_warning() -> None:
    text = remarks(load({f"LMCACHE_X{n}": "1" for n in range(10_000)}), logging.WARNING)
    assert text.endswith(" and 9980 more")
    assert len(text) < 2000


def test_links_to_a_service_are_no_settings() -> None:
    config = load(
        dict.fromkeys(("LMCACHE_SERVICE_HOST", "LMCACHE_SERVER_PORT_8000_TCP_ADDR", "LMCACHE_PORT"), "tcp://h:1")
    )
    assert (config, config.remarks) == (Config(), ())


REFUSED = [key for key, entry in lmcache.table().items() if entry.kind == "refused"]


def test_what_would_change_what_is_served_is_refused_with_the_reason() -> None:
    for key in REFUSED:
        extra = {f"lmcache.{key}": "redis://user:secret@host", "lmcache.remote_url": "redis://host"}
        told = refused(key, extra=extra)
        assert told == f"kv_connector_extra_config: LMCache's {key} cannot be used: {lmcache.table()[key].why}"
    for value in (None, "", "None", "null", "False", False, [], {}):
        assert load(extra={f"lmcache.{key}": value for key in REFUSED}) == Config(), value


def test_everything_that_is_refused_is_said_at_once() -> None:
    env = {"LMCACHE_REMOTE_SERDE": "cachegen", "LMCACHE_ENABLE_BLENDING": "True", "LMCACHE_PD_ROLE": "sender"}
    env |= {"LMCACHE_CHUNK_SIZE": "x", "LMCACHE_REMOTE_URL": "lm://host:1", "LMCACHE_USE_ODIRECT": "2"}
    env |= {"LMCACHE_DISCARD_PARTIAL_CHUNKS": "perhaps"}
    told = [line.split(":")[0] for line in refused("LMCache", env=env).splitlines()]
    assert sorted(told) == sorted(f"environment {name}" for name in env.keys() - {"LMCACHE_USE_ODIRECT"})


# -- lmkv's own ----------------------------------------------------------------------------------------


def test_a_single_setting_of_lmkv_wins_and_one_line_says_so(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "lmkv.yaml").write_text("pin_ttl: 60\n")
    ways: list[dict[str, Any]] = [
        *({"env": {"LMKV_PIN_TTL": "60"}}, {"extra": {"pin_ttl": 60}}, {"extra": {"lmkv.pin_ttl": 60}}),
        *({"pin_ttl": 60}, {"file": "lmkv.yaml"}, {"env": {"LMKV_CONFIG_FILE": "lmkv.yaml"}}),
    ]
    for own in ways:
        env = {"LMCACHE_CHUNK_SIZE": "2", "LMCACHE_CONFIG_FILE": "no such file", **own.get("env", {})}
        extra = {"lmcache.remote_url": "redis://h", **own.get("extra", {})}
        config = load(**{**own, "env": env, "extra": extra})
        assert given(config) == {"pin_ttl": 60.0}, own
        [(level, text)] = config.remarks
        assert level == logging.WARNING
        names = "LMCACHE_CHUNK_SIZE, LMCACHE_CONFIG_FILE, lmcache.remote_url"
        assert f"does not read LMCache's settings {names}, because of lmkv's pin_ttl (" in text
        assert text.endswith("convert LMCache's with lmkv config migrate, or remove lmkv's")
    for name, value in (("LMKV_LOG_LEVEL", "INFO"), ("LMKV_SERVICE_HOST", "INFO"), ("LMKV_CONFIG_FILE", "")):
        assert load({"LMCACHE_CHUNK_SIZE": "2", name: value}).chunk_size == 2, "it is no setting of lmkv"


def test_an_engine_logs_what_there_is_to_say(caplog: pytest.LogCaptureFixture) -> None:
    config = load({"LMCACHE_CHUNK_SIZE": "16", "LMCACHE_MAX_LOCAL_CPU_SIZE": "0.001", "LMCACHE_NUMA_MODE": "auto"})
    with (
        caplog.at_level(logging.INFO, logger="lmkv"),
        Engine.open([torch.zeros(8, 16, 2, 4)], block_size=16, model="example", config=config) as engine,
    ):
        assert engine.store(range(16), [0]) == 16
    [line, _] = [record.getMessage() for record in caplog.records if "LMCache" in record.getMessage()]
    assert line == "lmkv: these LMCache settings have no effect: numa_mode"


# -- careless and hostile sources ----------------------------------------------------------------------


BAD: dict[str, list[object]] = {
    "chunk_size": ["abc", None, "", [256], 10**400], "local_cpu": ["ture"], "max_local_cpu_size": ["5GB", 0, "nan"],
    "cache_policy": ["CLOCK"], "local_disk": ["s3://bucket/x", "file:///a/,file:///b/", 5], "use_layerwise": [{}],
    "discard_partial_chunks": ["perhaps"], "pin_timeout_sec": ["soon"],
    "extra_config": ["{", "[" * 20_000, "[1]", 5, {"use_odirect": "perhaps"}],
}  # fmt: skip


def test_a_bad_value_is_one_short_error_by_its_source() -> None:
    def check(key: str, bad: object) -> None:
        assert len(refused(r"^kv_connector_extra_config: ", extra={f"lmcache.{key}": bad})) < 400
        if isinstance(bad, str):
            refused(f"^environment LMCACHE_{key.upper()}: ", env={f"LMCACHE_{key.upper()}": bad})

    every([(key, bad) for key, values in BAD.items() for bad in values], check)
    refused(
        r"environment LMCACHE_LOCAL_DISK: local_disk needs max_local_disk_size \(GiB\), for example",
        env={"LMCACHE_LOCAL_DISK": "file:///x/"},
    )


def test_a_file_that_is_no_configuration_is_one_short_error(file: Path) -> None:
    env, where = {"LMCACHE_CONFIG_FILE": str(file)}, r"^file .*lmcache_config\.yaml: "
    refused(r"lmcache_config\.yaml", env=env)
    for text in ("- 1", "chunk_size: [", "chunk_size: " + "[" * 20_000, "x" * (1 << 21), "\x00", "chunk_size"):
        file.write_text(text)
        assert len(refused(where, env=env)) < 1000 + len(str(file))
    file.write_text("pin_timeout_sec: soon\n")
    refused(f"{where}pin_timeout_sec: pin_ttl = 'soon' must be a number, in seconds$", env=env)


def test_a_file_of_json_is_yaml(file: Path) -> None:
    file.write_text(json.dumps({"chunk_size": 64, "extra_config": {"disk_io_threads": 2}}))
    assert given(load({"LMCACHE_CONFIG_FILE": str(file)})) == {"chunk_size": 64, "disk_io_threads": 2}


# -- spellings -----------------------------------------------------------------------------------------

TRUE, FALSE = ["true", "True", "1", "yes", "on", True, 1], ["false", "False", "0", "no", "off", False, 0]


SWITCHES: dict[str, tuple[str, object, object]] = {
    "save_unfull_chunk": ("save_unfull_chunk", True, False), "local_cpu": ("local_cpu", True, False),
    "save_decode_cache": ("save_decode_cache", True, False), "use_layerwise": ("use_layerwise", True, False),
    "discard_partial_chunks": ("save_unfull_chunk", False, True),
    "extra_config.use_odirect": ("disk_direct", "on", "off"),
}  # fmt: skip


def test_booleans_are_spelled_alike_everywhere() -> None:
    def beside(key: str, word: object) -> dict[str, object]:
        outer, _, inner = key.partition(".")
        return {f"lmcache.{outer}": {inner: word} if inner else word}

    for key, (name, yes, no) in SWITCHES.items():
        for word in TRUE + FALSE:
            expected = yes if word in TRUE else no
            assert getattr(load(extra=beside(key, word)), name) == expected
            if isinstance(word, str) and "." not in key:
                assert getattr(load({f"LMCACHE_{key.upper()}": word}), name) == expected
        for word in ("maybe", "2", 2, 0.5, "yes please"):
            refused(rf"{key} = .* must be one of true/1/yes/on/false/0/no/off", extra=beside(key, word))


def test_no_disk_is_spelled_as_lmkvs_is(file: Path) -> None:
    for word in ("None", "none", "null", "false", "", "no"):
        env = {"LMCACHE_LOCAL_DISK": word, "LMCACHE_MAX_LOCAL_DISK_SIZE": "5", "LMCACHE_REMOTE_URL": word}
        config = load(env)
        assert (config.local_disk, config.max_local_disk_size, config.remote_url) == (None, 0.0, ()), word
        file.write_text(f"local_disk: {word}\nmax_local_disk_size: 5\n")
        assert load({"LMCACHE_CONFIG_FILE": str(file)}).local_disk is None, word
