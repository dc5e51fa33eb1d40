"""Engines by name, for programs that look one up from several places."""

from __future__ import annotations

import threading
from collections.abc import Callable

from lmkv.engine.engine import Engine
from lmkv.errors import UsageError

_engines: dict[str, Engine] = {}
_lock = threading.Lock()


def get_or_create(name: str, factory: Callable[[], Engine]) -> Engine:
    """The open engine called `name`; if it is missing, `factory` makes it, under the registry's lock."""
    with _lock:
        engine = _engines.get(name)
        if engine is None or engine.closed:
            engine = _engines[name] = factory()
        return engine


def get(name: str) -> Engine:
    """The engine called `name`. Raises UsageError for an unknown name."""
    engine = _engines.get(name)
    if engine is None:
        known = ", ".join(sorted(_engines)) or "none"
        raise UsageError(f"there is no engine {name!r}; registered: {known}")
    return engine


def destroy(name: str) -> None:
    """Close and forget the engine called `name`, if there is one."""
    with _lock:
        engine = _engines.pop(name, None)
    if engine is not None:
        engine.close()
