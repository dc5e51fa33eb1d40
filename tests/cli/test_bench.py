"""`lmkv bench` without an engine, and what its figures are made of."""

from __future__ import annotations

import itertools
import json
import os
from collections.abc import Callable, Iterator
from math import comb
from pathlib import Path

import pytest
from typer.testing import CliRunner

from lmkv.chunks.hashing import chunk_keys
from lmkv.cli import bench
from lmkv.cli.app import app
from lmkv.cli.bench import DISK, OWN, RAM, bare_chain, hit_in
from lmkv.cli.engines import WRITES_ENDED, Answer, wait_until_settled
from lmkv.cli.report import Row, compared, interleaved, interval, reached
from tests.kit import median_ratio
from tests.tables import raised

ROUNDS = {"cache": [1.0, 1.0, 1.0], "lmkv": [2.0, 1.5, 4.0]}


@pytest.mark.parametrize(("unit", "missed"), [("s", 1.9), ("GB/s", 2.1)])
def test_ratios_are_taken_within_a_round_and_compared_with_their_targets(unit: str, missed: float) -> None:
    rounds = {"cache": 2 * [1.0, 2.0, 4.0], "lmkv": 2 * [2.0, 5.0, 8.0], "lmkv too": 2 * [1.0, 4.0, 40.0]}
    targets = {"lmkv": 2.0, "lmkv too": missed}
    reference, *ours = compared("x", unit, rounds, "cache", targets)
    assert (reference.value, reference.ratio, reference.met) == (2.0, None, None)
    assert [(row.value, row.ratio, row.target, row.met) for row in ours] == [
        (5.0, 2.0, 2.0, True),
        (4.0, 2.0, missed, False),
    ]
    assert [row.within for row in ours] == [(2.0, 2.5), (1.0, 10.0)]


def test_the_table_shows_ratios_their_range_and_targets(capsys: pytest.CaptureFixture[str]) -> None:
    bench.show([*compared("first token", "s", ROUNDS, "cache", {"lmkv": 1.3}), Row("alone", 0.2, "s")])
    lines = [line.strip("│").split("│") for line in capsys.readouterr().out.splitlines()]
    shown = {parts[0].strip(): [part.strip() for part in parts[1:]] for parts in lines if len(parts) > 1}
    assert shown["first token: lmkv"] == ["2 s", "2.00 x", "1.50 to 4.00", "at most 1.3: missed"]
    assert shown["alone"] == ["0.2 s", "1", "", ""]


def test_a_few_rounds_on_both_sides_of_a_target_say_nothing_about_it() -> None:
    rounds = [1.0, 1.1, 1.2, 1.4, 1.5]
    assert reached(rounds, 1.3, less=True) is None
    assert reached(rounds[:1], 1.3, less=True) is None
    assert reached([*rounds, 1.0], 1.3, less=True)
    assert reached([0.5, 0.6], 1.3, less=True)


def test_a_sure_verdict_is_that_of_the_intervals_worse_end() -> None:
    by_chance = [0.98] * 8 + [1.02] * 12
    assert reached(by_chance, 0.995, less=False)
    assert not reached(by_chance, 0.995, less=False, surely=True)
    assert reached([0.999] * 20, 0.995, less=False, surely=True)
    assert not reached(by_chance, 1.0, less=True, surely=True)


def test_nothing_is_divided_by_a_reference_of_nothing() -> None:
    found = compared("x", "%", {"alone": [0.0], "lmkv": [1.0]}, "alone", {"lmkv": 1.0})
    assert [(row.ratio, row.met) for row in found] == [(None, None)] * 2


@pytest.mark.parametrize("count", [1, 5, 6, 8, 9, 15, 21, 24, 31, 40, 101])
def test_an_interval_has_the_median_with_95_percent(count: int) -> None:
    low, high = interval(list(range(count)))

    def chance_of_fewer_below(rank: float) -> float:
        return sum(comb(count, below) for below in range(int(rank) + 1)) / 2**count

    assert high == count - 1 - low
    assert count < 6 or 1 - 2 * chance_of_fewer_below(low) >= 0.95
    assert count < 6 or 1 - 2 * chance_of_fewer_below(low + 1) < 0.95
    assert count >= 6 or low == 0


def test_rounds_are_paired() -> None:
    now, rounds = [0.0], itertools.count()

    def takes(seconds: float) -> Callable[[], None]:
        def call() -> None:
            # Each round takes twice as long as the one before; the first calls are not timed.
            now[0] += seconds * 2.0 ** (next(rounds) // 2)

        return call

    times = interleaved({"a": takes(3.0), "b": takes(1.0)}, 5, clock=lambda: now[0])
    assert times["a"] == [3 * second for second in times["b"]] == [6.0, 12.0, 24.0, 48.0, 96.0]
    assert median_ratio(times, "a", "b") == 3.0


def test_the_limit_of_hashing_computes_the_same_keys() -> None:
    tokens = list(range(1024))
    assert bare_chain(tokens) == chunk_keys(tokens, bytes(32), 256)


def test_a_tier_counts_as_written_once_nothing_comes_for_a_while() -> None:
    now, counts = [0.0], iter([0, 3, 3, 9, *[62] * 100])

    def sleep(seconds: float) -> None:
        now[0] += seconds

    wait_until_settled(counts.__next__, clock=lambda: now[0], sleep=sleep)
    # The last ones came 0.2 s after the beginning.
    assert now[0] == pytest.approx(0.2 + WRITES_ENDED, abs=0.051)
    more = itertools.count()
    wait_until_settled(more.__next__, 3.0, clock=lambda: now[0], sleep=sleep)
    assert now[0] == pytest.approx(0.7 + 3.0, abs=0.101), "a tier that writes all the time is not waited for for ever"


def test_a_hit_counts_where_all_of_it_came_from_that_tier() -> None:
    cases: list[tuple[str, dict[str, int], bool]] = [
        *((OWN, {}, True), (RAM, {"cpu": 90, "disk": 0}, True), (RAM, {"cpu": 45, "disk": 45}, False)),
        *((DISK, {"cpu": 0, "disk": 90}, True), (DISK, {"cpu": 45, "disk": 45}, False)),
        (DISK, {"cpu": 90, "disk": 0}, False),
    ]
    for name, sources, right in cases:
        answer = Answer(token_ids=(1,), ttft_s=0.030, hit_tokens=90, sources=sources)
        if right:
            hit_in(name, answer, 100)
        # Of 200, half of the prompt at most was found.
        for tokens in [200] if right else [100, 200]:
            raised(RuntimeError, "a repeated prompt hit 90 tokens", hit_in, name, answer, tokens)


@pytest.mark.nightly("tools")
def test_quick_without_an_engine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    result = CliRunner().invoke(app, ["bench", "--quick", "--no-engine", "--json", "--disk", str(tmp_path)])
    assert result.exit_code == 0, result.output
    found = json.loads(result.stdout.splitlines()[-1])
    assert {"date", "machine", "versions"} <= set(found)
    assert all(row["value"] > 0 for row in found["rows"])
    ours = [row for row in found["rows"] if row["name"].endswith(": lmkv")]
    assert len(ours) == 5, "store, retrieve, lookup, writes, reads"
    assert all(row["target"] for row in ours)
    assert list(tmp_path.iterdir()) == []


def test_what_was_measured_before_an_error_is_shown(monkeypatch: pytest.MonkeyPatch) -> None:
    def measured(*_: object) -> Iterator[Row]:
        assert "LMKV_CHUNK_SIZE" not in os.environ
        yield from compared("x", "s", ROUNDS, "cache")
        raise RuntimeError("an engine that ended")

    monkeypatch.setenv("LMKV_CHUNK_SIZE", "64")
    monkeypatch.setattr(bench, "measured", measured)
    result = CliRunner().invoke(app, ["bench", "--json"])
    assert isinstance(result.exception, RuntimeError)
    assert "lmkv bench ignores LMKV_CHUNK_SIZE" in result.stderr
    assert [row["value"] for row in json.loads(result.stdout.splitlines()[-1])["rows"]] == [1.0, 2.0]
