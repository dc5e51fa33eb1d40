"""Translates a command line into one with lmkv: of LMCache's server, or of `vllm serve` with LMCache or offloading."""

from __future__ import annotations

import json
import logging
import math
import re
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from functools import partial
from itertools import pairwise
from operator import itemgetter
from pathlib import Path
from typing import Any, Final
from urllib.parse import urlencode

from attrs import define, field

from lmkv.config import addresses, lmcache
from lmkv.config.parsers import GIB, Kind, Reading
from lmkv.config.sources import flat, read_yaml
from lmkv.errors import ConfigError, short_repr

TRANSFER: Final = "--kv-transfer-config"
_SOURCE: Final = "command line"
_SHARED: Final = "/dev/shm/"
_OWN_MEMORY: Final = (
    "each engine takes max_local_cpu_size (5 GiB) in addition to the memory that all engines of a node share"
)

Setting = tuple[str, object, str]
Env = Mapping[str, str]


@define
class Command:
    """The command of an engine with lmkv, translated from another command line.

    `before`: the words before its options. `kept`: options that remain. `role`: the `kv_role` of its connector.
    `ranks`: the number of ranks of the engine.
    """

    before: list[str] = field(factory=lambda: ["vllm", "serve"])
    kept: list[str] = field(factory=list)
    role: str = "kv_both"
    ranks: int | None = None
    longest: int | None = None
    settings: list[Setting] = field(factory=list)
    readings: list[Reading] = field(factory=list)
    notes: list[tuple[int, str]] = field(factory=list)
    several: dict[str, Any] = field(factory=dict)
    """A MultiConnector with the connectors that remain, and None in the place of lmkv."""
    merged: bool = False
    """Whether lmkv replaces several connectors."""

    def use(self, given: str, name: str, value: object) -> None:
        self.settings.append((name, value, given))
        self._read(given, "used", here=name)

    def use_folder(self, given: str, folder: object, capacity: object = None) -> None:
        """Make the folder the disk tier. A second folder is refused."""
        if any(name == "local_disk" for name, _, _ in self.settings):
            self.refuse(
                given, "only one folder can be the disk tier: leave out this one, or write remote_url: file:///FOLDER"
            )
            return
        self.use(given, "local_disk", folder)
        if capacity is not None:
            self.use(given, "max_local_disk_size", capacity)

    def leave(self, given: str, why: str) -> None:
        self._read(given, "without effect", why=why)

    def refuse(self, given: str, why: str) -> None:
        self._read(given, "refused", why=why)

    def unknown(self, given: str, why: str) -> None:
        self._read(given, "unknown", why=why)

    def unused(self, group: str, name: str, value: object = True, given: str = "") -> None:
        """Note an option that is not a setting of lmkv. `given`: the option as the user wrote it, if not its name."""
        known, given = lmcache.commands()[group], given or name
        entry = known.get(name)
        if entry is None:
            self.unknown(given, lmcache.hint(name, known))
        elif entry.is_idle(value, {}):
            self.leave(given, entry.idle_because({}))
        else:
            self.refuse(given, entry.why)

    def leave_variables(self, env: Env, reader: str) -> None:
        """Note for each variable of LMCache that `reader` does not read it."""
        for name in env:
            key = lmcache.key_of(name)
            known = lmcache.table().get(key)
            idle = known is not None and known.kind == "without_effect"
            why = known.why if known is not None and idle else f"{reader} does not read this variable"
            self.readings.append(Reading(key, f"{lmcache.VARIABLE}{name}", "without effect", why=why))

    def _read(self, given: str, kind: Kind, *, here: str = "", why: str = "") -> None:
        self.readings.append(Reading(given, _SOURCE, kind, here, why))

    def take(self, translation: lmcache.Translation) -> None:
        """Add the settings of lmkv into which LMCache's settings were translated."""
        self.settings += translation.settings
        self.readings += translation.readings
        self.notes += translation.notes


def translated(words: Sequence[str], ranks: int | None = 1) -> Command:
    """Return the command with lmkv for another command. Raises ConfigError for a command that lmkv does not know.

    `ranks`: the number of ranks of the engine, if the options do not say it.
    """
    env, words = _variables(words)
    found = program(words)
    if found is None and any(word.startswith((TRANSFER, _SIZE)) for word in words):
        # A container's image or a script that passes vLLM's options on.
        found = False, 0
    if found is None:
        plain = [word for word in words if "=" not in word]
        name = " ".join(plain[: 2 + ("-m" in plain[:2])])
        if re.search(r"(^|[/ ])\w*lmcache", name):
            raise ConfigError(f"{short_repr(name)} starts a process that lmkv does not need: {_NOT_NEEDED}")
        what = "starts neither of these" if len(words) > 1 else "is not a command"
        raise ConfigError(f"{_GIVE}; {short_repr(name)} {what}")
    server, at = found
    strange = lmcache.misspelled(word.partition("=")[0].removeprefix("-e") for word in words[:at] if "=" in word)
    doubts = [(logging.WARNING, doubt) for doubt in strange]
    if server:
        command = _of_server(_flags(words[at:]), env)
        command.notes += doubts
        return command
    command = _of_vllm(words[at:], env, ranks)
    command.before, command.notes = list(words[:at]), command.notes + doubts
    if any(map(_IMAGE.fullmatch, words[:at])) or words[0] in _CONTAINERS:
        command.notes.append((logging.INFO, "the image must contain lmkv: see Containerfile"))
    return command


_GIVE: Final = "lmkv is a connector of vLLM: give `lmcache server ...` or `vllm serve ...`"
_NOT_NEEDED: Final = "leave out that process; servers share KV in a store, such as remote_url: redis://HOST:PORT"
_SERVERS: Final = ("lmcache.v1.multiprocess.server", "lmcache.v1.multiprocess.http_server")
_PROGRAMS: Final = ("vllm", "vllm.entrypoints.cli.main")
_ENGINES: Final = ("vllm.entrypoints.openai.api_server", "dynamo.vllm", "huggingfaceserver")
_CONTAINERS: Final = ("docker", "podman", "nerdctl", "apptainer", "singularity")
_IMAGE: Final = re.compile(r"[\w./-]*/vllm-openai[\w.-]*([:@].*)?")


def program(words: Sequence[str]) -> tuple[bool, int] | None:
    """Return `(whether LMCache's server is started, index of the first option)`, or None for another program."""
    for at, (word, following) in enumerate(pairwise([*words, ""])):
        name = word.rpartition("/")[2]
        if (name, following) == ("lmcache", "server") or (word == "-m" and following in _SERVERS):
            return True, at + 2
        if (name in _PROGRAMS and following == "serve") or (word == "-m" and following in _ENGINES):
            return False, at + 2
    return next(((False, at + 1) for at, word in enumerate(words) if _IMAGE.fullmatch(word)), None)


def _variables(words: Sequence[str]) -> tuple[dict[str, str], list[str]]:
    """Return the variables of LMCache before a program, which a shell or `docker run -e` sets, and all other words."""
    env: dict[str, str] = {}
    others: list[str] = []
    for word in words:
        found = re.fullmatch(r"(?:-e|--env=)?(LMCACHE_\w+|MOONCAKE_CONFIG_PATH)=(.*)", word, re.DOTALL)
        if found is None:
            others.append(word)
            continue
        env[found[1]] = found[2]
        if others and others[-1] in ("-e", "--env"):
            others.pop()
    return env, others


def _flags(words: Sequence[str]) -> list[tuple[str, str]]:
    """Return the flags and their values, with "" for flags without a value."""
    found, at = [], 0
    while at < len(words):
        name, equals, value = words[at].partition("=")
        at += 1
        if not equals and at < len(words) and not words[at].startswith("--"):
            value, at = words[at], at + 1
        found.append((name, value))
    return found


# -- LMCache's server -------------------------------------------------------------------------------------


def _of_server(flags: list[tuple[str, str]], env: Env) -> Command:
    command = Command()
    folder = _SHARED + (next((value for name, value in flags if name == "--shm-name"), "").strip("/") or "lmkv")
    for name, value in flags:
        if name == "--l1-size-gb":
            command.use(name, "max_shared_memory_size", value)
            command.use(name, "shared_memory", folder)
            command.notes.append((logging.INFO, _OWN_MEMORY))
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


def _use_adapter(command: Command, text: str, env: Env) -> None:
    """Translate a lower tier of LMCache's server, given as JSON."""
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
        _use_store(command, given, lambda: (_ADAPTERS[kind](adapter, env), _joined(kind, adapter, env)))
        if "max_capacity_gb" in adapter:
            command.leave(f"{given}: max_capacity_gb", "a remote store evicts by itself")
    _use_rest(command, given, adapter)


def _use_rest(command: Command, given: str, tier: Mapping[str, Any]) -> None:
    """Translate the prefix of a tier, and note its keys that are no settings here, so that none is dropped silently."""
    if tier.get("prefix"):
        command.use(f"{given}: prefix", "remote_prefix", tier["prefix"])
    known = lmcache.commands()["tiers"]
    for key in sorted(tier.keys() - addresses.ALL_KEYS):
        if key not in known or known[key].kind in ("refused", "without_effect"):
            command.unused("tiers", key, tier[key], f"{given}: {key}")


def _use_store(command: Command, given: str, described: Callable[[], tuple[str, Mapping[str, Any]]]) -> None:
    """Translate a remote store, given by its address in LMCache's form and the keys that belong to it."""
    try:
        found = addresses.translated(*described())
    except addresses.RefusedError as error:
        command.refuse(given, str(error))
        return
    except KeyError as error:
        command.refuse(given, f"the key {error} is missing")
        return
    before = {name: value for name, value, _ in command.settings if name in (*found, *_LOGIN)}
    if before and len(before | found) > 1:
        command.refuse(
            given, "several stores need logins in remote_url, such as redis://USER:PASSWORD@HOST,s3://BUCKET"
        )
        return
    if before:
        urls = before["remote_url"]
        command.settings = [each for each in command.settings if each[0] != "remote_url"]
        found["remote_url"] = [*(urls if isinstance(urls, list) else [urls]), found["remote_url"]]
    command.settings += [(name, value, given) for name, value in found.items()]
    command.readings.append(Reading(given, _SOURCE, "used", "remote_url"))


_LOGIN: Final = ("remote_username", "remote_password", "remote_ttl")
_RENAMED: Final = {"master_server_addr": "master_server_address", "rdma_devices": "device_name", "key_prefix": "prefix"}
"""For keys of an adapter, the names that other sources of LMCache use."""


def _joined(kind: str, adapter: Mapping[str, Any], env: Env) -> dict[str, Any]:
    """Return the keys of an adapter in the form of `extra_config`."""
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


# -- vllm serve -------------------------------------------------------------------------------------------


def _of_vllm(words: Sequence[str], env: Env, ranks: int | None) -> Command:
    command = Command(ranks=ranks)
    options, command.kept = _options(_with_file(command, words))
    given = dict(options)
    longest = given.get("--max-model-len", "")
    command.longest = int(longest) if longest.isdecimal() else None
    counts = {kind: given[name] for name, kind in _RANKS.items() if name in given}
    if unclear := [count for count in counts.values() if not count.isdecimal()]:
        told = f"a number of ranks is {short_repr(unclear[0])}: write the number instead"
        command.notes.append((logging.WARNING, f"lmkv does not multiply each rank's sizes, because {told}"))
    elif counts:
        command.ranks = math.prod(map(int, counts.values()))
    for name, value in options:
        if name in ("--kv-offloading-backend", "--connector"):
            command.unused("offloading", name, value)
    size = given.get(_SIZE)
    if size is not None and given.get("--kv-offloading-backend") != "lmcache":
        command.leave_variables(env, "vLLM's own offloading")
        env = {}
    try:
        _use_transfer(command, _transfer(options), env)
    except ValueError as error:
        command.refuse(TRANSFER, str(error))
    bare = size is None and not any(name.startswith(TRANSFER) for name, _ in options)
    if bare and any(name in ("--is-prefill-worker", "--is-decode-worker", "--disaggregation-mode") for name in given):
        told = (
            "Dynamo loads KV from the prefill worker with NixlConnector: put it and LMKVConnector in a MultiConnector"
        )
        command.notes.append((logging.WARNING, told))
    elif bare:
        told = "the command has no KV offloading: lmkv is added, by default with 5 GiB of host memory"
        command.notes.append((logging.INFO, told))
    if size is not None and any("LMKVConnector" in value for name, value in options if name.startswith(TRANSFER)):
        told = "with --kv-offloading-size vLLM uses its own connector instead of LMKVConnector: remove this option"
        command.notes.append((logging.WARNING, told))
    if size is not None:
        # Last, because it replaces the connector's own size in vLLM, too.
        command.use(_SIZE, "max_local_cpu_size", size)
    return command


def _with_file(command: Command, words: Sequence[str]) -> Sequence[str]:
    """Return the words with the options of the file that `--config` names before all others."""
    at = next((at for at, word in enumerate(words) if word == "--config"), len(words))
    if at + 1 >= len(words):
        return words
    try:
        return [*_as_words(read_yaml(Path(words[at + 1]))), *words[:at], *words[at + 2 :]]
    except ConfigError as error:
        command.notes.append((logging.WARNING, f"the file of --config cannot be read: {error}"))
        return words


def connector_of(words: Sequence[str]) -> dict[str, Any]:
    """Return the `kv_transfer_config` of a command line of vLLM. Raises ValueError if it is invalid."""
    return _transfer(_options(words)[0])


def _options(words: Sequence[str]) -> tuple[list[tuple[str, str]], list[str]]:
    """Return the options about offloading with their values, under vLLM's names, and all other words."""
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
    """Return the `kv_transfer_config` as vLLM reads it: the last JSON counts, and dotted arguments replace all JSON."""
    found: dict[str, Any] = {}
    dotted: dict[str, Any] = {}
    # vLLM then chooses the connector.
    sized = any(name == _SIZE for name, _ in options)
    for name, value in options:
        if name == TRANSFER:
            try:
                given = json.loads(value)
            except (ValueError, RecursionError) as error:
                raise ValueError(f"the value is not JSON: {error}") from None
            if not isinstance(given, dict) or not (sized or isinstance(given.get("kv_connector"), str)):
                raise ValueError("the value is not a JSON object with a kv_connector")
            found = given
        elif name.startswith(f"{TRANSFER}."):
            more: Any = value.split(",") if name.endswith("+") else _dotted_value(value)
            for key in reversed(name.removesuffix("+").split(".")[1:]):
                more = {key: more}
            _update(dotted, more)
    return dotted or found


_SIZE: Final = "--kv-offloading-size"
_RANKS: Final = {
    **dict.fromkeys(("--tensor-parallel-size", "-tp"), "tensor"),
    **dict.fromkeys(("--pipeline-parallel-size", "-pp"), "pipeline"),
}


_MULTIPLES: Final = {
    sign: base**power for base, signs in ((1000, "kmgt"), (1024, "KMGT")) for power, sign in enumerate(signs, 1)
}


def _dotted_value(text: str) -> Any:
    """Return the value of a dotted argument: from JSON, from a number such as 8 or 64k, or the text itself."""
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
            told = "which may be unable to combine these connectors: lmkv writes vLLM's MultiConnector instead"
            command.notes.append((logging.WARNING, f"{TRANSFER} names {short_repr(connector)}, {told}"))
            transfer = {key: value for key, value in transfer.items() if key != "kv_connector_module_path"}
        _use_several(command, {**transfer, "kv_connector": "MultiConnector"}, connectors, env)
        return
    command.role = transfer.get("kv_role") or "kv_both"
    if connector not in (None, *_CONNECTORS):
        close = lmcache.nearest(connector, ("LMKVConnector",), 0.85)
        command.refuse(f"{TRANSFER} {connector}", f"did you mean {close}?" if close else _OTHER)
        return
    if transfer.get("kv_load_failure_policy", "recompute") != "recompute":
        why = f"lmkv writes recompute, not {short_repr(transfer['kv_load_failure_policy'])}: vLLM computes KV"
        command.notes.append((logging.INFO, f"kv_load_failure_policy: {why} that cannot be loaded"))
    if "kv_connector_module_path" in transfer:
        command.leave("kv_connector_module_path", "vLLM finds LMKVConnector by its name")
    for key in sorted(transfer.keys() - _READ_KEYS):
        if key.startswith(("kv_", "enable_")) or key == "engine_id":
            command.leave(key, "lmkv does not read this key")
        else:
            command.refuse(key, "vLLM knows no such key: write the key inside kv_connector_extra_config")
    if connector == "LMCacheMPConnector":
        command.refuse(f"{TRANSFER} {connector}", lmcache.table()["mp.host"].why)
    if connector == "LMKVConnector" and not all(map(lmcache.owns, items)):
        _keep_own(command, items)
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


def _keep_own(command: Command, items: Mapping[Any, object]) -> None:
    """Keep settings of lmkv. If there are any, LMCache's settings are not read."""
    for key, value in items.items():
        name = str(key).removeprefix("lmkv.")
        if lmcache.owns(key):
            command.leave(name, "lmkv reads no settings of LMCache, because lmkv's own settings are given")
        else:
            command.settings.append((name, value, lmcache.EXTRA))
            command.readings.append(Reading(name, lmcache.EXTRA, "used", name))


def _use_several(command: Command, transfer: Mapping[str, Any], connectors: list[object], env: Env) -> None:
    """Translate a MultiConnector: lmkv replaces some connectors together, and the others remain."""
    given = [each for each in connectors if isinstance(each, Mapping)]
    ours = [each for each in given if each.get("kv_connector") in _CONNECTORS]
    if not ours:
        command.refuse(f"{TRANSFER} MultiConnector", f"{_OTHER}; a MultiConnector may have it beside others")
        return
    command.merged = len(ours) > 1
    if all(each["kv_connector"] in _VLLMS for each in ours):
        command.leave_variables(env, "vLLM's own offloading")
    for each in ours:
        _use_transfer(command, each, env if each["kv_connector"] not in _VLLMS else {})
    _agree_with_nixl(command, given, [each["kv_connector"] for each in ours])
    kept = [None if each is ours[0] else each for each in given if each is ours[0] or each not in ours]
    command.several = {**transfer, "kv_connector_extra_config": {"connectors": kept}} if len(kept) > 1 else {}


def _agree_with_nixl(command: Command, given: Sequence[Mapping[Any, Any]], ours: Sequence[str]) -> None:
    """Write `block_major: false` where NIXL is in the same MultiConnector: on CUDA it refuses the other layout."""
    nixl = any("Nixl" in str(each.get("kv_connector")) for each in given)
    if nixl and not any(name == "block_major" for name, _, _ in command.settings):
        command.settings.append(("block_major", False, "NixlConnector"))
        level = logging.WARNING if "LMKVConnector" in ours else logging.INFO
        command.notes.append((level, "block_major: false is needed, because NixlConnector refuses the other layout"))


_READ_KEYS: Final = {
    *("kv_connector", "kv_role", "kv_connector_extra_config", "kv_connector_module_path", "kv_load_failure_policy")
}
_VLLMS: Final = ("OffloadingConnector", "SimpleCPUOffloadConnector")
_CONNECTORS: Final = (
    *("LMCacheConnectorV1", "LMCacheMPConnector", *_VLLMS),
    *("LMCacheConnectorV1Dynamic", "LMKVConnector", "LMCacheConnector"),
)
_OTHER: Final = (
    "lmkv cannot translate this connector: write LMKVConnector in its place, with max_local_cpu_size (GiB), or with "
    "local_disk and max_local_disk_size (GiB)"
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
    """Translate vLLM's tiers below host memory."""
    for each in tiers if isinstance(tiers, list) else [tiers]:
        tier: Mapping[str, Any] = each if isinstance(each, Mapping) else {}
        given = f"secondary_tiers: {tier.get('type')}"
        if tier.get("type") == "obj":
            store = inner if isinstance(inner := tier.get("store_config"), Mapping) else tier
            _use_store(command, given, partial(_object_store, store))
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
        _use_rest(command, given, tier)


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
    "shared_storage_path": lambda command, value: _use_store(
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


# -- files that stand for a command line ------------------------------------------------------------------


def of_file(content: Mapping[Any, object]) -> list[str] | None:
    """Return the command line that a file describes: a connector's JSON, or the file of `vllm serve --config`.

    Raises ConfigError for a file that starts servers, such as a manifest of Kubernetes.
    """
    for keys, kind in _MANIFESTS.items():
        if keys <= content.keys():
            raise ConfigError(f"lmkv reads no settings from a file {kind}: {GIVE_COMMAND}")
    if "kv_connector" in content:
        return ["vllm", "serve", "MODEL", TRANSFER, json.dumps(content)]
    if not {str(key).replace("_", "-") for key in content} & {TRANSFER[2:], "kv-offloading-size"}:
        return None
    return ["vllm", "serve", *_as_words(content)]


def _as_words(content: Mapping[Any, object]) -> list[str]:
    """Return the options of `vllm serve --config FILE` on a command line."""
    words: list[str] = []
    for key, value in content.items():
        name = str(key).replace("_", "-")
        if isinstance(value, bool):
            words.append(f"--{name}" if value else f"--no-{name}")
        else:
            several = value if isinstance(value, list) else [value]
            words += [f"--{name}", *(each if isinstance(each, str) else json.dumps(typed(each)) for each in several)]
    return words


def typed(value: object) -> object:
    """Return a value with numbers, which `read_yaml` leaves as text."""
    if isinstance(value, dict):
        return {key: typed(each) for key, each in value.items()}
    if isinstance(value, list):
        return list(map(typed, value))
    if isinstance(value, str) and re.fullmatch(r"-?(0|[1-9][0-9]{0,15})(\.[0-9]{1,15})?", value):
        return json.loads(value)
    return value


_MANIFESTS: Final = {
    frozenset({"apiVersion", "kind"}): "of Kubernetes",
    frozenset({"services"}): "of Docker Compose",
    frozenset({"image"}): "of a container",
    frozenset({"containers"}): "of containers",
    frozenset({"env"}): "of a container's variables",
    frozenset({"servingEngineSpec"}): "of values for a Helm chart",
    frozenset({"applications"}): "of Ray Serve",
}
GIVE_COMMAND: Final = (
    "give the container's variables and command, as lmkv config migrate -- LMCACHE_CHUNK_SIZE=256 vllm serve ..., or "
    "write the settings into a separate file"
)
