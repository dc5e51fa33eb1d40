"""Finds settings that have another meaning inside a container, in the command that starts the container."""

from __future__ import annotations

import os
import re
from collections.abc import Iterator, Sequence
from itertools import pairwise
from typing import Final
from urllib.parse import urlsplit

from lmkv.config.options import Options
from lmkv.config.sources import read_text, variables_in

PROGRAMS: Final = ("docker", "podman", "nerdctl")
_LOCAL: Final = ("localhost", "127.0.0.1", "::1")
_UNITS: Final = {"": 1, "b": 1, "k": 1 << 10, "m": 1 << 20, "g": 1 << 30}


def warnings(words: Sequence[str], options: Options) -> Iterator[str]:
    """Yield the reasons why these settings do not fit the options of docker in a command."""
    if (at := docker_at(words)) is None:
        return
    before, words = words[:at], words[at:]
    passed = _values(words, "-e", "--env")
    for name in (word.partition("=")[0] for word in before if word.startswith("LMKV_")):
        if name not in passed:
            yield f"{name} before {words[0]} does not reach the container: write -e {name}=VALUE after {words[0]} run"
    volumes = [value.split(":")[1] for value in _values(words, "-v", "--volume") if ":" in value]
    volumes += re.findall(r"(?:target|dst|destination)=([^,]+)", " ".join(_values(words, "--mount")))
    for file in (file for file in _values(words, "--env-file") if not os.path.exists(file)):
        yield f"--env-file {file} is not on this machine, so its variables are not checked: check it where it is"
    folder, shared = options.local_disk, options.shared_memory or ""
    if folder and not any(f"{folder}/".startswith(f"{volume.rstrip('/')}/") for volume in volumes):
        told = f"name a folder in {volumes[0]}" if volumes else f"add -v /FOLDER/OF/THE/HOST:{folder}"
        yield f"local_disk {folder} is in no volume of the container, and is lost with the container: {told}"
    if "host" not in _values(words, "--network", "--net"):
        port = (options.agent_listen or "").rpartition(":")[2]
        if any(port in value.split(":") for value in _values(words, "-p", "--publish")):
            told = "means the container itself: use unix:/PATH in a volume, or add --network host"
            yield f"agent_listen {options.agent_listen} {told}"
        for url in (url for url in options.remotes if urlsplit(url.text).hostname in _LOCAL):
            yield f"remote_url {url} means the container itself: write the machine's name, or add --network host"
    for limit in _values(words, "--memory", "-m"):
        if 0 < _bytes(limit) < options.max_local_cpu_bytes:
            told = f"is more than the container's --memory {limit}: lower max_local_cpu_size, or raise --memory"
            yield f"max_local_cpu_size {options.max_local_cpu_size:g} GiB {told}"
    own = "host" not in _values(words, "--ipc") and "/dev/shm" not in volumes
    limit = (_values(words, "--shm-size") or ["64m"])[-1]
    if own and shared.startswith("/dev/shm/") and _bytes(limit) < options.max_shared_memory_bytes:
        told = f"is more than the container's /dev/shm ({limit}): add --ipc=host, or a larger --shm-size"
        yield f"max_shared_memory_size {options.max_shared_memory_size:g} GiB {told}"


def _bytes(size: str) -> int:
    """Return the number of bytes in a size of docker's, such as 16g. Return 0 for other texts."""
    found = re.fullmatch(r"([0-9]+)([bkmg]?)b?", size.lower())
    return int(found[1]) * _UNITS[found[2]] if found else 0


def with_files(words: Sequence[str]) -> list[str]:
    """Add to a docker command an option `-e` for each variable of lmkv or LMCache in the command's `--env-file`.

    Other commands are returned unchanged.
    """
    if docker_at(words) is None:
        return list(words)
    at = words.index("run") + 1
    given = [variables_in(read_text(file)) for file in _values(words, "--env-file") if os.path.exists(file)]
    found = [f"-e{name}={value}" for each in given for name, value in each.items() if re.match("LM(KV|CACHE)_", name)]
    return [*words[:at], *found, *words[at:]]


def docker_at(words: Sequence[str]) -> int | None:
    """Return the index of the word docker (or podman or nerdctl) in a command that runs a container, else None.

    Variables and `sudo` may come before docker.
    """
    at = next((at for at, word in enumerate(words) if word.rpartition("/")[2] in PROGRAMS), len(words))
    return at if "run" in words[at:] and all("=" in word or word in _FIRST for word in words[:at]) else None


_FIRST: Final = ("sudo", "-E", "env", "exec")


def image_at(words: Sequence[str]) -> int | None:
    """Return the index of the image in the words of a docker command, or None for another command."""
    if docker_at(words) is None:
        return None
    at = words.index("run") + 1
    while at < len(words) and words[at].startswith("-"):
        at += 1 if "=" in words[at] or words[at] in _ALONE else 2
    return at if at < len(words) else None


_ALONE: Final = (
    *("-d", "-i", "-t", "-it", "-ti", "-dit", "-itd", "--detach", "--interactive", "--tty", "--rm", "--privileged"),
    *("--init", "--read-only", "--no-healthcheck", "--sig-proxy", "--oom-kill-disable"),
)
"""Options of docker that take no value after a blank."""


def _values(words: Sequence[str], *names: str) -> list[str]:
    """Return the values of an option. A value follows the option's name after a blank or after `=`."""
    found = [value for name, value in pairwise(words) if name in names]
    return found + [word.partition("=")[2] for word in words if word.partition("=")[0] in names and "=" in word]
