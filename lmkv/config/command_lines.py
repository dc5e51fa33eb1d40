"""Finds the program that a command line or a file starts, and translates its command into lmkv's command."""

from __future__ import annotations

import json
import logging
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import pairwise
from typing import Any, Final

from lmkv.config import containers, lmcache
from lmkv.config.command import TRANSFER, Command
from lmkv.config.lmcache_server import of_server
from lmkv.config.vllm_options import SIZE, as_words, of_vllm
from lmkv.errors import ConfigError, short_repr


def translated(words: Sequence[str], ranks: int | None = 1) -> Command:
    """Translate a command line into one that starts an engine with lmkv. Raises ConfigError for an unknown program.

    `ranks`: the number of ranks of the engine, if the command's options do not set it.
    """
    env, words = _variables([*_replaced(containers.with_files(words))])
    found = program(words)
    if found is None and any(word.startswith((TRANSFER, SIZE)) for word in words):
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
    warnings = [(logging.WARNING, warning) for warning in strange]
    if server:
        command = of_server(words[at:], env)
        command.notes += warnings
        return command
    # An unknown image may have its own options before those of vLLM, so vLLM's first option marks the place.
    image = containers.image_at(words)
    start = at or image or next(number for number, word in enumerate(words) if word.startswith((TRANSFER, SIZE)))
    own = {found[1]: found[2] for found in map(_OWN.fullmatch, words[:start]) if found}
    command = of_vllm(words[at:], env, own, ranks)
    command.before, command.start, command.notes = list(words[:at]), list(words[:start]), command.notes + warnings
    for variable, stray in pairwise(words[:start]):
        if (named := _OWN.fullmatch(variable)) and re.search("=|://", stray) and not re.match(r"-|\w+=", stray):
            command.warn(f"{stray} is no part of the value of {named[1]}: put the whole value into quotes")
    for late in filter(None, map(_OWN.fullmatch, words[start:])):
        told = "stands among vLLM's options, so lmkv does not get it: write it before the program or the image"
        command.warn(f"{late[1]} {told}")
    for word in words[:at]:
        name, _, chosen = word.removeprefix("--env=").removeprefix("-e").partition("=")
        if name == "VLLM_PLUGINS" and "lmkv" not in chosen.split(","):
            command.warn(f"VLLM_PLUGINS={chosen} leaves lmkv out: add lmkv")
    if any(map(_IMAGE.fullmatch, words[:at])) or words[0] in _CONTAINERS:
        command.inform("the image must contain lmkv: see docs/deploy.md")
    return command


def _replaced(words: Iterable[str]) -> Iterator[str]:
    """Yield the words, with the variables that Kubernetes replaces in later variables, such as `$(PASSWORD)`."""
    values: dict[str, str] = {}
    for word in words:
        name, equals, value = word.partition("=")
        values[name] = re.sub(r"\$\((\w+)\)", lambda name: values.get(name[1], name[0]), value)
        yield name + equals + values[name]


_OWN: Final = re.compile(r"(?:-e|--env=)?(LMKV_\w+)=(.*)", re.DOTALL)
_GIVE: Final = "lmkv is a connector of vLLM: give `lmcache server ...` or `vllm serve ...`"
_NOT_NEEDED: Final = "leave out that process; servers share KV in a store, such as remote_url: redis://HOST:PORT"
_SERVERS: Final = ("lmcache.v1.multiprocess.server", "lmcache.v1.multiprocess.http_server")
_PROGRAMS: Final = ("vllm", "vllm.entrypoints.cli.main")
_ENGINES: Final = ("vllm.entrypoints.openai.api_server", "dynamo.vllm", "huggingfaceserver")
_CONTAINERS: Final = (*containers.PROGRAMS, "apptainer", "singularity")
_IMAGE: Final = re.compile(r"[\w./-]*/vllm-openai[\w.-]*([:@].*)?")


def program(words: Sequence[str]) -> tuple[bool, int] | None:
    """Return `(is_server, start)` for a command of LMCache's server or of vLLM; None for another program.

    `is_server`: whether the program is LMCache's server. `start`: the index of the first option.
    """
    for at, (word, following) in enumerate(pairwise([*words, ""])):
        name = word.rpartition("/")[2]
        if (name, following) == ("lmcache", "server") or (word == "-m" and following in _SERVERS):
            return True, at + 2
        if (name in _PROGRAMS and following == "serve") or (word == "-m" and following in _ENGINES):
            return False, at + 2
    return next(((False, at + 1) for at, word in enumerate(words) if _IMAGE.fullmatch(word)), None)


def _variables(words: Sequence[str]) -> tuple[dict[str, str], list[str]]:
    """Return `(variables, words)`: LMCache's variables that a shell or `docker run -e` sets, and all other words."""
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


def of_file(content: Mapping[Any, object]) -> list[str] | None:
    """Return the command line for a connector's JSON file or a file for `vllm serve --config`. Returns None for other
    files.

    Raises ConfigError for a file that starts servers, such as a Kubernetes manifest.
    """
    for keys, kind in _MANIFESTS.items():
        if keys <= content.keys():
            raise ConfigError(f"lmkv reads no settings from a file {kind}: {GIVE_COMMAND}")
    if "kv_connector" in content:
        return ["vllm", "serve", "MODEL", TRANSFER, json.dumps(content)]
    if not {str(key).replace("_", "-") for key in content} & {TRANSFER[2:], "kv-offloading-size"}:
        return None
    return ["vllm", "serve", *as_words(content)]


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
    "give its variables and its command after --, as in -- LMKV_CHUNK_SIZE=256 vllm serve ..., or write the settings "
    "into a separate file"
)
