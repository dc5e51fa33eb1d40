"""Advice for error messages: what to write instead of an invalid value or an unknown key."""

from __future__ import annotations

import re
from collections.abc import Collection, Mapping
from typing import Final

from lmkv.chunks.namespace import MIN_KEY_BYTES
from lmkv.config import lmcache
from lmkv.config.parsers import GIB
from lmkv.config.sources import ENV_FILE, ENV_PREFIX
from lmkv.config.urls import SCHEMES
from lmkv.errors import short_repr

_UNITS: Final[Mapping[str, Mapping[str, float]]] = {
    "GiB": {"k": 2.0**-20, "m": 2.0**-10, "g": 1, "t": 1024},
    "s": {"ms": 0.001, "s": 1, "m": 60, "min": 60, "h": 3600, "d": 86_400},
    "0..1": {"%": 0.01, "": 0.01},
    "tokens": {"k": 1024},
}
"""For each unit of a setting, the units that people write. The number says how many of the setting's unit make one
of these.
"""


def written_instead(unit: str, value: object) -> str:
    """Return advice for an invalid value: the setting's unit and, if the value has another unit, the right number."""
    text = short_repr(value).strip("' ").lower()
    told = f", in {'seconds' if unit == 's' else unit}" if unit.isalpha() else ""
    if text in ("none", "", "auto", "default") or (unit == "GiB" and text in ("0", "0.0")):
        return f"{told}; leave the setting out for its default"
    if re.fullmatch(r"\$\{?\w+\}?", text):
        return f"{told}; nothing replaces this variable: write its value"
    if re.fullmatch(r""""[^"]*"|'[^']*'""", text):
        return f"{told}, without quotes inside the value"
    if unit == "GiB" and re.fullmatch(r"[0-9]{7,18}", text):
        return f", in GiB: if these are bytes, write {int(text) / GIB:g}"
    if re.fullmatch(r"[0-9]{1,15},([0-9]{1,2}|[0-9]{4,9})", text):
        return f"{told}, with a point: {text.replace(',', '.')}"
    if found := re.fullmatch(r"([0-9]{1,15}(?:\.[0-9]{1,9})?)\s*([a-z]*|%)", text):
        word = found[2].removesuffix("b").removesuffix("i") if unit == "GiB" else found[2]
        if factor := _UNITS.get(unit, {}).get(word):
            form = "as a share" if unit == "0..1" else "without a unit"
            return f"{told}, {form}: {float(found[1]) * factor:.12g}"
    return told


def unfit_key(key: bytes) -> str:
    """Return the reason why `key` cannot be an authentication key, or "" if it can be."""
    if is_path(key):
        return "is a path: name the file of the key in authentication_key_file"
    if PLACEHOLDER.search(key):
        return "has a placeholder instead of a key: make one with openssl rand -hex 32"
    if len(key) >= MIN_KEY_BYTES:
        return ""
    return f"has {len(key)} bytes, fewer than {MIN_KEY_BYTES}: make a key with openssl rand -hex 32"


def is_path(secret: bytes) -> bool:
    """Return whether a secret looks like a path. A 32-byte key in base64 does not, because it ends with `=`."""
    return bool(re.fullmatch(rb"[~.]{0,2}/[\w.-]+(/[\w.-]+)+", secret))


PLACEHOLDER: Final = re.compile(
    rb"(?i)replace|change.?me|placeholder|openssl|your.?(secret|key|token)|<[^>]*>|\$\{|\{\{"
)


def hint(key: object, value: object, names: Collection[str]) -> str:
    if not isinstance(key, str) or len(key) > 100:
        return "; a key must be the name of a setting"
    if key in ("kv_connector", "kv_connector_extra_config"):
        return "; give only the content of kv_connector_extra_config"
    if key.startswith("kv_"):
        return "; this key is vLLM's: write it beside kv_connector, outside kv_connector_extra_config"
    name = key.removeprefix(lmcache.PREFIX)
    theirs = lmcache.table().get(name) or lmcache.table().get(f"extra_config.{name}")
    plain = name.lower().removeprefix(ENV_PREFIX.lower())
    own = name == key and not (theirs and theirs.setting) and not isinstance(value, Mapping)
    if own and (meant := _meant(plain, names)):
        return f"; did you mean {meant!r}?"
    if theirs and (name != key or name not in names):
        return f"; this key is LMCache's: {f'write {theirs.setting!r}' if theirs.setting else theirs.why}"
    if entry := lmcache.commands()["offloading"].get(name):
        unit = ", in GiB" if entry.setting.endswith("_size") else ""
        here = f"write {entry.setting!r}{unit}" if entry.setting else "remove the key"
        return f"; this key is an option of vLLM's own offloading: {here}"
    if plain.startswith("config") or plain.endswith("config_file"):
        return f"; name a file of settings in {ENV_FILE}, or to Config.load as file="
    if isinstance(value, Mapping):
        words = [plain if each in ("path", "folder", "dir") else f"{plain}_{each}" for each in list(value)[:9]]
        if found := [meant for word in words if (meant := _meant(word, names))]:
            return f"; lmkv has no sections: write {' and '.join(found)}"
    if isinstance(value, Mapping) or plain == "lmkv":
        return f"; lmkv has no sections: write the settings of the section without {short_repr(key)} above them"
    close = lmcache.nearest(plain, names)
    return f"; did you mean {close!r}?" if close else ""


def _meant(key: str, names: Collection[str]) -> str:
    """Return the shortest setting name that contains all words of `key`, or "". Store names count as the word
    "remote".
    """
    words = {"remote" if word in SCHEMES.keys() - {"file"} else word for word in key.split("_")}
    return min((name for name in names if words <= {*name.split("_")}), key=lambda name: name.count("_"), default="")
