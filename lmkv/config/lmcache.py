"""Translates LMCache's settings into lmkv's settings, by the table in lmcache.toml."""

from __future__ import annotations

import difflib
import functools
import json
import logging
import re
import tomllib
from collections.abc import Callable, Container, Iterable, Iterator, Mapping, Sequence
from importlib.resources import files
from pathlib import Path
from types import MappingProxyType
from typing import Any, Final

from attrs import define, field, frozen

from lmkv.config import addresses
from lmkv.config.parsers import NOTHING, Kind, Reading, boolean, is_nothing
from lmkv.errors import ConfigError, short_repr

EXTRA: Final = "kv_connector_extra_config"
VARIABLE: Final = "environment "
PREFIX: Final = "lmcache."
ENV_PREFIX: Final = "LMCACHE_"
ENV_FILE: Final = "LMCACHE_CONFIG_FILE"
PLAIN: Final = frozenset({"discard_partial_chunks", "skip_last_n_tokens", "lmcache_rpc_port", "use_native"})
"""Keys that LMCache reads in `kv_connector_extra_config` without the prefix `lmcache.`."""

# Kubernetes sets such variables in every pod for a service whose name begins with "lmkv" or "lmcache".
SERVICE_LINK: Final = re.compile(
    r"(LMKV|LMCACHE)_(\w{1,80}_)?(SERVICE_(HOST|PORT\w{0,80})|PORT(_\d{1,5}_(TCP|UDP|SCTP)\w{0,80})?)"
)

_INNER: Final = "extra_config."
_PER_RANK: Final = ("max_local_cpu_size", "max_local_disk_size")
_OFF: Final = NOTHING | {"[]", "{}"}
MAX_NAMES: Final = 20
"""Largest number of names in one message."""

_Read = Callable[[Path], Mapping[Any, object]]
_Given = dict[Any, tuple[object, str]]


@frozen(kw_only=True)
class KnownSetting:
    """One setting of LMCache, from lmcache.toml.

    `kind`: mapped (to a setting of lmkv), joined (part of lmkv's `remote_url`), refused or without_effect. `setting`:
    the name of lmkv's setting. `off`: a value that switches the setting off. `needs`: another setting of LMCache;
    unless it is set, this setting has no effect.
    """

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
        """Return whether this value has no effect, given all other settings."""
        can_be_off = self.off or self.kind == "refused"
        return bool(
            self.kind == "without_effect" or self._is_alone(given) or (can_be_off and _word(value) in _OFF | {self.off})
        )

    def idle_because(self, given: _Given) -> str:
        """Return the reason why a value of this setting has no effect, given all other settings."""
        if self.kind == "without_effect":
            return self.why
        if self.kind == "joined":
            return "remote_url names another kind of store"
        return f"{self.needs} is not set" if self._is_alone(given) else "the option is switched off"

    def _is_alone(self, given: _Given) -> bool:
        return bool(self.needs) and _word(given.get(self.needs, (None, ""))[0]) in _OFF

    def convert(self, value: object, source: str) -> tuple[str, object, str]:
        """Return the corresponding setting of lmkv as `(name, value, source)`."""
        if self.several and isinstance(value, str) and "," in value:
            raise ConfigError(f"{source}: {self.key} = {short_repr(value)} names several folders: {self.several}")
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
    """The result of a translation of LMCache's settings: lmkv's settings, and the meaning of each given setting."""

    settings: list[tuple[str, object, str]] = field(factory=list)
    """lmkv's settings as `(key, value, source)`."""
    readings: list[Reading] = field(factory=list)
    """The meaning in lmkv of each given setting. The settings that lmkv uses are also in `settings`."""
    notes: list[tuple[int, str]] = field(factory=list)
    """Further remarks, each with its log level."""

    def add(self, key: str, source: str, kind: Kind, *, here: str = "", why: str = "") -> None:
        """Add a `Reading`, the meaning of one setting. The arguments are the fields of `Reading`."""
        self.readings.append(Reading(key, source, kind, here, why))

    def warn(self, text: str) -> None:
        self.notes.append((logging.WARNING, text))

    def inform(self, text: str) -> None:
        self.notes.append((logging.INFO, text))

    def of(self, kind: Kind) -> list[Reading]:
        return [reading for reading in self.readings if reading.kind == kind]

    def remarks(self) -> list[tuple[int, str]]:
        """Return `(log level, remark)` pairs. A remark is about one setting, or about several settings together."""
        unknown = [f"{each.key} ({each.source})" for each in self.of("unknown")]
        remarks = [
            (logging.INFO, "these LMCache settings have no effect", [each.key for each in self.of("without effect")]),
            (logging.WARNING, "lmkv ignores unknown settings of LMCache", unknown),
        ]
        return [*((level, f"{text}: {join_names(names)}") for level, text, names in remarks if names), *self.notes]


@functools.cache
def table() -> Mapping[str, KnownSetting]:
    """Return all settings of LMCache that lmkv knows, by key."""
    return _entries(_read_table("lmcache.toml"))


@functools.cache
def commands() -> Mapping[str, Mapping[str, KnownSetting]]:
    """Return, by the name of a group, the options in commands.toml.

    The groups are LMCache's `server`, vLLM's own `offloading`, and `tiers`, the lower tiers of both.
    """
    return MappingProxyType({name: _entries(groups) for name, groups in _read_table("commands.toml").items()})


def _read_table(name: str) -> dict[str, Any]:
    return tomllib.loads((files("lmkv.config") / name).read_text("utf-8"))


def _entries(groups: dict[str, Any]) -> Mapping[str, KnownSetting]:
    entries = [KnownSetting(key=key, kind="mapped", **row) for key, row in groups.pop("mapped").items()]
    for kind, rows in groups.items():
        entries += [KnownSetting(kind=kind, key=key, **row) for row in rows for key in row.pop("keys")]
    return MappingProxyType({entry.key: entry for entry in entries})


def owns(name: object) -> bool:
    """Return whether a key of `kv_connector_extra_config` belongs to LMCache."""
    return isinstance(name, str) and (name.startswith(PREFIX) or name in PLAIN)


def named(env: Mapping[str, str], extra: Mapping[Any, object]) -> list[str]:
    """Return the names of LMCache's settings that are set: variables, then keys of `kv_connector_extra_config`."""
    variables = [name for name in sorted(env) if name.startswith(ENV_PREFIX) and (name != ENV_FILE or env[name])]
    known = [name for name in variables if key_of(name) in table() or not is_service_link(name, env[name])]
    return known + [name for name in extra if owns(name)]


def is_service_link(name: str, value: str) -> bool:
    """Return whether Kubernetes has set the variable `name` for a service.

    A variable `NAME_PORT` is from Kubernetes only if its value has `://`, because a user may set it to a number.
    """
    plain = name.endswith("_PORT") and not name.endswith("_SERVICE_PORT")
    return bool(SERVICE_LINK.fullmatch(name)) and (not plain or "://" in value)


def not_read(names: Sequence[str], own: Sequence[str]) -> str:
    """Return a remark that LMCache's settings `names` are not read, because lmkv's settings `own` are set."""
    way_out = "convert LMCache's with lmkv config migrate, or remove lmkv's"
    return f"lmkv does not read LMCache's settings {join_names(names)}, because of lmkv's {join_names(own)}: {way_out}"


def files_of(settings: Iterable[tuple[Any, object, str]], ours: Container[str]) -> list[str]:
    """Return the files that have a key that only LMCache knows, but no key that only lmkv knows.

    `settings`: each as `(key, value, source)`. `ours`: the names of lmkv's settings.
    """
    found = {key: source for key, _, source in settings if source.startswith("file ")}
    mixed = {source for key, source in found.items() if key in ours and key not in table()}
    return [source for key, source in found.items() if key in table() and key not in ours and source not in mixed]


def misspelled(env: Iterable[str]) -> Iterator[str]:
    """Yield a remark for each variable whose name is similar to the name of a variable that LMCache reads."""
    for name in sorted(env):
        found = re.fullmatch(r"(?i)lm_?cache_(\w+)", name)
        right = ENV_PREFIX + found[1].upper() if found else name
        if right != name and (key_of(right) in table() or right == ENV_FILE):
            yield f"environment {name} is not read: write {right}"


def translate(
    env: Mapping[str, str], extra: Mapping[Any, object], read: _Read, ranks: int | None = None
) -> Translation:
    """Translate all settings of LMCache that are set.

    `read`: a function that returns the content of a YAML file. `ranks`: the number of ranks of the engine.
    """
    result = Translation()
    given = _flat(_merged(env, extra, read, result), result)
    strange = {source for _, source in given.values()} - {given[key][1] for key in given.keys() & table().keys()}
    _say_segments(given, result, ranks)
    # remote_url stays among the given, as other settings have no effect without it.
    translated = _join_address(given, result)
    if env.get(_MOONCAKE) and str(given.get("remote_url", ("", ""))[0]).startswith("mooncake"):
        result.warn(f"{_MOONCAKE} is not read: write that file's settings into extra_config")
    _drop_disk_without_room(given, result)
    _drop_memory_of_nothing(given, result)
    _multiply_sizes(given, result, ranks)
    for key, entry in [(key, entry) for key, entry in table().items() if key in given and key not in translated]:
        value, source = given[key]
        if entry.is_idle(value, given):
            result.add(key, source, "without effect", why=entry.idle_because(given))
        elif entry.kind == "refused":
            result.add(f"LMCache's {key}", source, "refused", why=entry.why)
        else:
            try:
                result.settings.append(entry.convert(value, source))
            except ConfigError as error:
                result.add(key, source, "refused", why=str(error).removeprefix(f"{source}: "))
            else:
                result.add(key, source, "used", here=entry.setting)
    unknown = [key for key in given if key not in table()]
    for number, key in enumerate(unknown):
        value, source = given[key]
        section = isinstance(value, Mapping) and not table().keys().isdisjoint(value)
        if (section or source in strange) and source.startswith("file "):
            # Nobody means to have a file, or a section of settings, of which nothing is read: as in lmkv's own file.
            result.settings.append((key, value, source))
            result.add(short_repr(key), source, "used", here=str(key))
        elif "endpoint" in key and "s3" in f"{key}{given.get('remote_url', ('',))[0]}".lower():
            # LMCache ignores it as well. Requests would go to a bucket of the same name at AWS.
            why = "LMCache has no such setting: write remote_url: s3://BUCKET?endpoint=https://HOST:PORT&region=REGION"
            result.add(short_repr(key), source, "refused", why=why)
        else:
            why = hint(key, table()) if number < MAX_NAMES else ""
            result.add(short_repr(key), source, "unknown", why=why)
    return result


_MOONCAKE: Final = "MOONCAKE_CONFIG_PATH"


def hint(name: object, known: Mapping[str, KnownSetting]) -> str:
    """Return a hint for an unknown name: the most similar known name, and whether that setting has an effect.

    Returns "" if no name is similar.
    """
    if not (close := nearest(name, known)):
        return ""
    more = {"refused": ", which cannot be used", "without_effect": ", which has no effect"}
    return f"did you mean {close}{more.get(known[close].kind, '')}?"


def nearest(name: object, names: Iterable[str], cutoff: float = 0.7) -> str:
    """Return the name in `names` that is most similar to `name`, or "" if none is similar. Takes milliseconds."""
    short = {each.removeprefix(_INNER): each for each in names}
    close = difflib.get_close_matches(str(name).removeprefix(_INNER)[:100], short, n=1, cutoff=cutoff)
    return short[close[0]] if close else ""


def _join_address(given: _Given, result: Translation) -> set[str]:
    """Translate remote_url, together with the keys of `extra_config` that LMCache reads for such a store.

    Returns the names of the translated settings: `remote_url` if its value is an address, else none.
    """
    for name in ("username", "password"):
        # Variables of the environment, which are weaker.
        if (value := given.pop(f"resp_{name}", None)) is not None:
            given.setdefault(f"{_INNER}{name}", value)
    _complete_resp(given)
    joined = {key for key in given if key.removeprefix(_INNER) in addresses.ALL_KEYS and key.startswith(_INNER)}
    url, source = given.get("remote_url", (None, ""))
    address = url if isinstance(url, str) and "://" in url else ""
    used = {key for key in joined if key.removeprefix(_INNER) in addresses.keys_of(address)}
    if address:
        try:
            found = addresses.translated(address, {key.removeprefix(_INNER): given[key][0] for key in used})
        except addresses.RefusedError as error:
            result.add("LMCache's remote_url", source, "refused", why=str(error))
        else:
            result.settings += [(name, value, f"{source}: remote_url") for name, value in found.items()]
            for key in ("remote_url", *sorted(used)):
                here = addresses.setting_of(key.removeprefix(_INNER))
                if _word(given[key][0]) in _OFF:
                    result.add(key, given[key][1], "without effect", why="the value is off or empty")
                    continue
                result.add(key, given[key][1], "used", here=here if here in found else "remote_url")
    for key in joined:
        _, source = given.pop(key)
        if key not in used:
            result.add(key, source, "without effect", why=table()[key].idle_because(given))
    return {"remote_url"} if address else set()


def _complete_resp(given: _Given) -> None:
    """Add host and port from the environment to a `resp` address without a host, as LMCache does."""
    url, source = given.get("remote_url", (None, ""))
    host, port = (given.get(f"resp_{name}", ("",))[0] for name in ("host", "port"))
    if isinstance(url, str) and url.lower().startswith("resp://") and host and url[7:].strip("/") == "":
        given["remote_url"] = f"resp://{host}{f':{port}' if port else ''}", source


def _drop_disk_without_room(given: _Given, result: Translation) -> None:
    """Ignore the disk tier if its size is 0 GiB, as LMCache does."""
    size, folder = given.get("max_local_disk_size"), given.get("local_disk")
    if size is not None and _word(size[0]) in ("0", "0.0") and folder is not None and not is_nothing(folder[0]):
        for key in ("local_disk", "max_local_disk_size"):
            result.add(key, given.pop(key)[1], "without effect", why="max_local_disk_size is 0")
        result.warn("lmkv uses no local_disk, because max_local_disk_size is 0, as in LMCache")


def _drop_memory_of_nothing(given: _Given, result: Translation) -> None:
    """Ignore a host memory size of 0 GiB if `local_cpu` is off, because lmkv needs some host memory as a buffer."""
    size, kept = given.get("max_local_cpu_size"), given.get("local_cpu")
    if size is not None and kept is not None and _word(size[0]) in ("0", "0.0") and _word(kept[0]) == "false":
        why = "local_cpu is off; lmkv still needs a buffer, and takes its default of 5 GiB"
        result.add("max_local_cpu_size", given.pop("max_local_cpu_size")[1], "without effect", why=why)


def _multiply_sizes(given: _Given, result: Translation, ranks: int | None) -> None:
    """Multiply sizes by the number of ranks, because LMCache's sizes are per rank and lmkv's are per engine."""
    for key in [key for key in _PER_RANK if key in given and ranks != 1]:
        value, source = given[key]
        try:
            each = float(str(value))
        except ValueError:
            # The parser says what is wrong with it.
            continue
        if not each > 0 or table()[key].is_idle(value, given):
            continue
        if ranks is None:
            words = "LMCache takes this size per rank, lmkv per engine; --tensor-parallel-size N multiplies it"
        else:
            given[key] = each * ranks, source
            words = f"LMCache takes {each:g} GiB for each of {ranks} ranks, lmkv {each * ranks:g} GiB for all together"
        result.inform(f"{key}: {words}")


def _say_segments(given: _Given, result: Translation, ranks: int | None) -> None:
    if (key := f"{_INNER}global_segment_size") in given and ranks != 1:
        told = "in LMCache each rank gives Mooncake this much memory, in lmkv all ranks together: multiply by the ranks"
        result.inform(f"{key}: {told}")


def _merged(env: Mapping[str, str], extra: Mapping[Any, object], read: _Read, result: Translation) -> _Given:
    """Return the value and source of each key.

    As in LMCache, the environment overrides the file, and `extra` overrides both.
    """
    found: _Given = {}
    for name in named(env, extra):
        if owns(name):
            found[name.removeprefix(PREFIX)] = extra[name], EXTRA
        elif name != ENV_FILE:
            # LMCache strips quotes that a shell or a YAML file has left.
            found[key_of(name)] = env[name].strip("\"'"), f"{VARIABLE}{name}"
    file = env.get(ENV_FILE)
    try:
        below = {key: (value, f"file {file}") for key, value in read(Path(file)).items()} if file else {}
    except ConfigError as error:
        why = str(error).removeprefix(f"file {file}: ")
        result.add(ENV_FILE, f"file {file}", "refused", why=why)
        return found
    return below | found


def _flat(found: _Given, result: Translation) -> _Given:
    """Return the settings in `found`, with each key inside `extra_config` as a separate setting."""
    inner, source = found.pop("extra_config", (None, ""))
    if isinstance(inner, str):
        try:
            inner = json.loads(inner or "null")
        except (ValueError, RecursionError):
            inner = ()
    if not isinstance(inner, dict | None):
        why = "the value must be a mapping, or a JSON object in a variable of the environment"
        result.add("extra_config", source, "refused", why=why)
        inner = {}
    keys = {key if isinstance(key, str) else short_repr(key): value for key, value in (inner or {}).items()}
    return found | {f"extra_config.{key}": (value, source) for key, value in keys.items()}


def key_of(variable: str) -> str:
    return variable.removeprefix(ENV_PREFIX).lower()


def _word(value: object) -> str:
    return short_repr(value).strip("' ").lower()


def join_names(names: Sequence[str]) -> str:
    more = f" and {len(names) - MAX_NAMES} more" if len(names) > MAX_NAMES else ""
    return ", ".join(names[:MAX_NAMES]) + more
