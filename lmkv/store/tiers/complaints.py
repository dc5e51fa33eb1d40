"""`Complaints`: a tier's failures and refusals in the log, each reason once a minute at most."""

from __future__ import annotations

import logging
import math
import re
import threading
from collections.abc import Callable

from attrs import define, field

from lmkv.errors import BackendError
from lmkv.outcomes import WriteStatus, Written
from lmkv.protocols import Clock

logger = logging.getLogger(__name__)

_EVERY = 60.0
_MOST = 100
"""Reasons that are remembered."""
_BETWEEN = re.compile(r"([\s,;'\"<>\[\]]+)")
_KEY = re.compile("[0-9a-f]{64}")
_DURATION = re.compile(r"\d[\d.]{0,20} ?[nuµm]?s\b")


@define(eq=False)
class Complaints:
    """Logs failures of one tier. Thread-safe; called without the store's lock."""

    name: str
    clock: Clock
    _said: dict[str, tuple[float, int]] = field(init=False, factory=dict)
    """When each was said last, and how often it was not said since."""
    _lock: threading.Lock = field(init=False, factory=threading.Lock)

    def failed(self, error: BackendError | None, *, then: str = "") -> None:
        """Say that a call failed, if it did. `then`: what follows from it."""
        if error is None:
            return
        # Whatever it hit, and however long it took.
        topic = f"{then} {_DURATION.sub('', _with_names(error.reason, 0))}"
        self._say(topic, lambda: f"{_with_names(str(error), 1)}{then and f'; {then}'}")

    def wrote(self, result: Written, until_deleted: str) -> None:
        """Say that a write failed or was refused, with the medium's words. `until_deleted`: if a deletion failed."""
        if result.status is WriteStatus.REJECTED:
            reason = _with_names(result.reason, 1)
            self._say("refused", lambda: f"tier {self.name!r} refuses what is written to it: {reason}")
        self.failed(result.error, then=until_deleted if result.error and result.error.action == "delete" else "")

    def _say(self, topic: str, line: Callable[[], str]) -> None:
        now = self.clock()
        with self._lock:
            last, more = self._said.pop(topic, (-math.inf, 0))
            if suppressed := now - last < _EVERY:
                self._said[topic] = last, more + 1
            else:
                self._said[topic] = now, 0
                if len(self._said) > _MOST:
                    del self._said[next(iter(self._said))]
        if not suppressed:
            logger.warning("lmkv: %s%s", line(), f" ({more:,} more like it since it was last said)" if more else "")


def _with_names(text: str, most: int) -> str:
    """The text with the first names of chunks alone.

    >>> _with_names(f"no: {'a' * 64}, {'b' * 64}, {'c' * 64}", 1) == f"no: {'a' * 64}, ..."
    True
    >>> _with_names(f"no {'a' * 64} in /{'a' * 64}: why", 1) == f"no {'a' * 64} in ... why"
    True
    """
    # Word by word: a pattern of a word with a key in it takes the square of the text's length.
    found: list[str] = []
    words = _BETWEEN.split(text)
    for word, between in zip(words[::2], [*words[1::2], ""], strict=True):
        if not _KEY.search(word):
            found.append(word + between)
        elif most:
            most -= 1
            found.append(word + between)
        elif not found or found[-1] != "... ":
            found.append("... ")
    return "".join(found).rstrip()
