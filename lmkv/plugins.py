"""Loads backends and policies of other packages, by entry points or by names such as `package.module:Class`.

An installed package lists backends in the entry point group `lmkv.backends`, by the scheme of their URLs, and eviction
policies in `lmkv.policies`, by name. lmkv imports such an object only when a setting uses it.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from importlib import import_module
from importlib.metadata import entry_points
from typing import Any, Final

from lmkv.errors import ConfigError, mask_secrets, safe_repr

BACKENDS: Final = "lmkv.backends"
POLICIES: Final = "lmkv.policies"

_PLACE = re.compile(r"[A-Za-z_]\w*(\.\w+)*:[A-Za-z_]\w*")


def is_place(text: str) -> bool:
    """Return whether a text has the form of a place, `package.module:Class`, which names an object.

    >>> is_place("my_tiers.sqlite:SQLiteStore"), is_place("redis://host")
    (True, False)
    """
    return _PLACE.fullmatch(text) is not None


def installed(group: str) -> Mapping[str, str]:
    """Return the entry points of installed packages in a group: for each name the place `package.module:Class`."""
    return {found.name: found.value for found in entry_points(group=group)}


def load(place: str, wanted_by: str) -> Any:
    """Return the object at `place`, which has the form `package.module:Class`.

    Raises ConfigError if the import fails. The message names the place, and the setting `wanted_by`.
    """
    module, _, name = place.partition(":")
    try:
        return getattr(import_module(module), name)
    except ConfigError:
        raise
    except Exception as error:
        why = f"{safe_repr(error)}; install the package, or correct the name"
        raise ConfigError(f"{wanted_by}: {place} cannot be loaded: {why}") from error


def make(place: str, wanted_by: str, kind: type[Any], *args: Any, **options: Any) -> Any:
    """Return a new object of the class at `place` (`package.module:Class`), or the result of the function at `place`.

    Raises ConfigError if the object cannot be made, or if the object lacks methods of the protocol `kind`. `wanted_by`:
    the setting that names the place.
    """
    found = load(place, wanted_by)
    try:
        made = found(*args, **options)
    except ConfigError:
        raise
    except Exception as error:  # noqa: BLE001
        # Its message and its traceback may have the password of a URL.
        raise ConfigError(f"{wanted_by}: {place} cannot be made: {mask_secrets(safe_repr(error))}") from None
    if not isinstance(made, kind):
        raise ConfigError(f"{wanted_by}: {place} lacks methods of lmkv.protocols.{kind.__name__}: add them")
    return made
