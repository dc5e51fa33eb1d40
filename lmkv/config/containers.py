"""Finds settings that have another meaning inside a container, in the command that starts the container."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from itertools import pairwise
from typing import Final
from urllib.parse import urlsplit

from lmkv.config.parsers import GIB
from lmkv.config.urls import RemoteURL

PROGRAMS: Final = ("docker", "podman", "nerdctl")
_LOCAL: Final = ("localhost", "127.0.0.1", "::1")
_UNITS: Final = {"": 1, "b": 1, "k": 1 << 10, "m": 1 << 20, "g": 1 << 30}


def doubts(words: Sequence[str], folder: str | None, remotes: Sequence[RemoteURL], host_bytes: int) -> Iterator[str]:
    """Yield remarks about a docker command.

    `folder`: the folder of the disk tier. `remotes`: the remote stores. `host_bytes`: bytes of host memory.
    """
    if not words or words[0] not in PROGRAMS:
        return
    volumes = [value.split(":")[1] for value in _values(words, "-v", "--volume") if ":" in value]
    if folder and volumes and not any(f"{folder}/".startswith(f"{volume.rstrip('/')}/") for volume in volumes):
        told = f"is in no volume of the container, and is lost with the container: name a folder in {volumes[0]}"
        yield f"local_disk {folder} {told}"
    if "host" not in _values(words, "--network", "--net"):
        for url in (url for url in remotes if urlsplit(url.text).hostname in _LOCAL):
            yield f"remote_url {url} means the container itself: write the machine's name, or add --network host"
    for limit in _values(words, "--memory", "-m"):
        found = re.fullmatch(r"([0-9]+)([bkmg]?)", limit.lower())
        if found and int(found[1]) * _UNITS[found[2]] < host_bytes:
            told = f"is more than the container's --memory {limit}: lower max_local_cpu_size, or raise --memory"
            yield f"max_local_cpu_size {host_bytes / GIB:g} GiB {told}"


def image_at(words: Sequence[str]) -> int | None:
    """Return the index of the image in the words of a docker command, or None for another command."""
    if not words or words[0] not in PROGRAMS or "run" not in words:
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
