"""Tables of cases, what a call raises, and keys: for tests that need no store."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterable
from typing import Any

import pytest

from lmkv.errors import LmkvError, short_repr


def every(cases: Iterable[Any], check: Callable[..., object]) -> None:
    """Check each case of a table, and fail with all that are wrong; a case that is a tuple is several arguments."""
    wrong = []
    for case in cases:
        try:
            check(*case if isinstance(case, tuple) else (case,))
        except (AssertionError, LmkvError, ValueError, SyntaxError, pytest.fail.Exception) as error:
            wrong.append(f"{short_repr(case)}: {error!r}")
    assert not wrong, "\n".join(wrong)


def raised(error: type[BaseException], match: str, call: Callable[..., object], *args: Any, **options: Any) -> str:
    """What the error says that a call raises; `match` is found in it."""
    with pytest.raises(error, match=match or None) as caught:
        call(*args, **options)
    return str(caught.value)


def chain(name: str, count: int) -> list[bytes]:
    """Keys of a chain, head first."""
    return [hashlib.sha256(f"{name} {index}".encode()).digest() for index in range(count)]
