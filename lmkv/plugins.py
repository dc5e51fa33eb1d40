"""Loads backends and policies of other packages, by entry points or by names such as `package.module:Class`.

An installed package lists backends in the entry point group `lmkv.backends`, by the scheme of their URLs, and eviction
policies in `lmkv.policies`, by name. lmkv imports a backend or policy only when a setting names it.
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
    """Return whether a text has the form `package.module:Class`, which names a Python object.

    >>> is_place("my_tiers.sqlite:SQLiteStore"), is_place("redis://host")
    (True, False)
    """
    return _PLACE.fullmatch(text) is not None


def installed(group: str) -> Mapping[str, str]:
    """Return the entry points of a group in all installed packages: for each name, the value `package.module:Class`."""
    return {found.name: found.value for found in entry_points(group=group)}


def load(place: str, wanted_by: str) -> Any:
    """Return the object at `place`, which has the form `package.module:Class`.

    Raises ConfigError if the import fails. The message names `place` and `wanted_by`, the setting that contains
    `place`.
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
    """Call the class or function at `place` (`package.module:Class`) with `args` and `options`, and return the new
    object.

    Raises ConfigError if the object cannot be made, or if the object lacks methods of the protocol `kind`. `wanted_by`:
    the setting that contains `place`, for the message.
    """
    found = load(place, wanted_by)
    try:
        made = found(*args, **options)
    except ConfigError:
        raise
    except Exception as error:  # noqa: BLE001
        # Its message and its traceback may have the password of a URL.
        raise ConfigError(f"{wanted_by}: calling {place} failed: {mask_secrets(safe_repr(error))}") from None
    if not isinstance(made, kind):
        raise ConfigError(f"{wanted_by}: {place} lacks methods of lmkv.protocols.{kind.__name__}: add them")
    return made
