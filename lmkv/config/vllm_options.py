"""Translates options of vLLM: a `--kv-transfer-config` with LMCache, and the options of vLLM's own offloading."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from functools import partial
from operator import itemgetter
from pathlib import Path
from typing import Any, Final
from urllib.parse import urlencode

from lmkv.config import lmcache
from lmkv.config.command import TRANSFER, Command, Env, use_rest, use_store
from lmkv.config.options import OPTIONS
from lmkv.config.parsers import GIB
from lmkv.config.sources import flat, read_yaml, typed
from lmkv.errors import ConfigError, short_repr

SIZE: Final = "--kv-offloading-size"


def of_vllm(words: Sequence[str], env: Env, own: Env, ranks: int | None) -> Command:
    """Translate vLLM's options `words`, so that lmkv replaces LMCache and vLLM's own offloading.

    `env`: LMCache's variables. `own`: lmkv's variables. `ranks`: the number of ranks of the engine, if
    `words` does not set it.
    """
    command = Command(ranks=ranks, variables=dict(own))
    options, command.kept = _options(_with_file(command, words))
    given = command.options = dict(options)
    if given.get("--nnodes", "1") != "1":
        told = "--nnodes: lmkv caches nothing if the ranks of an engine are on several machines: use one per engine"
        command.warn(told)
    counts = {kind: given[name] for name, kind in _RANKS.items() if name in given}
    if unclear := [count for count in counts.values() if not count.isdecimal()]:
        told = f"a number of ranks is {short_repr(unclear[0])}: write digits instead"
        command.warn(f"lmkv cannot multiply sizes per rank, because {told}")
    elif counts:
        command.ranks = math.prod(map(int, counts.values()))
    for name, value in options:
        if name in ("--kv-offloading-backend", "--connector"):
            command.unused("offloading", name, value)
        elif (setting := name.removeprefix("--").replace("-", "_")) in OPTIONS:
            command.refuse(name, f"vLLM has no such option: write LMKV_{setting.upper()}=VALUE before the command")
    size = given.get(SIZE)
    if size is not None and given.get("--kv-offloading-backend") != "lmcache":
        command.leave_variables(env, "vLLM's own offloading")
        env = {}
    try:
        _use_transfer(command, _transfer(options), env)
    except ValueError as error:
        command.refuse(TRANSFER, str(error))
    bare = size is None and not any(name.startswith(TRANSFER) for name, _ in options)
    if bare and any(name in ("--is-prefill-worker", "--is-decode-worker", "--disaggregation-mode") for name in given):
        command.warn(
            "Dynamo workers share KV through NixlConnector: write a MultiConnector of NixlConnector and LMKVConnector"
        )
    elif bare:
        note = command.warn if command.variables else command.inform
        note("the command does not start lmkv: lmkv config migrate prints it with --kv-transfer-config for lmkv")
    if size is not None and any("LMKVConnector" in value for name, value in options if name.startswith(TRANSFER)):
        told = "vLLM uses its own connector instead of LMKVConnector: remove the option, and set max_local_cpu_size"
        command.refuse(SIZE, told)
    elif size is not None:
        # Last, because it replaces the connector's own size in vLLM, too.
        command.use(SIZE, "max_local_cpu_size", size)
    if size is not None and given.get("--kv-offloading-backend") == "lmcache" and not env:
        told = "LMCache's server may have the sizes and tiers: give the server's command to lmkv config migrate, too"
        command.warn(f"--kv-offloading-backend: {told}")
    return command


def _with_file(command: Command, words: Sequence[str]) -> Sequence[str]:
    """Return the words of a command line, preceded by the options in the file that `--config` names."""
    at = next((at for at, word in enumerate(words) if word == "--config"), len(words))
    if at + 1 >= len(words):
        return words
    try:
        content = read_yaml(Path(words[at + 1]))
        model = [] if words[0].startswith("-") else list(words[:1])
        if model:
            # It replaces the file's.
            content.pop("model", None)
        return [*model, *as_words(content), *words[len(model) : at], *words[at + 2 :]]
    except ConfigError as error:
        command.warn(f"the file of --config cannot be read: {error}")
        return words


def as_words(content: Mapping[Any, object]) -> list[str]:
    """Return the content of a file for `vllm serve --config FILE` as command-line options."""
    words: list[str] = []
    for key, value in content.items():
        name = str(key).replace("_", "-")
        if isinstance(value, bool):
            words.append(f"--{name}" if value else f"--no-{name}")
        else:
            several = value if isinstance(value, list) else [value]
            words += [f"--{name}", *(each if isinstance(each, str) else json.dumps(typed(each)) for each in several)]
    return words


def connector_of(words: Sequence[str]) -> dict[str, Any]:
    """Return the `kv_transfer_config` of a vLLM command line. Raises ValueError for an invalid value."""
    return _transfer(_options(words)[0])


def _options(words: Sequence[str]) -> tuple[list[tuple[str, str]], list[str]]:
    """Return `(options, others)`: `(name, value)` for each word that may be an option, and the words to keep.

    Options about KV transfer and offloading are not kept.
    """
    options, kept, at = [], list[str](), 0
    while at < len(words):
        given, equals, value = words[at].partition("=")
        name = given.replace("_", "-")
        own = name.startswith((TRANSFER, "--kv-offloading-"))
        if not equals and at + 1 < len(words):
            value = words[at + 1]
        if own:
            # Keys in dotted names stay as they are.
            options.append((name.partition(".")[0] + given[len(name.partition(".")[0]) :], value))
            at += not equals
        else:
            options.append((name, value))
            kept.append(words[at])
        at += 1
    return options, kept


def _transfer(options: Sequence[tuple[str, str]]) -> dict[str, Any]:
    """Return the `kv_transfer_config` that vLLM would read from `options`.

    The last JSON counts, unless there are dotted options (`--kv-transfer-config.x`), which replace all JSON.
    """
    found: dict[str, Any] = {}
    dotted: dict[str, Any] = {}
    # vLLM then chooses the connector.
    sized = any(name == SIZE for name, _ in options)
    for name, value in options:
        if name == TRANSFER:
            try:
                given = json.loads(value)
            except (ValueError, RecursionError) as error:
                raise ValueError(_not_json(value, error)) from None
            if not isinstance(given, dict) or not (sized or isinstance(given.get("kv_connector"), str)):
                raise ValueError("the value is not a JSON object with a kv_connector")
            found = given
        elif name.startswith(f"{TRANSFER}."):
            more: Any = value.split(",") if name.endswith("+") else _dotted_value(value)
            for key in reversed(name.removesuffix("+").split(".")[1:]):
                more = {key: more}
            _update(dotted, more)
    return dotted or found


def _not_json(value: str, error: Exception) -> str:
    """Return the probable reason why `value` is not JSON, and what to write instead."""
    if re.fullmatch(r"@?[\w./~-]+\.(json|ya?ml)", value):
        return f'vLLM wants the JSON itself: write "$(cat {value.strip("@")})"'
    if value.startswith(("$", "`")):
        return "lmkv runs no command of the shell: write the JSON itself"
    if '"' not in value:
        return f"the quotes of {short_repr(value)} are lost, as in a shell: put the whole JSON into single quotes"
    return f"the value is not JSON: {error}"


_RANKS: Final = {
    **dict.fromkeys(("--tensor-parallel-size", "-tp"), "tensor"),
    **dict.fromkeys(("--pipeline-parallel-size", "-pp"), "pipeline"),
}
_MULTIPLES: Final = {
    sign: base**power for base, signs in ((1000, "kmgt"), (1024, "KMGT")) for power, sign in enumerate(signs, 1)
}


def _dotted_value(text: str) -> Any:
    """Return the value of a dotted option: a JSON value, a number such as 8 or 64k, or else the text itself."""
    with suppress(ValueError, RecursionError):
        return json.loads(text)
    number = re.fullmatch(r"([0-9]{1,15}(?:\.[0-9]{1,15})?)([kmgtKMGT])", text.strip())
    with suppress(ValueError):
        if number is None:
            return int(text)
        kind = float if number[2].islower() else int
        return int(kind(number[1]) * _MULTIPLES[number[2]])
    return text


def _update(found: dict[str, Any], more: Mapping[str, Any]) -> None:
    for key, value in more.items():
        before = found.get(key)
        if isinstance(value, dict) and isinstance(before, dict):
            _update(before, value)
        elif isinstance(value, list) and isinstance(before, list):
            before += value
        else:
            found[key] = value


def _use_transfer(command: Command, transfer: Mapping[str, Any], env: Env) -> None:
    connector, items = transfer.get("kv_connector"), flat(transfer.get("kv_connector_extra_config") or {})
    if isinstance(connectors := items.get("connectors"), list) and connector not in _CONNECTORS:
        if connector != "MultiConnector":
            told = "may be unable to combine LMKVConnector with others: write MultiConnector, as config migrate does"
            command.warn(f"{short_repr(connector)} {told}")
            transfer = {key: value for key, value in transfer.items() if key != "kv_connector_module_path"}
        if outside := sorted(map(str, items.keys() - {"connectors"})):
            told = "in a MultiConnector, each setting belongs in the kv_connector_extra_config of its own connector"
            command.warn(f"vLLM ignores {', '.join(outside)}: {told}")
        _use_several(command, {**transfer, "kv_connector": "MultiConnector"}, connectors, env)
        return
    command.role = transfer.get("kv_role") or "kv_both"
    if connector not in (None, *_CONNECTORS):
        close = lmcache.nearest(str(connector).lower(), ("lmkvconnector",), 0.85)
        command.refuse(f"{TRANSFER} {connector}", "did you mean LMKVConnector?" if close else _OTHER)
        return
    if connector not in (None, "LMKVConnector"):
        command.replaces = str(connector)
        if command.variables:
            command.warn(f"{connector} reads no LMKV_ variables: write LMKVConnector instead")
    _check_keys(command, transfer)
    if connector == "LMKVConnector" and (command.variables or not all(map(lmcache.owns, items))):
        _keep_own(command, items, env)
        return
    own = {key: value for key, value in items.items() if key in lmcache.commands()["offloading"] or key in _OFFLOADING}
    # In this order the bytes of a rank replace those of all, as in vLLM.
    for key, value in sorted(own.items(), key=itemgetter(0)):
        if key in _OFFLOADING:
            _OFFLOADING[key](command, value)
        else:
            command.unused("offloading", str(key), value)
    theirs = {key: value for key, value in items.items() if lmcache.owns(key)}
    if connector in _VLLMS:
        command.leave_variables(env, str(connector))
        env = {}
    command.take(lmcache.translate(env, theirs, read_yaml, command.ranks))
    for key in sorted(map(str, items.keys() - own.keys() - theirs.keys())):
        if key in lmcache.table() and connector not in _VLLMS:
            command.unknown(key, f"write lmcache.{key}, the name that LMCache reads")
        elif key.endswith("config_file"):
            command.refuse(key, f"set the variable {lmcache.ENV_FILE} to this file, or write the file's settings here")
        else:
            command.unused("offloading", key)


def _check_keys(command: Command, transfer: Mapping[str, Any]) -> None:
    """Refuse the keys and values of a `kv_transfer_config` with which vLLM would not start lmkv."""
    connector = transfer.get("kv_connector")
    if connector == "LMKVConnector" and "kv_role" not in transfer:
        command.refuse("kv_connector without kv_role", 'vLLM needs a role: add "kv_role": "kv_both"')
    if command.role not in _ROLES:
        command.refuse(f"kv_role {short_repr(command.role)}", f"vLLM knows {', '.join(_ROLES)}: write one of these")
    policy = transfer.get("kv_load_failure_policy", "recompute")
    if policy not in ("recompute", "fail"):
        command.refuse(f"kv_load_failure_policy {short_repr(policy)}", "write recompute: vLLM knows recompute and fail")
    elif connector == "LMKVConnector" and transfer.get("kv_load_failure_policy") != "recompute":
        command.warn('a request fails if its load fails: add "kv_load_failure_policy": "recompute"')
    elif policy == "fail":
        command.inform("kv_load_failure_policy: lmkv writes recompute, so that vLLM computes KV that cannot be loaded")
    module = transfer.get("kv_connector_module_path")
    if module is not None and connector == "LMKVConnector" and not str(module).startswith("lmkv."):
        told = f"vLLM would look for LMKVConnector in {short_repr(module)}: delete this key"
        command.refuse("kv_connector_module_path", told)
    elif module is not None:
        command.leave("kv_connector_module_path", "vLLM finds LMKVConnector by its name")
    for key in sorted(transfer.keys() - _READ_KEYS):
        if key in _IDLE_KEYS or (connector != "LMKVConnector" and key.startswith("kv_")):
            command.leave(key, "lmkv does not read this key")
        else:
            close = lmcache.nearest(key, (*_READ_KEYS, *_IDLE_KEYS), 0.8)
            told = "vLLM knows no such key: delete it, or write the key inside kv_connector_extra_config"
            command.refuse(str(key), f"did you mean {close}?" if close else told)
    if connector == "LMCacheMPConnector":
        command.refuse(f"{TRANSFER} {connector}", lmcache.table()["mp.host"].why)


def _keep_own(command: Command, items: Mapping[Any, object], env: Env) -> None:
    """Keep the settings of lmkv in `items`. LMCache's settings are then not read."""
    if env:
        command.warn(lmcache.not_read(list(env), [*command.variables, *map(str, items)]))
    for key, value in items.items():
        name = str(key).removeprefix("lmkv.")
        if lmcache.owns(key):
            command.leave(name, "lmkv reads no settings of LMCache, because lmkv's own settings are given")
        else:
            command.settings.append((name, value, lmcache.EXTRA))
            command.add(name, lmcache.EXTRA, "used", here=name)


def _use_several(command: Command, transfer: Mapping[str, Any], connectors: list[object], env: Env) -> None:
    """Translate a MultiConnector. lmkv replaces the connectors that offload KV; the others stay."""
    given = [each for each in connectors if isinstance(each, Mapping)]
    ours = [each for each in given if each.get("kv_connector") in _CONNECTORS]
    if not ours:
        command.refuse(f"{TRANSFER} MultiConnector", _NONE)
        return
    command.merged = len(ours) > 1
    if all(each["kv_connector"] in _VLLMS for each in ours):
        command.leave_variables(env, "vLLM's own offloading")
    for each in ours:
        _use_transfer(command, each, env if each["kv_connector"] not in _VLLMS else {})
    _agree_with_nixl(command, given, [each["kv_connector"] for each in ours], env)
    kept = [None if each is ours[0] else each for each in given if each is ours[0] or each not in ours]
    command.several = {**transfer, "kv_connector_extra_config": {"connectors": kept}} if len(kept) > 1 else {}


def _agree_with_nixl(command: Command, given: Sequence[Mapping[Any, Any]], ours: Sequence[str], env: Env) -> None:
    """Set `block_major: false` if NIXL is in the same MultiConnector. NIXL refuses the block-major layout on CUDA."""
    nixl = any("Nixl" in str(each.get("kv_connector")) for each in given)
    if nixl and not any(name == "block_major" for name, _, _ in command.settings):
        command.settings.append(("block_major", False, "NixlConnector"))
        if "LMKVConnector" in ours:
            command.warn("NixlConnector refuses lmkv's layout of KV on CUDA: set block_major: false for LMKVConnector")
        else:
            command.inform("block_major: false is needed, because NixlConnector refuses the other layout")
        if not env and any(name.startswith("LMCache") for name in ours):
            told = "lmkv ignores LMCACHE_ variables beside block_major: write them before this command, to migrate them"
            command.warn(told)


_READ_KEYS: Final = {
    *("kv_connector", "kv_role", "kv_connector_extra_config", "kv_connector_module_path", "kv_load_failure_policy")
}
_IDLE_KEYS: Final = ("engine_id", "kv_buffer_device", "kv_port", "enable_permute_local_kv")
_ROLES: Final = ("kv_both", "kv_producer", "kv_consumer")
_VLLMS: Final = ("OffloadingConnector", "SimpleCPUOffloadConnector")
_CONNECTORS: Final = (
    *("LMCacheConnectorV1", "LMCacheMPConnector", *_VLLMS),
    *("LMCacheConnectorV1Dynamic", "LMKVConnector", "LMCacheConnector"),
)
_OTHER: Final = (
    "lmkv cannot translate this connector: write LMKVConnector in its place, with max_local_cpu_size (GiB), or with "
    "local_disk and max_local_disk_size (GiB)"
)
_NONE: Final = (
    "lmkv cannot translate any of its connectors: add LMKVConnector, with max_local_cpu_size (GiB), or with local_disk "
    "and max_local_disk_size (GiB)"
)


def _bytes(command: Command, given: str, name: str, value: object, times: int = 1) -> None:
    try:
        nbytes = float(str(value)) * times
    except ValueError:
        nbytes = 0.0
    if nbytes > 0:
        command.use(given, name, nbytes / GIB)
    else:
        command.refuse(given, "the value is not a number of bytes")


def _secondary(command: Command, tiers: object) -> None:
    """Translate the lower tiers of vLLM's own offloading."""
    for each in tiers if isinstance(tiers, list) else [tiers]:
        tier: Mapping[str, Any] = each if isinstance(each, Mapping) else {}
        given = f"secondary_tiers: {tier.get('type')}"
        if tier.get("type") == "obj":
            store = inner if isinstance(inner := tier.get("store_config"), Mapping) else tier
            use_store(command, given, partial(_object_store, store))
            tier = {**tier, **store}
        elif tier.get("type") in ("p2p", "kvcr"):
            command.refuse(given, lmcache.table()["enable_p2p"].why)
            continue
        elif tier.get("type") not in ("fs", "fs_python") or not tier.get("root_dir"):
            command.refuse(given, "use local_disk or remote_url for such a tier: see docs/tiers.md")
            continue
        else:
            command.use_folder(given, tier["root_dir"], tier.get("max_disk_gib"))
            if "max_disk_gib" not in tier:
                command.refuse(given, "a folder needs a capacity: set max_local_disk_size, in GiB")
        use_rest(command, given, tier)


def _spec(command: Command, name: object) -> None:
    if name in _SPECS:
        command.leave("spec_name", "lmkv always offloads")
    else:
        why = "write max_local_cpu_size for host memory, local_disk with max_local_disk_size for files"
        command.refuse(f"spec_name {short_repr(name)}", f"lmkv does not know where this spec keeps KV: {why}")


_SPECS: Final = (*("CPUOffloadingSpec", "TieringOffloadingSpec", "NPUOffloadingSpec", "SharedStorageOffloadingSpec"),)


def _object_store(tier: Mapping[str, Any]) -> tuple[str, dict[str, Any]]:
    endpoint = str(tier.get("endpoint_override") or "")
    if endpoint and "://" not in endpoint:
        endpoint = f"{tier.get('scheme') or 'http'}://{endpoint}"
    names = {"region": "s3_region", "access_key": "aws_access_key_id", "secret_key": "aws_secret_access_key"}
    given = {"endpoint": endpoint, "session_token": tier.get("session_token"), "ssl_ca_certs": tier.get("ca_bundle")}
    query = urlencode({name: value for name, value in given.items() if value}, safe=":/")
    return f"s3://{tier['bucket']}{'?' * bool(query)}{query}", {names[key]: tier[key] for key in names if tier.get(key)}


_OFFLOADING: Final[dict[str, Callable[[Command, Any], None]]] = {
    "cpu_bytes_to_use": lambda command, value: _bytes(command, "cpu_bytes_to_use", "max_local_cpu_size", value),
    "cpu_bytes_to_use_per_rank": lambda command, value: _bytes(
        command, "cpu_bytes_to_use_per_rank", "max_local_cpu_size", value, command.ranks or 1
    ),
    "disk_capacity_bytes": lambda command, value: _bytes(command, "disk_capacity_bytes", "max_local_disk_size", value),
    "disk_path": lambda command, value: command.use_folder("disk_path", value),
    "shared_storage_path": lambda command, value: use_store(
        command, "shared_storage_path", lambda: (f"fs://host:0{value}", {})
    ),
    "block_size": lambda command, value: command.use("block_size", "chunk_size", value),
    "eviction_policy": lambda command, value: command.use("eviction_policy", "cache_policy", value),
    "offload_prompt_only": lambda command, value: command.use(
        "offload_prompt_only", "save_decode_cache", not value if isinstance(value, bool) else value
    ),
    "secondary_tiers": _secondary,
    "spec_name": _spec,
}
