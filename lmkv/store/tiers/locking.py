"""`@locked`: the mark, checked in tests, of a method that wants the store's lock held."""

from __future__ import annotations

import functools
import os
from collections.abc import Callable
from typing import Any, TypeVar, cast

CHECKED = os.environ.get("LMKV_CHECK_LOCKS") == "1"
"""Whether calls are checked, which costs one more Python call each. Read when lmkv is imported."""

F = TypeVar("F", bound=Callable[..., Any])


def locked(method: F) -> F:
    """Mark a method that wants `self._lock` held. With LMKV_CHECK_LOCKS=1 a call without it raises."""
    if not CHECKED:
        return method

    @functools.wraps(method)
    def checked(self: Any, *args: Any, **kwargs: Any) -> Any:
        if not self._lock.locked():
            raise AssertionError(f"{method.__qualname__} was called without the store's lock")
        return method(self, *args, **kwargs)

    return cast(F, checked)
