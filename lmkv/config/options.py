"""`Options`: every setting of lmkv, with its name, type, default, unit and meaning."""

from __future__ import annotations

import re
from collections.abc import Mapping
from functools import partial
from types import MappingProxyType
from typing import Any, Final, Literal, TypeVar

from attrs import Attribute, field, fields, frozen

from lmkv.config.advice import written_instead
from lmkv.config.parsers import (
    GIB,
    Parse,
    Quota,
    Secret,
    agent_address,
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
from lmkv.config.sources import KEYWORD
from lmkv.config.urls import RemoteURL, urls
from lmkv.errors import ConfigError, short_repr
from lmkv.policies import ADMISSIONS, POLICIES, policy_names

DEFAULT: Final = "default"

_T = TypeVar("_T")


def _option(default: _T, parse: Parse, doc: str, unit: str = "") -> _T:
    """Return a field of `Options`. `parse`: a function that converts a value as users write it, and raises ValueError
    with the reason.
    """
    option: _T = field(default=default, metadata={"parse": parse, "doc": doc, "unit": unit})
    return option


def _converting(_: type, attributes: list[Attribute[Any]]) -> list[Attribute[Any]]:
    """Make the `parse` function of each option the converter of its field, with the field's name in error messages."""
    return [
        each.evolve(converter=partial(_converted, each)) if "parse" in each.metadata else each for each in attributes
    ]


@frozen
class Parsed:
    """A value that a setting's `parse` function has returned."""

    value: object


def _converted(option: Attribute[Any], value: object) -> object:
    """Return the parsed value, or the error about it, so that the constructor can raise one error for all settings."""
    try:
        return (value if isinstance(value, Parsed) else parse(option, value, KEYWORD)).value
    except ConfigError as error:
        return error


def parse(option: Attribute[Any], value: object, source: str) -> Parsed:
    """Return the value of an option from a value as users write it. Raises ConfigError with the option's name."""
    try:
        return Parsed(option.metadata["parse"](value))
    except ValueError as error:
        visible = "'***'" if option.metadata["parse"] is secret else short_repr(value)
        advice = "" if "quotes" in str(error) else written_instead(option.metadata["unit"], value)
        size = f"max_{option.name}_size"
        has_size = isinstance(value, Mapping) or re.match("'?[0-9]", visible)
        advice += f"; write the size as {size}" if size in OPTIONS and has_size else ""
        raise ConfigError(f"{source}: {option.name} = {visible} {error}{advice}") from None


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
class Options:
    """The values of all settings. `Config`, which adds the sources and the checks, is the class for users.

    Immutable, so any number of threads may share it.
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
        "Percent of each tier to keep for a tenant, such as alice=40. The name of a tenant is a cache_salt, the label "
        "of a cache_salt, or a tag as name:value",
    )
    save_decode_cache: bool = _option(True, boolean, "Also store chunks of generated tokens")
    save_unfull_chunk: bool = _option(True, boolean, "Also store and find the tokens after a prompt's last whole chunk")
    state_interval: int = _option(
        0, integer(0), "Number of chunks between two stored states of recurrent layers; 0: lmkv chooses"
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
        "Threads that read from each lower tier; three quarters of them also write. By default at most 4 per core, "
        "or 2 per core if the lowest tier is shared memory",
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
        30.0,
        number(0),
        "Longest time that a request waits for lower tiers. No wait is longer than computing the tokens takes",
        "s",
    )
    load_or_recompute: bool = _option(
        True, boolean, "Compute tokens if lmkv has measured that loading them takes longer; false: always load"
    )
    load_mode: Literal["auto", "sync", "async"] = _option(
        "auto",
        one_of("auto", "sync", "async"),
        "sync: load from host memory within the step that uses the KV; async: between steps; auto: within the step, or "
        "on a GPU between steps if other requests would wait over 5 ms. With asynchronous scheduling, lmkv always "
        "loads between steps",
    )
    use_layerwise: bool = _option(
        False, boolean, "Copy one layer while the model computes another; vLLM then cuts its CUDA graphs at each layer"
    )
    block_major: bool = _option(
        True, boolean, "On CUDA devices, ask vLLM to keep all layers of a block next to each other in memory"
    )
    device_staging_size: float = _option(
        1.0,
        number(0, above=True),
        "Buffer on each device through which lmkv stores KV; loads use a second buffer, a quarter as large",
        "GiB",
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
    """The source of each value, by the name of the setting. `Config.load` fills this mapping."""

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
    def keeps_nothing(self) -> bool:
        """Whether no tier keeps chunks after the end of the request that stored them."""
        disk = self.local_disk and self.disk_admission != "none"
        return not (self.local_cpu or self.shared_memory or disk or self.remotes)

    def source(self, name: str) -> str:
        """Return the source of a setting's value, such as "default" or "environment LMKV_CHUNK_SIZE"."""
        is_default = getattr(self, name) == OPTIONS[name].default
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
            for name, option in OPTIONS.items()
        ]

    def about(self, name: str, reason: str) -> str:
        """Return a message about the value of the setting `name`, with its source. A secret is masked."""
        value = readable(getattr(self, name))
        return f"{self.source(name)}: {name} = {short_repr(value)} {reason}"


OPTIONS: Final[Mapping[str, Attribute[Any]]] = MappingProxyType(
    {option.name: option for option in fields(Options) if "parse" in option.metadata}
)
"""All settings by name, in the order of their definition."""
