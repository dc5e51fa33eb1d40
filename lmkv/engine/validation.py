"""Checks of an engine's arguments, which raise `UsageError` before anything is done."""

from __future__ import annotations

from numbers import Real
from typing import Any

from lmkv.errors import UsageError, short_repr

_FOREVER = 1e9
"""Seconds, more than thirty years: every clock can add them."""


def positive(value: Any, name: str) -> int:
    if isinstance(value, bool) or not isinstance(value, int) or value < 1:
        raise UsageError(f"{name} must be a positive int, not {short_repr(value)}")
    return value


def not_negative(value: Any, name: str) -> int:
    if isinstance(value, bool) or not isinstance(value, int) or value < 0:
        raise UsageError(f"{name} must be an int of at least 0, not {short_repr(value)}")
    return value


def seconds(value: Any, name: str) -> float:
    """The value as a float that every clock can add."""
    if isinstance(value, bool) or not isinstance(value, (float, Real)) or value != value:
        raise UsageError(f"{name} must be a number of seconds, not {short_repr(value)}")
    try:
        return max(min(float(value), _FOREVER), -_FOREVER)
    except OverflowError:  # an int of hundreds of digits
        return -_FOREVER if value < 0.0 else _FOREVER
