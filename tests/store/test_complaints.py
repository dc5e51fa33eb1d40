"""What the log says of a tier that fails: in no time, once a minute, in lines that nobody else has made."""

from __future__ import annotations

import time

import pytest

from lmkv.errors import BackendError, CorruptChunkError
from lmkv.protocols import Written
from lmkv.store.health import FailureLog
from lmkv.testing import ManualClock


def test_a_long_reason_takes_no_time(caplog: pytest.LogCaptureFixture) -> None:
    """Whoever answers in a store's place may say anything, without a blank."""
    complaints = FailureLog("redis", ManualClock())
    for text in ("x" * 1000, "0123456789abcdef" * 60, "1." * 500, "a1" * 500):
        started = time.thread_time()
        for _ in range(20):
            complaints.failed(BackendError("redis", "read", "", text))
            complaints.wrote(Written.rejected(text * 100), "")
        assert time.thread_time() - started < 0.5
    assert all(len(each) < 3000 and each.isprintable() for each in caplog.messages)


def test_what_is_not_said_is_counted(caplog: pytest.LogCaptureFixture) -> None:
    clock = ManualClock()
    complaints = FailureLog("redis", clock)
    for number in range(300):
        complaints.failed(CorruptChunkError("redis", "read", f"{number:064x}", "it is cut"))
        complaints.failed(BackendError("redis", "read", "", f"reason {number}" if number < 90 else "a reason"))
    clock.advance(61)
    complaints.failed(CorruptChunkError("redis", "read", "0" * 64, "it is cut"))
    cut = [each for each in caplog.messages if "it is cut" in each]
    assert len(cut) == 2
    assert cut[1].endswith("(299 more since the last such line)")


def test_a_refusal_says_nothing_that_could_be_a_line_of_its_own() -> None:
    refused = Written.rejected("full\n2026-01-01 WARNING lmkv: https://me:hunter2@host/ \x1b[31m")
    assert refused.reason.isprintable()
    assert "hunter2" not in refused.reason
