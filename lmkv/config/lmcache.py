"""Translates LMCache's settings into lmkv's, by the table in lmcache.toml."""

from __future__ import annotations

import functools
import json
import logging
import re
import tomllib
from collections.abc import Callable, Mapping, Sequence
from importlib.resources import files
from pathlib import Path
from types import MappingProxyType
from typing import Any, Final

from attrs import define, field, frozen

from lmkv.config.parsers import NOTHING, boolean
from lmkv.errors import ConfigError, short_repr

EXTRA: Final = "kv_connector_extra_config"
VARIABLE: Final = "environment "
PREFIX: Final = "lmcache."
ENV_PREFIX: Final = "LMCACHE_"
ENV_FILE: Final = "LMCACHE_CONFIG_FILE"
PLAIN: Final = frozenset({"discard_partial_chunks", "skip_last_n_tokens", "lmcache_rpc_port"})
"""Keys that LMCache reads in `kv_connector_extra_config` without its prefix."""

# Kubernetes sets such variables in every pod for a service whose name begins with "lmkv" or "lmcache".
SERVICE_LINK: Final = re.compile(
    r"(LMKV|LMCACHE)_(\w{1,80}_)?(SERVICE_(HOST|PORT\w{0,80})|PORT(_\d{1,5}_(TCP|UDP|SCTP)\w{0,80})?)"
)

_OFF: Final = NOTHING | {"[]", "{}"}
_MAX_NAMES: Final = 20
"""Names in one message."""

_Read = Callable[[Path], Mapping[Any, object]]
_Given = dict[Any, tuple[object, str]]


@frozen(kw_only=True)
class KnownSetting:
    """One key of LMCache's, as lmcache.toml says. `kind`: mapped, refused or without_effect."""

    key: str
    kind: str
    setting: str = ""
    default: str = ""
    note: str = ""
    why: str = ""
    off: str = ""
    needs: str = ""
    several: str = ""
    values: Mapping[str, object] = field(factory=dict)

    def is_idle(self, value: object, given: _Given) -> bool:
        """Whether this value has no effect beside the others."""
        can_be_off = self.off or self.kind == "refused"
        alone = self.needs and _word(given.get(self.needs, (None, ""))[0]) in _OFF
        return bool(self.kind == "without_effect" or alone or (can_be_off and _word(value) in _OFF | {self.off}))

    def convert(self, value: object, source: str) -> tuple[str, object, str]:
        """lmkv's name and value, and their source."""
        if self.several and isinstance(value, str) and "," in value:
            raise ConfigError(f"{source}: {self.key} = {short_repr(value)} names several: {self.several}")
        where = source if self.key == self.setting or source.startswith(VARIABLE) else f"{source}: {self.key}"
        return self.setting, self._value(value, source), where

    def _value(self, value: object, source: str) -> object:
        if not self.values:
            return value
        try:
            truth = boolean(value)
        except ValueError as error:
            raise ConfigError(f"{source}: {self.key} = {short_repr(value)} {error}") from None
        return self.values[str(truth).lower()]


@define
class Translation:
    """LMCache's settings in lmkv's names, and those that could not be translated."""

    settings: list[tuple[str, object, str]] = field(factory=list)
    """`(key, value, source)`."""
    without_effect: list[str] = field(factory=list)
    unknown: list[str] = field(factory=list)
    refused: list[tuple[str, str]] = field(factory=list)
    """`(key, source)`."""

    def remarks(self) -> list[tuple[int, str]]:
        """Remarks for the user's log, with their levels."""
        remarks = [
            (logging.INFO, "settings of LMCache without effect here", self.without_effect),
            (logging.WARNING, "unknown settings of LMCache, ignored", self.unknown),
        ]
        return [(level, f"{text}: {join_names(names)}") for level, text, names in remarks if names]

    def check(self) -> None:
        """Raise ConfigError for refused settings, without values, because a URL may have a password in it."""
        reasons = [f"{source}: LMCache's {key} cannot be used: {table()[key].why}" for key, source in self.refused]
        if reasons:
            raise ConfigError("\n".join(reasons))


@functools.cache
def table() -> Mapping[str, KnownSetting]:
    """All known settings of LMCache, by key."""
    groups = tomllib.loads((files("lmkv.config") / "lmcache.toml").read_text("utf-8"))
    entries = [KnownSetting(key=key, kind="mapped", **row) for key, row in groups.pop("mapped").items()]
    for kind, rows in groups.items():
        entries += [KnownSetting(kind=kind, key=key, **row) for row in rows for key in row.pop("keys")]
    return MappingProxyType({entry.key: entry for entry in entries})


def owns(name: object) -> bool:
    """Whether a key of `kv_connector_extra_config` is LMCache's."""
    return isinstance(name, str) and (name.startswith(PREFIX) or name in PLAIN)


def named(env: Mapping[str, str], extra: Mapping[Any, object]) -> list[str]:
    """Names of LMCache's settings that are given: variables, then keys of the extra configuration."""
    variables = [name for name in sorted(env) if name.startswith(ENV_PREFIX) and (name != ENV_FILE or env[name])]
    known = [name for name in variables if _key(name) in table() or not SERVICE_LINK.fullmatch(name)]
    return known + [name for name in extra if owns(name)]


def translate(env: Mapping[str, str], extra: Mapping[Any, object], read: _Read) -> Translation:
    """Translate all given settings of LMCache. `read` gives the content of a YAML file."""
    given = _flat(_merged(env, extra, read))
    result = Translation()
    for key, entry in [(key, entry) for key, entry in table().items() if key in given]:
        value, source = given[key]
        if entry.is_idle(value, given):
            result.without_effect.append(key)
        elif entry.kind == "refused":
            result.refused.append((key, source))
        else:
            result.settings.append(entry.convert(value, source))
    result.unknown = [f"{short_repr(key)} ({source})" for key, (_, source) in given.items() if key not in table()]
    return result


def _merged(env: Mapping[str, str], extra: Mapping[Any, object], read: _Read) -> _Given:
    """Value and source of each key. As in LMCache: file, environment, extra configuration, the later the stronger."""
    found: _Given = {}
    for name in named(env, extra):
        if owns(name):
            found[name.removeprefix(PREFIX)] = extra[name], EXTRA
        elif name != ENV_FILE:
            # LMCache strips quotes that a shell or a YAML file has left.
            found[_key(name)] = env[name].strip("\"'"), f"{VARIABLE}{name}"
    file = env.get(ENV_FILE)
    below = {key: (value, f"file {file}") for key, value in read(Path(file)).items()} if file else {}
    return below | found


def _flat(found: _Given) -> _Given:
    """The same settings, with each key of `extra_config` as its own setting."""
    inner, source = found.pop("extra_config", (None, ""))
    if isinstance(inner, str):
        try:
            inner = json.loads(inner or "null")
        except (ValueError, RecursionError):
            inner = ()
    if not isinstance(inner, dict | None):
        raise ConfigError(f"{source}: extra_config must be a mapping, in the environment as JSON")
    keys = {key if isinstance(key, str) else short_repr(key): value for key, value in (inner or {}).items()}
    return found | {f"extra_config.{key}": (value, source) for key, value in keys.items()}


def _key(variable: str) -> str:
    return variable.removeprefix(ENV_PREFIX).lower()


def _word(value: object) -> str:
    return short_repr(value).strip("' ").lower()


def join_names(names: Sequence[str]) -> str:
    more = f" and {len(names) - _MAX_NAMES} more" if len(names) > _MAX_NAMES else ""
    return ", ".join(names[:_MAX_NAMES]) + more
