"""`Reading`: what one setting that somebody has given means here. Commands and the server's start say it alike."""

from __future__ import annotations

from typing import Literal

from attrs import frozen

Kind = Literal["used", "without effect", "refused", "unknown"]


@frozen
class Reading:
    """`key`, as it was given, and where. `here`: lmkv's setting and value. `why`: the reason, or what to write instead.

    >>> print(Reading("lookup_timeout_ms", "file kv.yaml", "without effect", why="lookups time out by themselves"))
    file kv.yaml: lookup_timeout_ms has no effect: lookups time out by themselves
    """

    key: str
    source: str
    kind: Kind
    here: str = ""
    why: str = ""

    def __str__(self) -> str:
        return f"{self.source}: {self.in_words}"

    @property
    def in_words(self) -> str:
        """The same without the source."""
        verb = {"used": f"is used: {self.here}", "without effect": "has no effect", "refused": "cannot be used"}
        return f"{self.key} {verb.get(self.kind, 'is unknown')}{f': {self.why}' if self.why else ''}"
