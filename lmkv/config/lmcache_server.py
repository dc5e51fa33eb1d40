"""Translates the options of LMCache's server, `lmcache server ...`."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Final
from urllib.parse import urlencode

from lmkv.config.command import Command, Env, use_rest, use_store

_SHARED: Final = "/dev/shm/"
_OWN_MEMORY: Final = (
    "each engine takes max_local_cpu_size (5 GiB) in addition to the memory that all engines of a node share"
)


def of_server(words: Sequence[str], env: Env) -> Command:
    """Translate a command of LMCache's server into one that starts an engine with lmkv, with the same memory and tiers.

    `words`: the options of the server. `env`: the environment of the server.
    """
    command, flags = Command(), _flags(words)
    folder = _SHARED + (next((value for name, value in flags if name == "--shm-name"), "").strip("/") or "lmkv")
    for name, value in flags:
        if name == "--l1-size-gb":
            command.use(name, "max_shared_memory_size", value)
            command.use(name, "shared_memory", folder)
            command.inform(_OWN_MEMORY)
        elif name == "--shm-name":
            command.use(name, "shared_memory", folder)
        elif name == "--chunk-size":
            command.use(name, "chunk_size", value)
        elif name == "--eviction-policy" and value in ("LRU", "ARC"):
            command.use(name, "cache_policy", value)
        elif name == "--eviction-policy":
            command.refuse(name, "write LRU or ARC; to keep tenants apart set quotas")
        elif name == "--l2-adapter":
            _use_adapter(command, value, env)
        else:
            command.unused("server", name, value or True)
    resp = any(reading.key == "--l2-adapter resp" for reading in command.readings)
    others = {name: value for name, value in env.items() if not (resp and name.startswith("LMCACHE_RESP_"))}
    command.leave_variables(others, "LMCache's server")
    return command


def _flags(words: Sequence[str]) -> list[tuple[str, str]]:
    """Return `(flag, value)` for each flag in `words`. The value is "" for a flag without a value."""
    found, at = [], 0
    while at < len(words):
        name, equals, value = words[at].partition("=")
        at += 1
        if not equals and at < len(words) and not words[at].startswith("--"):
            value, at = words[at], at + 1
        found.append((name, value))
    return found


def _use_adapter(command: Command, text: str, env: Env) -> None:
    """Translate a lower tier of LMCache's server. `text`: the tier's description in JSON."""
    try:
        adapter = json.loads(text)
        kind, given = str(adapter["type"]), f"--l2-adapter {adapter['type']}"
    except (ValueError, TypeError, KeyError, RecursionError):
        command.refuse("--l2-adapter", 'the value is not JSON such as {"type": "fs", "base_path": "/FOLDER"}')
        return
    adapter = {_RENAMED.get(key, key): value for key, value in adapter.items()}
    if kind in ("fs", "fs_native") and adapter.get("max_capacity_gb"):
        command.use_folder(given, adapter.get("base_path"), adapter["max_capacity_gb"])
    elif kind not in _ADAPTERS:
        command.refuse(given, "lmkv has no such tier: use a folder, Redis, Valkey, S3 or Mooncake")
        return
    else:
        use_store(command, given, lambda: (_ADAPTERS[kind](adapter, env), _joined(kind, adapter, env)))
        if "max_capacity_gb" in adapter:
            command.leave(f"{given}: max_capacity_gb", "a remote store evicts by itself")
    use_rest(command, given, adapter)


_RENAMED: Final = {"master_server_addr": "master_server_address", "rdma_devices": "device_name", "key_prefix": "prefix"}
"""For keys of a tier's description, the names of the same keys in other sources of LMCache's settings."""


def _joined(kind: str, adapter: Mapping[str, Any], env: Env) -> dict[str, Any]:
    """Return the keys of a lower tier's description, renamed as in LMCache's `extra_config`."""
    if kind == "resp":
        return {name: adapter.get(name) or env.get(f"LMCACHE_RESP_{name.upper()}") for name in ("username", "password")}
    if kind == "valkey":
        names = {"username": "valkey_username", "password": "valkey_password", "database_id": "valkey_database"}
        mode = {"valkey_mode": "cluster"} if adapter.get("cluster_mode") else {}
        ttl = {"valkey_enable_ttl": True, "valkey_ttl_sec": adapter["ttl_seconds"]} if "ttl_seconds" in adapter else {}
        return {names.get(key, key): value for key, value in adapter.items()} | mode | ttl
    return dict(adapter)


def _resp_address(adapter: Mapping[str, Any], env: Env) -> str:
    host, port = (
        adapter.get("host") or env.get("LMCACHE_RESP_HOST"),
        adapter.get("port") or env.get("LMCACHE_RESP_PORT"),
    )
    if not host:
        raise KeyError("host")
    return f"resp://{host}{f':{port}' if port else ''}"


def _s3_address(adapter: Mapping[str, Any], _: Env) -> str:
    place, options = str(adapter["s3_endpoint"]).removeprefix("s3://"), {}
    if adapter.get("s3_addressing_style") == "path":
        options["endpoint"] = f"{'http' if adapter.get('disable_tls') else 'https'}://{place}"
        place = adapter["s3_bucket"]
    if adapter.get("s3_ca_bundle"):
        options["ssl_ca_certs"] = adapter["s3_ca_bundle"]
    return f"s3://{place}{'?' * bool(options)}{urlencode(options, safe=':/')}"


_ADAPTERS: Final[dict[str, Callable[[Mapping[str, Any], Env], str]]] = {
    **dict.fromkeys(("fs", "fs_native"), lambda adapter, _: f"fs://host:0{adapter['base_path']}"),
    "resp": _resp_address,
    "s3": _s3_address,
    "valkey": lambda adapter, _: f"valkey://{adapter['startup_nodes']}",
    "mooncake_store": lambda adapter, _: f"mooncakestore://{adapter['master_server_address']}/",
}
