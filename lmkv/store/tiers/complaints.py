"""`Complaints`: a tier's failures and refusals in the log, each reason once a minute at most."""

from __future__ import annotations

import logging
import math
import re
import threading

from attrs import define, field

from lmkv.errors import BackendError, CorruptChunkError
from lmkv.outcomes import WriteStatus, Written
from lmkv.protocols import Clock

logger = logging.getLogger(__name__)

_EVERY = 60.0
_MOST = 100
"""Reasons that are remembered."""
_NAME = re.compile(r"[^\s,;'\"<>\[\]]*[0-9a-f]{64}[^\s,;'\"<>\[\]]*[,;]?\s?")
_VARIES = re.compile(rf"{_NAME.pattern}|\d[\d.]* ?[nuµm]?s\b")


@define(eq=False)
class Complaints:
    """What is wrong with the tier of this name. Thread-safe; called without the store's lock."""

    name: str
    clock: Clock
    _said: dict[str, float] = field(init=False, factory=dict)
    _lock: threading.Lock = field(init=False, factory=threading.Lock)

    def failed(self, error: BackendError | None, *, then: str = "") -> None:
        """Say that a call failed, if it did. `then`: what follows from it."""
        if error is None:
            return
        # Each damaged chunk counts; of other failures each reason, whatever it hit and however long it took.
        which = error.key if isinstance(error, CorruptChunkError) else ""
        topic = f"{which} {then} {_VARIES.sub('', error.reason)}"
        self._say(topic, f"{_of_one(str(error))}{then and f'; {then}'}")

    def wrote(self, result: Written, until_deleted: str) -> None:
        """Say that a write failed or was refused, with the medium's words. `until_deleted`: if a deletion failed."""
        if result.status is WriteStatus.REJECTED:
            self._say("refused", f"tier {self.name!r} refuses what is written to it: {_of_one(result.reason)}")
        self.failed(result.error, then=until_deleted if result.error and result.error.action == "delete" else "")

    def _say(self, topic: str, line: str) -> None:
        now = self.clock()
        with self._lock:
            if now - self._said.get(topic, -math.inf) < _EVERY:
                return
            if len(self._said) >= _MOST:
                self._said.clear()
            self._said[topic] = now
        logger.warning("lmkv: %s", line)


def _of_one(text: str) -> str:
    """The text with no more names of chunks than the first.

    >>> _of_one(f"no: {'a' * 64}, {'b' * 64}, {'c' * 64}") == f"no: {'a' * 64}, ..."
    True
    >>> _of_one(f"no {'a' * 64} in /{'a' * 64}: why") == f"no {'a' * 64} in ... why"
    True
    """
    end = first.end() if (first := _NAME.search(text)) else len(text)
    return f"{text[:end]}{re.sub(f'(?:{_NAME.pattern})+', '... ', text[end:])}".rstrip()
