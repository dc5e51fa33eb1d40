"""KeyboardInterrupts before any line of lmkv's."""

from __future__ import annotations

import linecache
import sys
from pathlib import Path
from types import FrameType
from typing import Any

import lmkv.errors

LMKV = str(Path(lmkv.errors.__file__).parent)


class Interrupted:
    """Raises KeyboardInterrupt before the nth line of lmkv's that this thread comes to, if it comes so far.

    Not on a line that enters or leaves a `with`: there a signal never comes between the lock and the block.
    Nor after a jump back: on Python 3.12 and 3.13 what a trace raises there, and no signal, leaves a `with` open.
    """

    def __init__(self, nth: int) -> None:
        self._left = nth
        self._places: dict[int, tuple[int, int]] = {}

    @property
    def happened(self) -> bool:
        return self._left <= 0

    def __enter__(self) -> Interrupted:
        sys.settrace(self._call)
        return self

    def __exit__(self, *_: object) -> None:
        sys.settrace(None)

    def _call(self, frame: FrameType, event: str, arg: object) -> Any:
        return self._line if frame.f_code.co_filename.startswith(LMKV) else None

    def _line(self, frame: FrameType, event: str, arg: object) -> Any:
        line, at = self._places.get(id(frame), (-1, -1))
        self._places[id(frame)] = frame.f_lineno, frame.f_lasti
        comes_back = frame.f_lineno == line or frame.f_lasti < at
        if event == "line" and not comes_back and not self._is_left_out(frame):
            self._left -= 1
            if not self._left:
                raise KeyboardInterrupt
        return self._line

    @staticmethod
    def _is_left_out(frame: FrameType) -> bool:
        line = linecache.getline(frame.f_code.co_filename, frame.f_lineno).lstrip()
        return line.startswith(("with ", "finally:")) or "_lock.release()" in line
