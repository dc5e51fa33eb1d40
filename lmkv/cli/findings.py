"""The checks of `lmkv doctor`: configuration, this machine, disks, remote stores and vLLM. Each check yields
findings.
"""

from __future__ import annotations

import logging
import os
import platform
import resource
import socket
import stat
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping
from contextlib import suppress
from errno import EADDRINUSE
from importlib.metadata import PackageNotFoundError, entry_points, version
from importlib.util import find_spec
from pathlib import Path
from socket import AF_INET, AF_INET6
from urllib.parse import unquote, urlsplit

from attrs import frozen

from lmkv import __version__, plugins
from lmkv.chunks import codec
from lmkv.chunks.layout import ALIGNMENT
from lmkv.chunks.namespace import Authenticator
from lmkv.cli.config import odd_folder, read_settings
from lmkv.cli.sizing import KVSize
from lmkv.cli.stores import VERBS, likeliest, odd_policy, refusals, remedy, try_folder
from lmkv.config import GIB, Config, SettingsResult
from lmkv.errors import ConfigError, LmkvError, how_to_install
from lmkv.memory import machine
from lmkv.policies import make_admission, make_policy
from lmkv.vllm import compat, plugin

IMPORT_TIMEOUT = 300.0
SERVERS_TIMEOUT = 10.0
PROCESSES = Path("/proc")
BLOCK, LARGE = 16, 4096
"""Number of tokens of a block of vLLM, and number of tokens of the largest chunk that different prompts often share."""
SMALL = 64 << 20
"""Size of a tier in bytes below which the user probably meant another unit than GiB."""


@frozen
class Finding:
    """One fact that `lmkv doctor` reports.

    `problem`: why something will not work, with the remedy. `warning`: how the server will differ from its settings.
    """

    area: str
    name: str
    value: str
    note: str = ""
    problem: str = ""
    warning: str = ""
    refused: bool = False
    """Whether the server refuses to start because of `problem`."""

    @property
    def level(self) -> str:
        return "error" if self.problem else "warning" if self.warning else "ok"


def examine(
    env: Mapping[str, str],
    extra: Mapping[str, object],
    size: KVSize | None = None,
    ranks: int | None = None,
    file: Path | None = None,
) -> Iterator[Finding]:
    try:
        answer = read_settings(file, env, extra, ranks)
    except ConfigError as error:
        config, problems = None, [str(error)]
    else:
        config, problems = answer.config, list(answer.problems)
        yield from examine_readings(answer)
    for problem in problems:
        yield Finding("configuration", "refused", problem, problem=problem, refused=True)
    if config is not None:
        yield from examine_configuration(config)
        secrets = list(examine_secrets(config))
        yield from secrets
        yield from examine_secret_files(config)
        yield from examine_extras(config)
        yield from examine_agent(config)
        yield from examine_memory(config)
        yield from examine_shared_memory(config)
        yield from examine_disk(config)
        if not any(found.problem for found in secrets):
            yield from examine_stores(config)
        if size:
            yield from examine_model(size)
            yield from examine_room(size, config)
    yield from examine_plugins()
    yield from examine_versions()
    yield from examine_device()
    yield from examine_vllm(env)


def examine_readings(answer: SettingsResult) -> Iterator[Finding]:
    """Report settings without effect, unknown settings, and other remarks."""
    for each in answer.readings:
        if each.kind not in ("used", "refused"):
            note = ": ".join(filter(None, [each.source, each.why]))
            warning = str(each) if each.kind == "unknown" else ""
            yield Finding("configuration", each.key, each.kind, note=note, warning=warning)
    for level, remark in answer.notes:
        yield Finding("configuration", "remark", remark, warning=remark if level >= logging.WARNING else "")


def examine_configuration(config: Config) -> Iterator[Finding]:
    """Report every setting with its value, and where the value comes from."""
    for setting in config.describe():
        warning = odd_chunks(config.chunk_size) if setting.name == "chunk_size" else ""
        yield Finding("configuration", setting.name, str(setting), note=setting.source, warning=warning)


def odd_chunks(tokens: int) -> str:
    """Return a warning if a chunk size in tokens is probably a mistake, else ""."""
    if tokens % BLOCK:
        size = f"vLLM's block size, {BLOCK} unless --block-size is set"
        return f"chunk_size {tokens} is not a multiple of {size}: lmkv rounds chunk_size up"
    if tokens > LARGE:
        return f"chunk_size {tokens} is large: lmkv reuses whole chunks only, so prompts must share {tokens} tokens"
    return ""


def examine_secrets(config: Config) -> Iterator[Finding]:
    """Report whether secret files can be read, and the identifier of the authentication key."""
    for name in ("password", "token"):
        try:
            getattr(config, name)
        except ConfigError as error:
            yield Finding("secrets", name, "none", problem=str(error), refused=True)
    try:
        key = config.authentication_bytes
    except ConfigError as error:
        yield Finding("secrets", "authentication key", "none", problem=str(error), refused=True)
    else:
        if key is not None:
            name = Authenticator(key).identifier
            yield Finding("secrets", "authentication key", f"{name[:12]}...", note="its public identifier")


def examine_secret_files(config: Config) -> Iterator[Finding]:
    """Warn about files with secrets that everybody on this machine can read."""
    for name in ("remote_password_file", "agent_token_file", "authentication_key_file"):
        file = getattr(config, name)
        with suppress(OSError):
            if file and os.stat(file).st_mode & stat.S_IROTH:
                warning = f"{name} {file}: every user of this machine can read the file: run chmod o-r {file}"
                yield Finding("secrets", name, file, warning=warning)


EXTRAS = {
    "agent_listen": ("agent", ("fastapi", "uvicorn")),
    "authentication_key": ("auth", ("cryptography",)),
    "authentication_key_file": ("auth", ("cryptography",)),
}
"""For each setting that needs an extra, the extra and its modules. Modules of remote stores are tested when the
stores are opened.
"""


def examine_extras(config: Config) -> Iterator[Finding]:
    """Report whether the packages that the settings need are installed."""
    for name, (extra, modules) in EXTRAS.items():
        missing = [module for module in modules if getattr(config, name) and find_spec(module) is None]
        if missing:
            problem = f"{name} needs {' and '.join(missing)}: {how_to_install(extra)}"
            yield Finding("extras", extra, "not installed", problem=problem, refused=True)
    for name, make in (("cache_policy", make_policy), ("disk_admission", make_admission)):
        try:
            make(getattr(config, name))
        except ConfigError as error:
            yield Finding("extras", name, "not found", problem=str(error), refused=True)


def examine_agent(config: Config) -> Iterator[Finding]:
    """Report whether the server can listen at the address of the agent API."""
    address = config.agent_listen
    if address is None:
        return
    try:
        if address.startswith("unix:"):
            folder = os.path.dirname(address.removeprefix("unix:"))
            if not os.access(folder, os.W_OK | os.X_OK):
                raise OSError(0, f"this user cannot write to folder {folder}: make that folder or name another")
        else:
            host, _, port = address.rpartition(":")
            socket.create_server((host.strip("[]"), int(port)), family=AF_INET6 if "[" in host else AF_INET).close()
    except OSError as error:
        used = error.errno == EADDRINUSE
        why = (
            "another process listens at this address: end that process or name another port"
            if used
            else str(error.strerror).lower()
        )
        told = f"agent_listen {address}: {why}"
        # A server that runs with this configuration is no error.
        yield Finding("agent", "address", address, problem="" if used else told, warning=told if used else "")
    else:
        yield Finding("agent", "address", address, note="the server can use this address")


def examine_memory(config: Config) -> Iterator[Finding]:
    """Report the available memory of this machine, and the size of lmkv's tier of host memory."""
    yield Finding("memory", "available", gibibytes(machine.available_ram()))
    limit = machine.memory_limit()
    yield Finding("memory", "control group's limit", "none" if limit is None else gibibytes(limit))
    wanted = config.max_local_cpu_bytes
    try:
        given = machine.clamp_capacity(wanted, ALIGNMENT)
    except ConfigError as error:
        yield Finding("memory", "host memory", "none", problem=str(error))
        return
    cut = given // ALIGNMENT < wanted // ALIGNMENT
    note = f"cut from {gibibytes(wanted)}" if cut else "as configured"
    yield Finding(
        "memory", "host memory", gibibytes(given), note, warning=cut_down("max_local_cpu_size", wanted, given)
    )


def cut_down(setting: str, wanted: int, given: int) -> str:
    """Return a warning if a size exceeds the free space or probably has the wrong unit, else "".

    `wanted`: the size in the setting, in bytes. `given`: the size that lmkv would use, in bytes.
    """
    if wanted < SMALL:
        return (
            f"{setting} is {wanted / (1 << 20):.3g} MiB, less than some chunks of a large model: the setting is in GiB"
        )
    if given // ALIGNMENT >= wanted // ALIGNMENT:
        return ""
    used = gibibytes(given)
    return f"{setting} is {gibibytes(wanted)}, but only {used} are free: lmkv will use {used}; lower this size, in GiB"


def examine_shared_memory(config: Config) -> Iterator[Finding]:
    """Test the folder of shared memory: write and read a chunk. Report on which medium the folder is."""
    folder = config.shared_memory
    if folder is None:
        return
    try:
        tried = try_folder(folder, "off").tried
        machine.check_in_memory(tried)
        kind, wanted = machine.file_system_of(tried), config.max_shared_memory_bytes
        used = sum(path.stat().st_size for path in Path(folder).rglob("*.kv1"))
        given = machine.clamp_shared_memory(tried, wanted, used)
    except (LmkvError, OSError) as error:
        yield Finding("memory", "shared memory", "none", problem=unusable("shared_memory", folder, error))
        return
    note = f"of {gibibytes(wanted)} in {folder}, on {kind or 'an unknown file system'}"
    warning = cut_down("max_shared_memory_size", wanted, given)
    if warning and given < wanted:
        warning += (
            "; enlarge the folder: --shm-size or --ipc=host of docker, emptyDir with medium: Memory of Kubernetes"
        )
    if kind not in machine.IN_MEMORY:
        warning = (
            f"shared_memory {folder} is on {kind or 'an unknown file system'}, not in memory: name a folder in /dev/shm"
        )
    yield Finding("memory", "shared memory", gibibytes(given), note=note, warning=warning)


def unusable(setting: str, folder: str, error: Exception) -> str:
    """Return a text about an error that the folder of a setting causes, with the remedy."""
    if not isinstance(error, OSError):
        return f"{setting} {folder}: {error}"
    return f"{setting} {folder}: {error.strerror or error}: name a folder that the server's user can write to"


def examine_disk(config: Config) -> Iterator[Finding]:
    """Test the folder of the disk tier: write and read a chunk."""
    if config.local_disk is None:
        yield Finding("disk", "folder", "none", note="no disk tier is configured")
        return
    try:
        facts = try_folder(config.local_disk, config.disk_direct)
    except (LmkvError, OSError) as error:
        yield Finding("disk", "folder", config.local_disk, problem=unusable("local_disk", config.local_disk, error))
        return
    made = "" if facts.tried == config.local_disk else f"does not exist yet; lmkv tried {facts.tried}"
    yield Finding("disk", "folder", config.local_disk, note=made, warning=odd_folder("local_disk", config.local_disk))
    way = "O_DIRECT" if facts.direct_io else "through the page cache"
    yield Finding("disk", "reads and writes", way, note=f"disk_direct = {config.disk_direct}")
    room, wanted = facts.free_bytes - config.disk_min_free_bytes, config.max_local_disk_bytes
    kept = f"{gibibytes(facts.free_bytes)} are free, and disk_min_free keeps {gibibytes(config.disk_min_free_bytes)}"
    problem = f"local_disk {config.local_disk}: {kept}, so lmkv will store no chunk: lower disk_min_free, or free space"
    enough = "" if room >= wanted else "less than max_local_disk_size and disk_min_free together"
    warning = cut_down("max_local_disk_size", wanted, max(0, room))
    free = gibibytes(facts.free_bytes)
    yield Finding("disk", "free", free, note=enough, problem="" if room > 0 else problem, warning=warning)


def examine_stores(config: Config) -> Iterator[Finding]:
    """Test each remote store: write, read and delete a chunk. Report which of these calls the store refuses."""
    for url in config.remotes:
        name, wanted = url.store_kind, f"remote_url {url}"
        # Before the folder is made to try it.
        odd = odd_folder("remote_url", unquote(urlsplit(url.text).path)) if url.scheme == "file" else ""
        try:
            refused = refusals(config, url)
        except ConfigError as error:
            yield Finding("remote stores", name, str(url), problem=f"remote_url {error}", refused=True)
            continue
        works = ", ".join(verb for verb in VERBS if verb not in refused)
        # A server without TLS does not answer it.
        plain = ", or redis:// if the server has no TLS" if url.scheme.startswith(("rediss", "valkeys")) else ""
        reasons = {verb: f"{wanted}: {verb} fail: {why}; {remedy(verb, why)}{plain}" for verb, why in refused.items()}
        if not works:
            verb = likeliest(refused)
            problem = reasons[verb].replace(f"{verb} fail", "all calls fail", 1)
            yield Finding("remote stores", name, str(url), note="every call fails", problem=problem)
            continue
        if url.store_kind == "redis":
            odd = odd_policy(config, url)
        yield Finding("remote stores", name, str(url), note=f"tried: {works}" if works else "", warning=odd)
        for verb, problem in reasons.items():
            yield Finding("remote stores", verb, "refused", problem=problem)


def examine_model(size: KVSize) -> Iterator[Finding]:
    """Report how many bytes of KV one token of the model takes."""
    yield Finding("model", "attention", size.attention, note=f"{size.layers} layers with separate KV")
    ranks = "" if size.parts == 1 else f", {size.rank_bytes:,} of each of {size.parts} ranks"
    yield Finding("model", "one token", f"{size.token_bytes:,} bytes", note=f"in {size.dtype}{ranks}")
    yield Finding(
        "model", "10,000 tokens", f"{size.token_bytes / 1e5:.2f} GB", note=gibibytes(10_000 * size.token_bytes)
    )
    if size.states is not None:
        kept = size.states
        yield Finding(
            "model", "one state", f"{kept.nbytes:,} bytes", note=f"{kept.layers} layers of {kept.kind}, at a boundary"
        )
        block = size.chunk_tokens(0)
        yield Finding("model", "a chunk", f"about {block:,} tokens", note="vLLM's block, which holds a layer's state")
    in_gib = f"{size.tokens_in(GIB):,} tokens in one GiB"
    yield Finding("model", "one GB", f"{size.tokens_in(10**9):,} tokens", note=in_gib)


def examine_room(size: KVSize, config: Config) -> Iterator[Finding]:
    """Report how many tokens each configured tier holds."""
    chunk, slot = size.chunk_tokens(config.chunk_size), size.slot_bytes(config.chunk_size)
    try:
        chunks = machine.clamp_capacity(config.max_local_cpu_bytes, slot) // slot
    except ConfigError as error:
        yield Finding("model", "in host memory", "none", problem=str(error))
    else:
        passing = "" if config.local_cpu else "; chunks only pass through, because local_cpu is off"
        states = "" if size.states is None else ", states among them"
        note = f"{chunks:,} chunks of {chunk}{passing}{states}"
        yield Finding("model", "in host memory", f"{chunks * chunk:,} tokens", note=note)
    if config.local_disk:
        chunks = config.max_local_disk_bytes // size.file_bytes(chunk)
        problem = (
            "" if chunks else "max_local_disk_size is too small for one chunk of this model: raise max_local_disk_size"
        )
        note = f"{chunks:,} chunks of {chunk}"
        yield Finding("model", "in the disk tier", f"{chunks * chunk:,} tokens", note=note, problem=problem)


def examine_plugins() -> Iterator[Finding]:
    """Report the backends and policies that other packages provide, and whether they can be imported."""
    for group, kind in ((plugins.BACKENDS, "backend"), (plugins.POLICIES, "policy")):
        for name, place in plugins.installed(group).items():
            shown = f"{name}://" if group == plugins.BACKENDS else name
            try:
                plugins.load(place, f"the {kind} {name!r} in the entry points {group}")
            except ConfigError as error:
                yield Finding("plug-ins", kind, shown, note=place, problem=str(error))
            else:
                yield Finding("plug-ins", kind, shown, note=place)


def examine_versions() -> Iterator[Finding]:
    yield Finding("versions", "Python", platform.python_version())
    yield Finding("versions", "lmkv", __version__)
    with suppress(PackageNotFoundError):
        yield Finding("versions", "torch", version("torch"))
    checksums = codec.CHECKSUMS
    slow = f"checksums take a third of the time after {how_to_install('disk')}" if checksums == "zlib" else ""
    yield Finding("versions", "checksums", checksums, note=slow)


def examine_device() -> Iterator[Finding]:
    """Report the GPUs that torch sees, and how many bytes of memory this user may pin."""
    try:
        import torch
    except ImportError as error:
        problem = f"lmkv's engines need torch, which cannot be imported: {error}"
        yield Finding("device", "torch", "cannot be imported", problem=problem)
        return
    for number in range(torch.cuda.device_count()):
        found = torch.cuda.get_device_properties(number)
        note = f"{gibibytes(found.total_memory)}, CUDA {torch.version.cuda}"
        yield Finding("device", f"GPU {number}", found.name, note=note)
    if not torch.cuda.device_count():
        yield Finding("device", "GPU", "none", note="KV stays in host memory")
    limit = resource.getrlimit(resource.RLIMIT_MEMLOCK)[0]
    yield Finding("device", "locked memory", "no limit" if limit == resource.RLIM_INFINITY else gibibytes(limit))


def examine_vllm(env: Mapping[str, str]) -> Iterator[Finding]:
    """Report whether vLLM will find and can import the connector. vLLM need not be installed."""
    try:
        installed = compat.vllm_version()
    except ImportError:
        yield Finding("vllm", "vLLM", "not installed", note="lmkv works without vLLM, as a library")
        return
    low, high = ((".".join(map(str, bound))) for bound in compat.SUPPORTED)
    try:
        compat.check_version(installed)
    except ImportError as error:
        yield Finding("vllm", "vLLM", installed, problem=str(error))
        return
    yield Finding("vllm", "vLLM", installed, note=f"supported: {low} or later, and earlier than {high}")
    yield plugin_finding(env)
    yield import_finding()
    yield from examine_servers()


def plugin_finding(env: Mapping[str, str]) -> Finding:
    """Report whether vLLM knows the name `LMKVConnector`, so that its module need not be named."""
    name, way_out = "plugin", f'or name the module: "kv_connector_module_path": "{plugin.MODULE}"'
    if not entry_points(group="vllm.general_plugins", name="lmkv"):
        problem = f"lmkv's entry point is missing: install lmkv with pip, {way_out}"
        return Finding("vllm", name, "not registered", problem=problem)
    chosen = env.get("VLLM_PLUGINS")
    if chosen is not None and "lmkv" not in chosen.split(","):
        problem = f"VLLM_PLUGINS={chosen} leaves lmkv out: add lmkv, {way_out}"
        return Finding("vllm", name, "switched off", problem=problem)
    return Finding("vllm", name, "registered", note=f"vLLM finds {plugin.NAME} by its name")


def examine_servers() -> Iterator[Finding]:
    """Report running vLLM servers of this user that name lmkv in their options, but use another connector instead.

    Servers of other users are skipped, because the check reads every file that a server's options name.
    """
    others, late, until = 0, 0, time.monotonic() + SERVERS_TIMEOUT
    for process in sorted(PROCESSES.glob("[0-9]*")):
        with suppress(OSError):
            if process.stat().st_uid != os.geteuid():
                others += 1
                continue
            if time.monotonic() > until:
                late += 1
                continue
            arguments = (process / "cmdline").read_bytes().decode(errors="replace").split("\0")
            serves = any(each.startswith("vllm.entrypoints") or Path(each).name == "vllm" for each in arguments)
            transfer, offloads = plugin.of_command_line(arguments, process / "cwd") if serves else ({}, False)
            for obstacle in plugin.obstacles(transfer, offloads=offloads):
                problem = f"process {process.name}: {obstacle}"
                yield Finding("vllm", "server", f"process {process.name}", problem=problem)
    if others:
        yield Finding(
            "vllm", "not examined", f"{others} processes", note="of other users: run lmkv doctor as vLLM's user, too"
        )
    if late:
        yield Finding("vllm", "not examined", f"{late} processes", note=f"because {SERVERS_TIMEOUT:g} s were over")


def import_finding() -> Finding:
    """Import the connector as vLLM does, and report the result.

    The import runs in another process, because vLLM prints messages and would stay in memory.
    """
    command = [sys.executable, "-c", f"import {plugin.MODULE}"]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=IMPORT_TIMEOUT, check=False)
    except subprocess.TimeoutExpired:
        return Finding(
            "vllm", "connector", "hangs", problem=f"importing {plugin.MODULE} takes more than {IMPORT_TIMEOUT:g} s"
        )
    if done.returncode == 0:
        return Finding("vllm", "connector", "can be imported")
    reason = (done.stderr.strip().splitlines() or [f"exit code {done.returncode}"])[-1]
    problem = f"{plugin.MODULE} cannot be imported: {reason}"
    return Finding("vllm", "connector", "cannot be imported", problem=problem)


def gibibytes(nbytes: int) -> str:
    return f"{nbytes / GIB:.2f} GiB"
