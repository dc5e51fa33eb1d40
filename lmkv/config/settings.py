"""`Config`: every setting of lmkv, with its name, type, default, unit and meaning, and the source of its value.

Only the code that builds engines, the vLLM connector and the command line read a `Config`.
"""

from __future__ import annotations

import logging
import os
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from types import MappingProxyType
from typing import Any, Final, Literal, NoReturn, Self, TypeVar
from urllib.parse import unquote, urlsplit

from attrs import Attribute, evolve, field, fields, frozen

from lmkv.config import command_lines, containers, lmcache
from lmkv.config.advice import PLACEHOLDER, hint, is_path, unfit_key, written_instead
from lmkv.config.command import Command
from lmkv.config.parsers import (
    GIB,
    Parse,
    Quota,
    Reading,
    Secret,
    agent_address,
    are_nested,
    boolean,
    in_words,
    integer,
    number,
    one_of,
    optional_text,
    path,
    plugin_name,
    quotas,
    readable,
    secret,
    text,
)
from lmkv.config.sources import (
    ENV_FILE,
    ENV_LEVEL,
    ENV_PREFIX,
    KEYWORD,
    flat,
    given_settings,
    read_named,
    read_yaml,
    typed,
)
from lmkv.config.urls import SERVICE_VARIABLE, RemoteURL, urls
from lmkv.errors import SECRET, ConfigError, short_repr
from lmkv.policies import ADMISSIONS, POLICIES, policy_names

DEFAULT: Final = "default"

_T = TypeVar("_T")


def _option(default: _T, parse: Parse, doc: str, unit: str = "") -> _T:
    """Return a field of `Config`.

    `parse`: a function that converts a value as users write it. The function raises ValueError if the value is invalid.
    """
    option: _T = field(default=default, metadata={"parse": parse, "doc": doc, "unit": unit})
    return option


def _converting(_: type, attributes: list[Attribute[Any]]) -> list[Attribute[Any]]:
    """Make the `parse` function of each option the converter of its field, with the field's name in error messages."""
    return [
        attribute.evolve(converter=_converter(attribute)) if "parse" in attribute.metadata else attribute
        for attribute in attributes
    ]


@frozen
class _Parsed:
    """A value that is already parsed. The converter of its field does not parse such a value again."""

    value: object


def _converter(attribute: Attribute[Any]) -> Parse:
    def convert(value: object) -> object:
        """Return the parsed value. Returns, not raises, a ConfigError, so that all errors can be reported together."""
        try:
            return (value if isinstance(value, _Parsed) else _parsed(attribute, value, KEYWORD)).value
        except ConfigError as error:
            return error

    return convert


def _parsed(attribute: Attribute[Any], value: object, source: str) -> _Parsed:
    try:
        return _Parsed(attribute.metadata["parse"](value))
    except ValueError as error:
        visible = "'***'" if attribute.metadata["parse"] is secret else short_repr(value)
        advice = "" if "quotes" in str(error) else written_instead(attribute.metadata["unit"], value)
        size = f"max_{attribute.name}_size"
        advice += f"; write the size as {size}" if size in _OPTIONS and re.match("'?[0-9]", visible) else ""
        raise ConfigError(f"{source}: {attribute.name} = {visible} {error}{advice}") from None


@frozen
class Setting:
    """One setting in the result of `Config.describe`. `source`: where the setting's `value` comes from."""

    name: str
    value: object
    source: str
    default: object
    unit: str
    doc: str

    def __str__(self) -> str:
        """Return the value as text with its unit, or "none"."""
        unit = self.unit if self.unit.isalpha() else ""
        return f"{in_words(self.value)} {unit}".strip() if self.value is not None else "none"


@frozen(kw_only=True, field_transformer=_converting)
class Config:
    """The settings of one engine; docs/configuration.md lists them.

    Raises
    ------
    ConfigError
        A value is invalid, or `load` finds an unknown key. The message names the key, value and source of each error.

    Notes
    -----
    Immutable. `load` merges a file, the environment and vLLM's `kv_connector_extra_config`; the constructor uses only
    its keyword arguments.

    Examples
    --------
    >>> config = Config(chunk_size=128, max_local_cpu_size="2.5")
    >>> config.max_local_cpu_bytes == 2.5 * 2**30
    True
    >>> Config.load(env={"LMKV_CHUNK_SIZE": "64"}).source("chunk_size")
    'environment LMKV_CHUNK_SIZE'
    """

    chunk_size: int = _option(
        256, integer(1, 1 << 20), "Tokens of a chunk, which lmkv stores and loads as a whole", "tokens"
    )
    local_cpu: bool = _option(True, boolean, "Keep chunks in host memory after they are stored or loaded")
    max_local_cpu_size: float = _option(
        5.0, number(0, above=True), "Size of the engine's host memory, for all its ranks together", "GiB"
    )
    shared_memory: str | None = _option(
        None, path, "Folder in memory that a node's engines share, such as file:///dev/shm/lmkv; none: no such tier"
    )
    max_shared_memory_size: float = _option(
        0.0, number(0), "Capacity of the folder shared_memory, for all engines and models together", "GiB"
    )
    local_disk: str | None = _option(
        None, path, "Folder of the disk tier, as a path or file:///path; none: no disk tier"
    )
    max_local_disk_size: float = _option(0.0, number(0), "Capacity of the disk tier", "GiB")
    cache_policy: str = _option(
        "LRU", plugin_name(policy_names), f"Eviction order: {', '.join(POLICIES)}, or your own package.module:Class"
    )
    quotas: tuple[Quota, ...] = _option(
        (),
        quotas,
        "Percent of each tier to keep for a tenant, such as alice=40. A tenant is a cache_salt, the label of one, or a "
        "tag as name:value",
    )
    save_decode_cache: bool = _option(True, boolean, "Also store chunks of generated tokens")
    save_unfull_chunk: bool = _option(True, boolean, "Also store and find the tokens after a prompt's last whole chunk")
    state_interval: int = _option(
        0, integer(0), "Chunks from one kept state of recurrent layers to the next; 0: lmkv chooses"
    )
    min_retrieve_tokens: int = _option(0, integer(0), "Do not load a hit of fewer tokens than this", "tokens")
    disk_sync: Literal["none", "data", "full"] = _option(
        "none",
        one_of("none", "data", "full"),
        "none: sync nothing, so that a power cut may lose recent chunks; data: sync each file before requests find it; "
        "full: also sync its folder",
    )
    disk_min_free: float = _option(1.0, number(0), "Free space that lmkv leaves on the disk tier's file system", "GiB")
    disk_io_threads: int = _option(
        16,
        integer(1, 1024),
        "Threads that read from each lower tier; three quarters of them also write. By default at most 4 per core if "
        "the lowest tier is a disk, and 2 if it is shared memory",
    )
    disk_direct: Literal["auto", "on", "off"] = _option(
        "auto",
        one_of("auto", "on", "off"),
        "Bypass the page cache (O_DIRECT) in reads and writes; auto: if the file system supports it",
    )
    disk_write: Literal["through", "back"] = _option(
        "through",
        one_of("through", "back"),
        "through: write a chunk to disk when it is stored; back: when host memory evicts it",
    )
    disk_admission: str = _option(
        "all",
        plugin_name(lambda: ADMISSIONS, numbered="min_tokens"),
        "Which chunks to write to disk: all, none, second_touch (only those that were offered before), min_tokens:8192 "
        "(only those of requests with at least 8192 tokens), or your own package.module:Class",
    )
    remote_url: tuple[RemoteURL, ...] = _option(
        (), urls, "URLs of shared stores, nearest first, such as redis://[user[:password]@]host[:port][/db]"
    )
    remote_urls: tuple[RemoteURL, ...] = _option(
        (), urls, "URLs of more shared stores, farther than those in remote_url"
    )
    remote_username: str | None = _option(None, optional_text, "User name for remote stores whose URL has none")
    remote_password: Secret | None = _option(None, secret, "Password for remote stores whose URL has none; never shown")
    remote_password_file: str | None = _option(None, path, "File with remote_password in its first line")
    remote_prefix: str = _option("lmkv:", text, "Prefix of the names of all chunks in remote stores")
    remote_ttl: int = _option(0, integer(0), "How long a remote store keeps a chunk; 0: until the store evicts it", "s")
    remote_timeout: float = _option(
        1.0, number(0, above=True), "How long to wait for a remote store's connection or answer", "s"
    )
    authentication_key: Secret | None = _option(
        None, secret, "Serve from lower tiers only chunks written with this key (32 bytes or more); never shown"
    )
    authentication_key_file: str | None = _option(
        None, path, "File with authentication_key, such as from openssl rand -hex 32; a final line break is ignored"
    )
    prefetch_share: float = _option(0.5, number(0, 1), "Largest share of host memory for prefetched chunks", "0..1")
    pin_share: float = _option(0.5, number(0, 1), "Largest share of host memory for pinned chunks", "0..1")
    prefetch_deadline: float = _option(
        30.0, number(0), "Longest time that a request waits for lower tiers; less if computing takes less", "s"
    )
    load_or_recompute: bool = _option(
        True, boolean, "Compute tokens if lmkv has measured that loading them takes longer; false: always load"
    )
    load_mode: Literal["auto", "sync", "async"] = _option(
        "auto",
        one_of("auto", "sync", "async"),
        "sync: load from host memory within the step that uses the KV; async: between steps; auto: within the step, or "
        "on a GPU between steps if others would wait over 5 ms. With asynchronous scheduling always between steps",
    )
    use_layerwise: bool = _option(
        False, boolean, "Copy one layer while the model computes another; vLLM then cuts its CUDA graphs at each layer"
    )
    block_major: bool = _option(
        True, boolean, "On CUDA devices, ask vLLM to keep all layers of a block next to each other in memory"
    )
    device_staging_size: float = _option(
        1.0, number(0, above=True), "Staging memory on each device for stores; loads take a quarter in addition", "GiB"
    )
    pin_ttl: float = _option(
        300.0, number(0, above=True), "How long a pin, a prefetch or a priority lasts if its caller gives no time", "s"
    )
    audit_rate: float = _option(
        0.0, number(0, 1), "Share of hits and loads that are audited: 0.01 is one in 100", "0..1"
    )
    audit_action: Literal["drop", "disable"] = _option(
        "drop",
        one_of("drop", "disable"),
        "drop: after a wrong hit or load, discard it and compute the tokens; disable: also stop all loads",
    )
    media_by_name: bool = _option(
        False,
        boolean,
        "Assume that images, sounds or videos with equal names are equal. Safe only if no client chooses names, or if "
        "each name is a hash",
    )
    agent_listen: str | None = _option(
        None, agent_address, "Address at which the agent API listens: unix:/path, or 127.0.0.1:8377; none: no agent API"
    )
    agent_token: Secret | None = _option(None, secret, "Token that callers of the agent API must send; never shown")
    agent_token_file: str | None = _option(None, path, "File with agent_token in its first line")
    sources: dict[str, str] = field(factory=dict, eq=False, repr=False)
    """The source of each value, by the name of the setting. `load` fills this mapping."""
    remarks: tuple[tuple[int, str], ...] = field(default=(), eq=False, repr=False)
    """Log lines about the sources, each with its level. `load` fills this tuple."""

    def __attrs_post_init__(self) -> None:
        refused = {name: value for name in _OPTIONS if isinstance(value := getattr(self, name), ConfigError)}
        for name in refused:
            object.__setattr__(self, name, _OPTIONS[name].default)
        # A refused setting has consequences, which are not separate problems.
        together = (line for line in self._problems() if not any(name in line for name in refused))
        if problems := [*map(str, refused.values()), *together]:
            raise ConfigError("\n".join(problems))

    def _problems(self) -> Iterator[str]:
        """Yield an error text for each contradiction between settings."""
        yield from self._of_folder("shared_memory", "max_shared_memory_size")
        yield from self._of_folder("local_disk", "max_local_disk_size")
        if self.shared_memory and self.local_disk and are_nested(self.shared_memory, self.local_disk):
            other = f"shared_memory = {short_repr(self.shared_memory)}"
            reason = "are one folder, or nested: each would delete the other's chunks; name two separate folders"
            yield self._problem("local_disk", f"and {other} {reason}")
        for url in (url for url in self.remotes if url.scheme == "file" and self.local_disk):
            if self.local_disk and are_nested(self.local_disk, unquote(urlsplit(url.text).path)):
                reason = f"and remote_url = {url} are one folder, or nested: name two separate folders"
                yield self._problem("local_disk", reason)
        for name in ("remote_password", "agent_token", "authentication_key"):
            if getattr(self, name) and getattr(self, f"{name}_file"):
                yield self._problem(f"{name}_file", f"and {name} are both given: keep one")
        if len({*self.remotes}) < len(self.remotes):
            yield self._problem(
                "remote_url" if self.remote_url else "remote_urls", "names one store twice: leave out one of the two"
            )
        if self.authentication_key and (unfit := unfit_key(self.authentication_key.value.encode())):
            yield self._problem("authentication_key", unfit)
        open_to_all = self.agent_listen and not self.agent_listen.startswith("unix:")
        if open_to_all and not (self.agent_token or self.agent_token_file):
            yield self._problem("agent_listen", "needs an agent_token: anyone who can connect can clear the cache")

    @classmethod
    def load(
        cls,
        file: str | os.PathLike[str] | None = None,
        *,
        env: Mapping[str, str] = os.environ,
        extra: Mapping[str, object] | None = None,
        ranks: int | None = None,
        **overrides: object,
    ) -> Config:
        """Return the configuration from keywords, a file, the environment and vLLM's extra configuration.

        A later source in this list overrides an earlier source. `file`: a YAML file; by default the file that
        LMKV_CONFIG_FILE names. `env`: variables such as LMKV_CHUNK_SIZE. `extra`: vLLM's `kv_connector_extra_config`,
        with keys such as `chunk_size` or `lmkv.chunk_size`. `overrides`: settings as keywords. Raises ConfigError for
        an unknown key or an invalid value in any source, even if another source overrides the key.

        If no source has a setting of lmkv, LMCache's settings are read: LMCACHE_CONFIG_FILE, LMCACHE_CHUNK_SIZE,
        `lmcache.chunk_size`. `ranks`: the number of ranks of the engine, by which LMCache's sizes are multiplied.
        """
        return Answer.to(file=file, env=env, extra=extra, overrides=overrides, ranks=ranks).checked()

    @property
    def remotes(self) -> tuple[RemoteURL, ...]:
        """The URLs of all remote stores, fastest store first."""
        return self.remote_url + self.remote_urls

    @property
    def max_local_cpu_bytes(self) -> int:
        return int(self.max_local_cpu_size * GIB)

    @property
    def device_staging_bytes(self) -> int:
        return int(self.device_staging_size * GIB)

    @property
    def max_shared_memory_bytes(self) -> int:
        return int(self.max_shared_memory_size * GIB)

    @property
    def max_local_disk_bytes(self) -> int:
        return int(self.max_local_disk_size * GIB)

    @property
    def disk_min_free_bytes(self) -> int:
        return int(self.disk_min_free * GIB)

    @property
    def password(self) -> str | None:
        """Password for remote stores, from the setting or from the password file.

        Raises ConfigError if the file is unreadable.
        """
        return self._secret("remote_password")

    @property
    def renew_password(self) -> Callable[[], str | None] | None:
        """A function that reads `password` again, or None if the password is not in a file. A pipe is read only
        once.
        """
        path = self.remote_password_file
        return partial(self._secret, "remote_password") if path and os.path.isfile(path) else None

    @property
    def token(self) -> str | None:
        """Token of the agent API, from the setting or from the token file.

        Raises ConfigError if the file is unreadable or the token cannot be sent in an HTTP header.
        """
        token = self._secret("agent_token")
        if token is not None and not re.fullmatch("[!-~]+", token):
            self._refuse("agent_token_file" if self.agent_token_file else "agent_token", "must be ASCII without blanks")
        if token is not None and not self.agent_token_file and is_path(token.encode()):
            self._refuse("agent_token", "is a path: name the file of the token in agent_token_file")
        if token is not None and PLACEHOLDER.search(token.encode()):
            name = "agent_token_file" if self.agent_token_file else "agent_token"
            self._refuse(name, "has a placeholder instead of a token: make one with openssl rand -hex 32")
        return token

    @property
    def authentication_bytes(self) -> bytes | None:
        """Secret key that authenticates chunks, from the setting or the key file. Raises ConfigError for an invalid
        key.
        """
        if self.authentication_key_file is None:
            return self.authentication_key.value.encode() if self.authentication_key else None
        key = self._content("authentication_key_file").removesuffix(b"\n").removesuffix(b"\r")
        if unfit := unfit_key(key):
            self._refuse("authentication_key_file", unfit)
        return key

    def _secret(self, name: str) -> str | None:
        if getattr(self, f"{name}_file") is None:
            given = getattr(self, name)
            return given.value if given else None
        try:
            lines = self._content(f"{name}_file").decode().splitlines()
        except UnicodeError:
            self._refuse(f"{name}_file", "is not a text file: write the secret into the first line of a text file")
        # An empty token would protect nothing.
        return lines[0] if lines and lines[0] else self._refuse(f"{name}_file", f"has no {name} in its first line")

    def _content(self, name: str) -> bytes:
        try:
            return read_named(getattr(self, name))
        except OSError as error:
            why = error.strerror.lower() if error.strerror else error
            self._refuse(name, f"cannot be read: {why}; name a file that the server's user may read")

    def source(self, name: str) -> str:
        """Return the source of a setting's value, such as "default" or "environment LMKV_CHUNK_SIZE"."""
        is_default = getattr(self, name) == _OPTIONS[name].default
        return self.sources.get(name) or (DEFAULT if is_default else KEYWORD)

    def describe(self) -> list[Setting]:
        """Return all settings with their values, sources and meanings, in the order of their definition."""
        return [
            Setting(
                name=name,
                value=readable(getattr(self, name)),
                source=self.source(name),
                default=readable(option.default),
                unit=option.metadata["unit"],
                doc=option.metadata["doc"],
            )
            for name, option in _OPTIONS.items()
        ]

    def _of_folder(self, folder: str, capacity: str) -> Iterator[str]:
        """Yield an error text if a folder is set without a capacity, or a capacity without a folder."""
        given, size = getattr(self, folder), getattr(self, capacity)
        if given is not None and size == 0:
            yield f"{self.source(folder)}: {folder} needs {capacity} (GiB), for example {capacity}: 100"
        if given is None and size > 0:
            yield f"{self.source(capacity)}: {capacity} needs {folder}, the folder to use"

    @property
    def keeps_nothing(self) -> bool:
        """Whether no tier keeps chunks after the end of the request that stored them."""
        disk = self.local_disk and self.disk_admission != "none"
        return not (self.local_cpu or self.shared_memory or disk or self.remotes)

    def doubts(self, given: Iterable[str]) -> Iterator[tuple[int, str]]:
        """Yield `(log level, remark)` for settings without effect and suspicious values. `given`: names of the set
        settings.
        """
        if self.keeps_nothing:
            yield logging.WARNING, _KEEPS_NOTHING
        if 0 < sum(each.percent for each in self.quotas) <= 1:
            told = "quotas are in percent, and these add up to 1 percent or less: multiply shares by 100"
            yield logging.WARNING, f"{self.source('quotas')}: {told}"
        for url in (url for url in self.remotes if url.lacks_service):
            told = f"names no service: write /SERVICE after the URL's hosts, or set {SERVICE_VARIABLE} for the server"
            yield logging.WARNING, f"{self.source('remote_url')}: remote_url = {url} {told}"
        for url in (url for url in self.remotes if url.doubles_bucket):
            told = "has the bucket in the endpoint, too: remove the path of the endpoint"
            yield logging.WARNING, f"{self.source('remote_url')}: remote_url = {url} {told}"
        if self.disk_write == "back" and self.local_disk and not self.local_cpu:
            told = "works like through, because local_cpu is off and no chunk stays in host memory"
            yield logging.WARNING, self._problem("disk_write", told)
        if self.audit_rate == 1:
            told = "audits every hit, so that vLLM computes half of the hits: write 0.01 for one hit in 100"
            yield logging.WARNING, self._problem("audit_rate", told)
        for name, most in _LONG.items():
            if getattr(self, name) > most:
                yield logging.WARNING, self._problem(name, "is in seconds: divide milliseconds by 1000")
        for needed, names in _ONLY_WITH.items():
            if not getattr(self, needed):
                for name in [each for each in given if each in names[1:]]:
                    yield logging.WARNING, f"{self.source(name)}: {name} has no effect without {names[0]}"

    def doubts_of_server(self, role: str, longest: int | None) -> Iterator[str]:
        """Yield the reasons why a server with the `kv_role` `role` will have no hits.

        `longest`: number of tokens of the server's longest request.
        """
        if role != "kv_both" and not (self.shared_memory or self.local_disk or self.remotes):
            idle = {
                "kv_consumer": "stores nothing, and no other server can store into this server's host memory",
                "kv_producer": "loads nothing, and no other server can load from this server's host memory",
            }
            if role in idle:
                yield f"kv_role {role} {idle[role]}: write kv_both, or add shared_memory, local_disk or remote_url"
        if role == "kv_producer" and self.disk_write == "back" and self.local_disk and not self.remotes:
            yield self._problem("disk_write", "hides new chunks from other servers until eviction: write through")
        if longest is None:
            return
        if self.chunk_size > longest and not self.save_unfull_chunk:
            told = f"is longer than any request ({longest} tokens), so no chunk is ever full: lower chunk_size"
            yield self._problem("chunk_size", told)
        least = self.disk_admission.partition("min_tokens:")[2]
        if least.isdecimal() and int(least) > longest:
            told = f"is more than any request has ({longest} tokens), so the disk tier stores nothing: lower the number"
            yield self._problem("disk_admission", told)
        if self.min_retrieve_tokens > longest:
            told = f"is more than any request has ({longest} tokens), so lmkv loads nothing: lower min_retrieve_tokens"
            yield self._problem("min_retrieve_tokens", told)

    def _problem(self, name: str, reason: str) -> str:
        value = readable(getattr(self, name))
        return f"{self.source(name)}: {name} = {short_repr(value)} {reason}"

    def _refuse(self, name: str, reason: str) -> NoReturn:
        raise ConfigError(self._problem(name, reason))


_OPTIONS: Final[Mapping[str, Attribute[Any]]] = MappingProxyType(
    {option.name: option for option in fields(Config) if "parse" in option.metadata}
)


@frozen
class Answer:
    """The result of reading all settings. The server and all commands use this class, so that they report the same
    problems.

    `config`: the configuration; None if a setting is refused. `readings`: what each setting means in lmkv. `notes`:
    `(log level, remark)` pairs about several settings together. `problems`: error texts about refused settings.
    """

    config: Config | None
    readings: tuple[Reading, ...]
    notes: tuple[tuple[int, str], ...] = ()
    of_lmcache: bool = False
    """Whether the given settings are LMCache's."""
    problems: tuple[str, ...] = ()
    values: Mapping[str, object] = field(factory=dict)
    """The values of the used settings, by name."""

    @classmethod
    def to(
        cls,
        *,
        file: str | os.PathLike[str] | None = None,
        env: Mapping[str, str],
        extra: Mapping[str, object] | None = None,
        overrides: Mapping[str, object] = MappingProxyType({}),
        read: Callable[[Path], Mapping[Any, object]] = read_yaml,
        ranks: int | None = None,
    ) -> Self:
        """Read all settings and return the result. The arguments are those of `Config.load`; `overrides` has its
        keywords.

        `read`: a function that returns the content of a YAML file. Raises ConfigError for a source that cannot be read.
        """
        for name, given, kind, form in (
            ("file", file, str | os.PathLike | None, "a path (settings are keywords)"),
            ("env", env, Mapping, "a mapping, such as os.environ or {}"),
            ("ranks", ranks, int | None, "a whole number"),
        ):
            if not isinstance(given, kind):
                raise ConfigError(f"{name} must be {form}, not a {type(given).__name__}")
        extra, file = flat(extra or {}), file or env.get(ENV_FILE)
        settings = list(given_settings(overrides, file, env, extra, read))
        theirs, doubts = lmcache.named(env, extra), [*_doubts_of_names(env), *lmcache.misspelled(env)]
        if file and not any(source == f"file {file}" for _, _, source in settings):
            doubts.append(f"file {file} sets nothing: write a line such as chunk_size: 256")
        if not theirs or settings or file:
            if theirs:
                doubts.append(lmcache.not_read(theirs, [f"{key} ({source})" for key, _, source in settings]))
            return cls._of(settings, [], [(logging.WARNING, doubt) for doubt in doubts])
        translation = lmcache.translate(env, extra, read, ranks)
        translation.notes += [(logging.WARNING, doubt) for doubt in doubts]
        remarks, notes = translation.remarks(), translation.notes
        return cls._of(translation.settings, translation.readings, notes, remarks=remarks, of_lmcache=True)

    @classmethod
    def to_command(cls, words: Sequence[str], ranks: int | None = 1) -> tuple[Self, Command]:
        """Read a command line of LMCache's server or of `vllm serve`. Returns the result, and the translated command.

        `ranks`: the number of ranks of the engine, if the command's options do not set it. Raises ConfigError for any
        other command line.
        """
        command = command_lines.translated(words, ranks)
        own = list(given_settings({}, None, command.variables, {}, read_yaml))
        readings = [Reading(key, source, "used", key) for key, _, source in own if key in _OPTIONS]
        given = [*own, *command.settings]
        answer = cls._of(given, [*readings, *command.readings], command.notes, of_lmcache=True, command=command)
        if (config := answer.config) is not None:
            doubts = [
                *config.doubts_of_server(command.role, command.longest),
                *_doubts_of_port(config, command),
                *containers.doubts(command.start, config.local_disk, config.remotes, config.max_local_cpu_bytes),
            ]
            answer = evolve(answer, notes=(*answer.notes, *((logging.WARNING, doubt) for doubt in doubts)))
        return answer, command

    @classmethod
    def _of(
        cls,
        settings: Iterable[tuple[Any, object, str]],
        readings: Iterable[Reading],
        notes: Sequence[tuple[int, str]],
        *,
        remarks: Sequence[tuple[int, str]] = (),
        of_lmcache: bool = False,
        command: Command | None = None,
    ) -> Self:
        """Return the result for `settings`, each as `(key, value, source)`. A later value of a key replaces an earlier
        value.

        If `command` is given, a note names each replaced value.
        """
        values: dict[str, Any] = {}
        sources: dict[str, str] = {}
        readings = list(readings)
        own, problems = list[Reading](), [str(each) for each in readings if each.kind == "refused"]
        unknown = 0
        for key, value, source in settings:
            unknown += key not in _OPTIONS
            if unknown > lmcache.MAX_NAMES and key not in _OPTIONS:
                continue
            try:
                parsed = _parsed(_known(key, value, source), value, source)
            except ConfigError as error:
                problems.append(str(error))
                own.append(Reading(str(key), source, "refused", why=str(error).removeprefix(f"{source}: ")))
                continue
            if command is not None and key in values and values[key].value != parsed.value:
                # Merged connectors had each their own; in vLLM, too, one option replaces another.
                level = logging.WARNING if command.merged else logging.INFO
                now, before = (in_words(readable(each.value)) for each in (parsed, values[key]))
                notes = [*notes, (level, f"{key}: {now} ({source}) replaces {before} ({sources[key]})")]
            values[key], sources[key] = parsed, source
            own.append(Reading(key, source, "used", f"{key} = {in_words(readable(parsed.value))}"))
        if unknown > lmcache.MAX_NAMES:
            problems.append(f"{unknown - lmcache.MAX_NAMES} more keys are unknown")
        config = None
        try:
            config = Config(**values, sources=sources)
        except ConfigError as error:
            # A consequence of a refused setting is not a separate problem.
            refused = {each.key for each in (*own, *readings) if each.kind == "refused"} & _OPTIONS.keys()
            problems += [line for line in str(error).splitlines() if not any(key in line for key in refused)]
        more = [] if config is None or problems else list(config.doubts(() if of_lmcache else values))
        if config is not None:
            config = evolve(config, remarks=(*(remarks or notes), *more))
        found = {name: parsed.value for name, parsed in values.items()}
        shown = own
        if of_lmcache:
            bad = {each.key: each for each in own if each.kind == "refused"}
            shown = [
                evolve(bad[each.here], key=each.key) if each.here in bad else _with_value(each, found)
                for each in readings
            ]
        answer = tuple(shown), (*notes, *more), of_lmcache, tuple(problems), found
        return cls(None if problems else config, *answer)

    @property
    def status(self) -> int:
        """Exit status of a command: 2 if a setting is refused, 1 if a remark concerns what is cached, else 0."""
        matters = any(level >= logging.WARNING for level, _ in self.notes)
        return 2 if self.problems else int(matters or any(each.kind == "unknown" for each in self.readings))

    def checked(self) -> Config:
        """Return the configuration. Raises ConfigError with the texts of all problems if a setting is refused."""
        if self.config is None:
            raise ConfigError("\n".join(self.problems))
        return self.config


def _doubts_of_names(env: Mapping[str, str]) -> Iterator[str]:
    """Yield a remark for each variable that looks like lmkv's but is not read, or that has an invalid value."""
    for name in sorted(env):
        big = name.upper()
        if name != big and (big == ENV_FILE or big.removeprefix(ENV_PREFIX).lower() in _OPTIONS.keys() - {big.lower()}):
            yield f"environment {name} is not read: write {big}"
    if (level := env.get(ENV_LEVEL, "")) and level.upper() not in logging.getLevelNamesMapping():
        levels = "DEBUG, INFO, WARNING or ERROR"
        yield f"environment {ENV_LEVEL}: {short_repr(level)} is not a log level, and has no effect: write {levels}"


def _doubts_of_port(config: Config, command: Command) -> Iterator[str]:
    """Yield a remark if the agent API of an engine would use the port of vLLM's server."""
    port = (config.agent_listen or "").rpartition(":")[2]
    if port.isdecimal() and command.port in range(int(port), int(port) + command.engines):
        yield f"agent_listen {config.agent_listen}: vLLM's server uses port {command.port}: name another port"


def _with_value(reading: Reading, values: Mapping[str, object]) -> Reading:
    name = reading.here
    return evolve(reading, here=f"{name} = {in_words(readable(values[name]))}") if name in values else reading


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


def _known(key: Any, value: object, source: str) -> Attribute[Any]:
    if key in _OPTIONS:
        return _OPTIONS[key]
    visible = "'***'" if isinstance(key, str) and SECRET.search(key[:100]) else short_repr(typed(value))
    if isinstance(value, Mapping | list):
        # A password may be in it.
        visible = "{...}" if isinstance(value, Mapping) else "[...]"
    raise ConfigError(f"{source}: unknown key {short_repr(key)} = {visible}{hint(key, value, _OPTIONS)}")
