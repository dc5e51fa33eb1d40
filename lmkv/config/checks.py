"""Checks of several settings together: contradictions, which `Config` refuses, and warnings, which lmkv logs."""

from __future__ import annotations

import logging
from collections.abc import Iterable, Iterator, Mapping
from typing import Final
from urllib.parse import unquote, urlsplit

from lmkv.config import lmcache
from lmkv.config.advice import unfit_key
from lmkv.config.command import Command
from lmkv.config.options import OPTIONS, Options
from lmkv.config.parsers import are_nested
from lmkv.config.sources import ENV_FILE, ENV_LEVEL, ENV_PREFIX
from lmkv.errors import short_repr

_ONLY_WITH: Final = {
    "local_disk": ("local_disk", "disk_sync", "disk_min_free", "disk_direct", "disk_write", "disk_admission"),
    "agent_listen": ("agent_listen", "agent_token", "agent_token_file"),
    "remotes": (
        *("remote_url", "remote_username", "remote_password", "remote_password_file", "remote_prefix", "remote_ttl"),
        "remote_timeout",
    ),
}
"""For each attribute of `Config`, the setting of this attribute and the settings that have an effect only with it."""
_LONG: Final = {"remote_timeout": 60, "prefetch_deadline": 600, "remote_ttl": 31_536_000, "pin_ttl": 86_400}
"""For some settings in seconds, the number above which a value is probably in milliseconds."""
_KEEPS_NOTHING: Final = (
    "no tier keeps chunks, so no prompt will hit: set local_cpu: true, shared_memory, remote_url, or a local_disk that "
    "admits chunks"
)


def contradictions(options: Options) -> Iterator[str]:
    """Yield a text for each contradiction between the values of settings."""
    yield from _of_folder(options, "shared_memory", "max_shared_memory_size")
    yield from _of_folder(options, "local_disk", "max_local_disk_size")
    if options.shared_memory and options.local_disk and are_nested(options.shared_memory, options.local_disk):
        other = f"shared_memory = {short_repr(options.shared_memory)}"
        reason = "are one folder, or nested: each would delete the other's chunks; name two separate folders"
        yield options.about("local_disk", f"and {other} {reason}")
    for url in (url for url in options.remotes if url.scheme == "file" and options.local_disk):
        if options.local_disk and are_nested(options.local_disk, unquote(urlsplit(url.text).path)):
            reason = f"and remote_url = {url} are one folder, or nested: name two separate folders"
            yield options.about("local_disk", reason)
    for name in ("remote_password", "agent_token", "authentication_key"):
        if getattr(options, name) and getattr(options, f"{name}_file"):
            yield options.about(f"{name}_file", f"and {name} are both given: keep one")
    if len({*options.remotes}) < len(options.remotes):
        name = "remote_url" if options.remote_url else "remote_urls"
        yield options.about(name, "names one store twice: leave out one of the two")
    if options.authentication_key and (unfit := unfit_key(options.authentication_key.value.encode())):
        yield options.about("authentication_key", unfit)
    open_to_all = options.agent_listen and not options.agent_listen.startswith("unix:")
    if open_to_all and not (options.agent_token or options.agent_token_file):
        told = "needs agent_token or agent_token_file, because anyone who can connect can clear the cache"
        yield options.about("agent_listen", told)


def _of_folder(options: Options, folder: str, capacity: str) -> Iterator[str]:
    """Yield an error text if a folder is set without a capacity, or a capacity without a folder."""
    given, size = getattr(options, folder), getattr(options, capacity)
    if given is not None and size == 0:
        yield f"{options.source(folder)}: {folder} needs {capacity} (GiB), for example {capacity}: 100"
    if given is None and size > 0:
        yield f"{options.source(capacity)}: {capacity} needs {folder}, the folder to use"


def warnings(options: Options, given: Iterable[str]) -> Iterator[str]:
    """Yield a warning for each setting that has no effect or probably a wrong value. `given`: names of the settings
    that are set.
    """
    if options.keeps_nothing:
        yield _KEEPS_NOTHING
    if 0 < sum(each.percent for each in options.quotas) <= 1:
        told = "add up to 1 percent or less: if these are shares of 1, multiply each by 100"
        yield f"{options.source('quotas')}: quotas {told}"
    for url in (url for url in options.remotes if url.warning):
        yield f"{options.source('remote_url')}: remote_url = {url} {url.warning}"
    if options.disk_write == "back" and options.local_disk and not options.local_cpu:
        told = "works like through, because local_cpu is off and no chunk stays in host memory"
        yield options.about("disk_write", told)
    if options.audit_rate == 1:
        told = "audits every hit, and vLLM computes half of these hits again: write 0.01 to audit one in 100"
        yield options.about("audit_rate", told)
    for name, most in _LONG.items():
        if getattr(options, name) > most:
            yield options.about(name, "is in seconds: divide milliseconds by 1000")
    for needed, names in _ONLY_WITH.items():
        if not getattr(options, needed):
            for name in [each for each in given if each in names[1:]]:
                yield f"{options.source(name)}: {name} has no effect without {names[0]}"


def server_warnings(options: Options, role: str, longest: int | None) -> Iterator[str]:
    """Yield the reasons why a server with the `kv_role` `role` will have no hits.

    `longest`: number of tokens of the server's longest request.
    """
    if role != "kv_both" and not (options.shared_memory or options.local_disk or options.remotes):
        idle = {
            "kv_consumer": "stores nothing, and no other server can store into this server's host memory",
            "kv_producer": "loads nothing, and no other server can load from this server's host memory",
        }
        if role in idle:
            yield f"kv_role {role} {idle[role]}: write kv_both, or add shared_memory, local_disk or remote_url"
    if role == "kv_producer" and options.disk_write == "back" and options.local_disk and not options.remotes:
        yield options.about("disk_write", "hides chunks from other servers until eviction: set disk_write to through")
    if longest is None:
        return
    least = options.disk_admission.partition("min_tokens:")[2]
    limits = {
        "chunk_size": (0 if options.save_unfull_chunk else options.chunk_size, "no chunk is ever full"),
        "disk_admission": (int(least) if least.isdecimal() else 0, "the disk tier stores nothing"),
        "min_retrieve_tokens": (options.min_retrieve_tokens, "lmkv loads nothing"),
    }
    for name, (tokens, effect) in limits.items():
        if tokens > longest:
            yield options.about(name, f"is longer than any request ({longest} tokens), so {effect}: lower the number")


def name_warnings(env: Mapping[str, str]) -> Iterator[str]:
    """Yield a remark for each variable that looks like lmkv's but is not read, or that has an invalid value."""
    for name in sorted(env):
        big = name.upper()
        prefix, _, setting = big.partition("_")
        is_option = setting.lower() in OPTIONS and lmcache.nearest(prefix, ("LMKV",))
        right = f"{ENV_PREFIX}{setting}" if is_option else big if big == ENV_FILE else name
        if name != right:
            yield f"environment {name} is not read: write {right}"
    if (level := env.get(ENV_LEVEL, "")) and level.upper() not in logging.getLevelNamesMapping():
        levels = "DEBUG, INFO, WARNING or ERROR"
        yield f"environment {ENV_LEVEL}: {short_repr(level)} is not a log level, and has no effect: write {levels}"


def command_warnings(options: Options, command: Command) -> Iterator[str]:
    """Yield the reasons why these settings do not fit vLLM's options in a command."""
    yield from server_warnings(options, command.role, command.number("--max-model-len"))
    port, first = command.number("--port", default=8000), (options.agent_listen or "").rpartition(":")[2]
    engines = command.number("--data-parallel-size", "-dp", default=1) or 1
    if first.isdecimal() and port in range(int(first), int(first) + engines):
        yield f"agent_listen {options.agent_listen}: vLLM's server uses port {port}: name another port"
    stages = command.number("--pipeline-parallel-size", "-pp", default=1)
    if options.use_layerwise and (stages != 1 or command.options.keys() & {"--enable-dbo", "--ubatch-size"}):
        told = "has no effect with --pipeline-parallel-size, --enable-dbo or --ubatch-size: leave out use_layerwise"
        yield options.about("use_layerwise", told)
