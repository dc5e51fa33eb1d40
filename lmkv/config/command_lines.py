"""lmkv's settings for a command line: LMCache's server, or `vllm serve` with LMCache or with vLLM's own offloading."""

from __future__ import annotations

import json
import logging
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, Final

from attrs import define, field

from lmkv.config import addresses, lmcache
from lmkv.config.parsers import GIB
from lmkv.config.reading import Reading
from lmkv.errors import ConfigError, short_repr

TRANSFER: Final = "--kv-transfer-config"
_SHARED: Final = "/dev/shm/"
_OWN_MEMORY: Final = "each engine has max_local_cpu_size (5 GiB) of its own beside the memory that all of a node share"
_NO_SERVER: Final = "there is no cache server: the engines of a node share memory (shared_memory)"

Setting = tuple[str, object, str]


@define
class Command:
    """What a command line becomes. `kept`: the words of `vllm serve` that stay; `role`: of its connector."""

    kept: list[str] = field(factory=list)
    role: str = "kv_both"
    settings: list[Setting] = field(factory=list)
    readings: list[Reading] = field(factory=list)
    notes: list[tuple[int, str]] = field(factory=list)

    def use(self, given: str, name: str, value: object) -> None:
        self.settings.append((name, value, given))
        self.readings.append(Reading(given, "command line", "used", name))

    def leave(self, given: str, why: str) -> None:
        self.readings.append(Reading(given, "command line", "without effect", why=why))

    def refuse(self, given: str, why: str) -> None:
        self.readings.append(Reading(given, "command line", "refused", why=why))

    def take(self, translation: lmcache.Translation) -> None:
        """Take over what LMCache's own settings become."""
        self.settings += translation.settings
        self.readings += translation.readings
        self.notes += translation.notes


def translated(words: Sequence[str]) -> Command:
    """lmkv's command for this one. Raises ConfigError if it is no such command."""
    program = " ".join(words[:2]) if words else ""
    if program.endswith("lmcache server"):
        return _of_server(list(_flags(words[2:])))
    if program.endswith("vllm serve"):
        return _of_vllm(words[2:])
    raise ConfigError(
        f"{short_repr(program)} is no command that is known: give `lmcache server ...` or `vllm serve ...`"
    )


def _flags(words: Sequence[str]) -> Iterator[tuple[str, str]]:
    """Flags and their values, "" of those that stand alone."""
    at = 0
    while at < len(words):
        name, equals, value = words[at].partition("=")
        at += 1
        if not equals and at < len(words) and not words[at].startswith("--"):
            value, at = words[at], at + 1
        yield name, value


# -- LMCache's server -------------------------------------------------------------------------------------


def _of_server(flags: list[tuple[str, str]]) -> Command:
    command = Command()
    folder = next((value for name, value in flags if name == "--shm-name"), "lmkv").strip("/") or "lmkv"
    for name, value in flags:
        if name == "--l1-size-gb":
            command.use(name, "max_shared_memory_size", value)
            command.use(name, "shared_memory", f"{_SHARED}{folder}")
            command.notes.append((logging.INFO, _OWN_MEMORY))
        elif name == "--chunk-size":
            command.use(name, "chunk_size", value)
        elif name == "--eviction-policy" and value in ("LRU", "ARC"):
            command.use(name, "cache_policy", value)
        elif name == "--l2-adapter":
            _use_adapter(command, value)
        elif name == "--shm-name":
            command.use(name, "shared_memory", f"{_SHARED}{folder}")
        elif name in _REFUSED_FLAGS:
            command.refuse(name, _REFUSED_FLAGS[name])
        elif name in _IDLE_FLAGS:
            command.leave(name, _IDLE_FLAGS[name])
        else:
            command.readings.append(Reading(name, "command line", "unknown"))
    return command


_REFUSED_FLAGS: Final = {
    "--eviction-policy": "there are LRU, ARC and others: docs/policies.md; quotas keep tenants apart",
    **dict.fromkeys(
        ("--gds-l1-path", "--l1-devdax-path", "--l1-manager"), "host memory, a folder and remote stores are the tiers"
    ),
    **dict.fromkeys(("--p2p-advertise-url", "--p2p-listen-url"), "servers do not load from each other"),
    "--coordinator-url": "there is no coordinator that could find or move KV",
    **dict.fromkeys(("--runtime-plugin-locations", "--server-module"), "LMCache's plugins are not loaded"),
    "--enable-segmented-prefix": "KV is reused for prefixes only, so that the output is what vLLM would compute",
}
_IDLE_FLAGS: Final = {
    **dict.fromkeys(
        (
            *("--host", "--port", "--http-host", "--http-port", "--transport", "--max-workers", "--max-gpu-workers"),
            *("--max-cpu-workers", "--grpc-server-workers", "--instance-id", "--isolated-ipc", "--engine-type"),
            *("--supported-transfer-mode", "--worker-reap-timeout-seconds", "--worker-registration-grace-seconds"),
            *("--run-script-api-enabled", "--script-allowed-imports", "--session-ttl-seconds", "--null-block-id"),
            "--periodic-notifier-interval-ms",
        ),
        _NO_SERVER,
    ),
    **dict.fromkeys(
        (
            *("--l1-use-lazy", "--l1-init-size-gb", "--l1-align-bytes", "--l1-use-hugepages", "--l1-read-ttl-seconds"),
            *("--l1-write-ttl-seconds", "--eviction-trigger-watermark", "--eviction-ratio"),
        ),
        "memory is mapped in the background, and freed as it is needed",
    ),
    **dict.fromkeys(
        ("--l2-store-policy", "--l2-prefetch-policy", "--l2-prefetch-max-in-flight"),
        "every chunk is in all tiers that are configured, and comes from the fastest",
    ),
    **dict.fromkeys(("--hash-algorithm",), "always sha256 over the tokens, the same in every process"),
    **dict.fromkeys(
        (
            *("--disable-observability", "--disable-metrics", "--disable-grpc-metrics", "--disable-logging"),
            *("--prometheus-port", "--otlp-endpoint", "--enable-tracing", "--trace-level", "--trace-output"),
            *("--metrics-sample-rate", "--event-bus-queue-size", "--kv-event-log-size", "--enable-gc-monitor"),
        ),
        "vLLM's own metrics have lmkv's",
    ),
}


def _use_adapter(command: Command, text: str) -> None:
    """A lower tier of LMCache's server, as JSON."""
    try:
        adapter = json.loads(text)
        kind, given = str(adapter["type"]), f"--l2-adapter {adapter['type']}"
    except (ValueError, TypeError, KeyError, RecursionError):
        command.refuse("--l2-adapter", "it is no JSON object with a type")
        return
    if kind not in _ADAPTERS:
        command.refuse(given, "there is no such tier here: a folder, Redis, Valkey, S3 or Mooncake can be one")
        return
    try:
        found = addresses.translated(_ADAPTERS[kind](adapter), _renamed(kind, adapter))
    except (addresses.RefusedError, KeyError) as error:
        command.refuse(given, str(error) if isinstance(error, addresses.RefusedError) else f"it has no {error}")
        return
    for name, value in found.items():
        command.settings.append((name, value, given))
    command.readings.append(Reading(given, "command line", "used", "remote_url"))
    if "max_capacity_gb" in adapter or "eviction" in adapter:
        command.leave(f"{given}: its capacity and eviction", "a remote store evicts by itself")


def _renamed(kind: str, adapter: Mapping[str, Any]) -> dict[str, object]:
    """Keys of an adapter as `extra_config` has them."""
    if kind == "valkey":
        names = {"username": "valkey_username", "password": "valkey_password", "database_id": "valkey_database"}
        mode = {"valkey_mode": "cluster"} if adapter.get("cluster_mode") else {}
        return {names.get(key, key): value for key, value in adapter.items()} | mode
    return dict(adapter)


_ADAPTERS: Final[dict[str, Callable[[Mapping[str, Any]], str]]] = {
    **dict.fromkeys(("fs", "fs_native"), lambda adapter: f"fs://host:0{adapter['base_path']}"),
    "resp": lambda adapter: f"resp://{adapter['host']}:{adapter['port']}",
    "s3": lambda adapter: "s3://" + str(adapter["s3_endpoint"]).removeprefix("s3://"),
    "valkey": lambda adapter: f"valkey://{adapter['startup_nodes']}",
    "mooncake_store": lambda adapter: f"mooncakestore://{adapter['master_server_address']}/",
}


# -- vllm serve -------------------------------------------------------------------------------------------


def _of_vllm(words: Sequence[str]) -> Command:
    command, at = Command(), 0
    while at < len(words):
        name, equals, value = words[at].partition("=")
        own = name in (TRANSFER, "--kv-offloading-size", "--kv-offloading-backend")
        if own and not equals and at + 1 < len(words):
            at += 1
            value = words[at]
        at += 1
        if name == TRANSFER:
            _use_transfer(command, value)
        elif name == "--kv-offloading-size":
            command.use(name, "max_local_cpu_size", value)
        elif name == "--kv-offloading-backend":
            command.leave(name, "lmkv is the backend")
        else:
            command.kept.append(words[at - 1])
    return command


def _use_transfer(command: Command, text: str) -> None:
    try:
        transfer = json.loads(text)
        connector, extra = transfer["kv_connector"], transfer.get("kv_connector_extra_config") or {}
        items = dict(extra)
    except (ValueError, TypeError, KeyError, RecursionError):
        command.refuse(TRANSFER, "it is no JSON object with a kv_connector")
        return
    command.role = transfer.get("kv_role") or "kv_both"
    if connector not in _CONNECTORS:
        command.refuse(f"{TRANSFER} {connector}", f"only {', '.join(_CONNECTORS)} can be migrated")
        return
    own = {key: items.pop(key) for key in list(items) if key in _OFFLOADING}
    idle = {key: items.pop(key) for key in list(items) if str(key).startswith("lmcache.mp.")}
    for key in idle:
        command.leave(str(key), _NO_SERVER)
    for key, value in own.items():
        _OFFLOADING[key](command, value)
    command.take(lmcache.translate({}, items, lambda path: {}))
    command.readings += [Reading(str(key), "command line", "unknown") for key in items if not lmcache.owns(key)]


_CONNECTORS: Final = (
    *("LMCacheConnectorV1", "LMCacheMPConnector", "OffloadingConnector", "SimpleCPUOffloadConnector"),
    "LMCacheConnectorV1Dynamic",
)


def _bytes(command: Command, value: object, given: str) -> None:
    if isinstance(value, int | float) and value > 0:
        command.use(given, "max_local_cpu_size", value / GIB)
    else:
        command.refuse(given, "it is no number of bytes")


def _secondary(command: Command, tiers: object) -> None:
    """vLLM's tiers below host memory."""
    for each in tiers if isinstance(tiers, list) else [tiers]:
        tier: Mapping[str, Any] = each if isinstance(each, Mapping) else {}
        kind = tier.get("type")
        given = f"secondary_tiers: {kind}"
        if kind == "fs" and tier.get("root_dir"):
            command.use(given, "local_disk", tier["root_dir"])
            if "max_disk_gib" in tier:
                command.use(given, "max_local_disk_size", tier["max_disk_gib"])
            else:
                command.refuse(given, "a folder needs a capacity: max_local_disk_size, in GiB")
        else:
            command.refuse(given, "local_disk and remote_url make such tiers: docs/tiers.md")


_OFFLOADING: Final[dict[str, Callable[[Command, Any], None]]] = {
    "cpu_bytes_to_use": lambda command, value: _bytes(command, value, "cpu_bytes_to_use"),
    "block_size": lambda command, value: command.use("block_size", "chunk_size", value),
    "secondary_tiers": _secondary,
    "spec_name": lambda command, value: command.leave("spec_name", "lmkv has one way of offloading"),
    "spec_module_path": lambda command, value: command.leave("spec_module_path", "lmkv has one way of offloading"),
    "lazy_offload": lambda command, value: command.leave("lazy_offload", "chunks are stored as they are computed"),
}
