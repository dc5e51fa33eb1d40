"""`attempt`, the one place of the core that catches broadly: an exception of a backend becomes a value."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import TypeVar

from lmkv.errors import safe_repr

T = TypeVar("T")


def attempt(call: Callable[[], T], failed: Callable[[Exception], T]) -> T:
    """The call's result; if it raises, the result of `failed` for that exception."""
    try:
        return call()
    except Exception as error:
        return failed(error)
    except BaseException as error:
        if isinstance(error, KeyboardInterrupt) and threading.current_thread() is threading.main_thread():
            raise
        # A panic in a Rust library, for example, is no Exception.
        return failed(RuntimeError(safe_repr(error)))
