"""`lmkv bench` without an engine, and what its figures are made of."""

from __future__ import annotations

import itertools
import json
import os
from collections.abc import Callable, Iterator
from contextlib import closing
from importlib.util import find_spec
from math import comb
from pathlib import Path

import pytest
from attrs import asdict, evolve
from redis import Redis
from typer.testing import CliRunner

from benchmarks.multiturn import pair_rows
from benchmarks.scale import call_rows
from lmkv.backends.disk.backend import LocalDiskBackend
from lmkv.chunks.hashing import chunk_keys
from lmkv.cli import bench
from lmkv.cli.app import app
from lmkv.cli.measure import report
from lmkv.cli.measure.conversations import Load, Round, skipped
from lmkv.cli.measure.limits import bare_chain
from lmkv.cli.measure.load import ALONE as VLLM_ALONE, HALF, answers, throughputs
from lmkv.cli.measure.plain import files_of, values_of, whole_database
from lmkv.cli.measure.report import Comparison
from lmkv.cli.measure.scale import SHOWN
from lmkv.cli.measure.scheduler import ALONE, BEYOND, DURING, HASHED, HIT, KEYS, LIMIT, Call, Calls
from lmkv.cli.measure.timing import WRITES_ENDED, Row, interleaved, interval, median_ratio, wait_until_settled
from lmkv.cli.measure.ttft import DISK, OWN, RAM, RAM_TARGET, SHARED, comparisons, is_hit_in, own_ram, plain_read_of
from lmkv.cli.measure.vllm_engines import Answer
from lmkv.protocols import Chunk
from tests.forked import python
from tests.servers import redis_server

BARS = {"computed": 4.0, "cache": 0.1, "lmkv ram": 0.2}
BENCHMARKS = Path(__file__).parents[2] / "benchmarks"
COMPARISON = Comparison("First token", "s", BARS, "cache", log=True)


def test_bars_are_compared_with_their_reference() -> None:
    assert [(row.value, row.of, row.ratio) for row in COMPARISON.rows()] == [
        (4.0, "cache", 40.0),
        (0.1, None, None),
        (0.2, "cache", 2.0),
    ]


@pytest.mark.parametrize(("unit", "missed"), [("s", 1.9), ("GB/s", 2.1)])
def test_ratios_are_taken_within_a_round_and_compared_with_their_targets(unit: str, missed: float) -> None:
    rounds = {"cache": 2 * [1.0, 2.0, 4.0], "lmkv": 2 * [2.0, 5.0, 8.0], "lmkv too": 2 * [1.0, 4.0, 40.0]}
    targets = {"lmkv": 2.0, "lmkv too": missed}
    reference, *ours = Comparison.of_rounds("x", unit, rounds, "cache", targets).rows()
    assert (reference.value, reference.ratio, reference.met) == (2.0, None, None)
    assert [(row.value, row.ratio, row.target, row.met) for row in ours] == [
        (5.0, 2.0, 2.0, True),
        (4.0, 2.0, missed, False),
    ]


def test_the_table_shows_ratios_their_range_and_targets(capsys: pytest.CaptureFixture[str]) -> None:
    rounds = {"cache": [1.0, 1.0, 1.0], "lmkv": [2.0, 1.5, 4.0]}
    bench.show([Comparison.of_rounds("First token", "s", rounds, "cache", {"lmkv": 1.3}), COMPARISON])
    lines = [line.strip("│").split("│") for line in capsys.readouterr().out.splitlines()]
    shown = {parts[0].strip(): [part.strip() for part in parts[1:]] for parts in lines if len(parts) > 1}
    assert shown["lmkv"] == ["2.00 s", "2.00 x", "1.50 to 4.00", "at most 1.3: missed"]
    assert shown["lmkv ram"] == ["200 ms", "2.00 x", "", ""]


def test_a_few_rounds_on_both_sides_of_a_target_say_nothing_about_it() -> None:
    rounds = {"cache": [1.0] * 5, "lmkv": [1.0, 1.1, 1.2, 1.4, 1.5]}
    assert [row.met for row in Comparison.of_rounds("x", "s", rounds, "cache", {"lmkv": 1.3}).rows()] == [None, None]
    one = {name: values[:1] for name, values in rounds.items()}
    assert [row.met for row in Comparison.of_rounds("x", "s", one, "cache", {"lmkv": 1.3}).rows()] == [None, None]
    more = {name: [*values, 1.0] for name, values in rounds.items()}
    assert [row.met for row in Comparison.of_rounds("x", "s", more, "cache", {"lmkv": 1.3}).rows()] == [None, True]
    without = Comparison("x", "s", {"cache": 1.0, "lmkv": 1.1}, "cache", targets={"lmkv": 1.3})
    assert [row.met for row in without.rows()] == [None, None], "nor do figures without rounds"


def test_nothing_is_divided_by_a_reference_of_nothing() -> None:
    for comparison in (
        Comparison.of_rounds("x", "%", {"alone": [0.0], "lmkv": [1.0]}, "alone", {"lmkv": 1.0}),
        Comparison("x", "%", {"alone": 0.0, "lmkv": 1.0}, "alone", targets={"lmkv": 1.0}),
    ):
        assert [(row.ratio, row.met) for row in comparison.rows()] == [(None, None)] * 2


@pytest.mark.parametrize("count", [1, 5, 6, 8, 9, 15, 21, 24, 31, 40, 101])
def test_an_interval_has_the_median_with_95_percent(count: int) -> None:
    low, high = interval(list(range(count)))

    def chance_of_fewer_below(rank: float) -> float:
        return sum(comb(count, below) for below in range(int(rank) + 1)) / 2**count

    assert high == count - 1 - low
    assert count < 6 or 1 - 2 * chance_of_fewer_below(low) >= 0.95
    assert count < 6 or 1 - 2 * chance_of_fewer_below(low + 1) < 0.95
    assert count >= 6 or low == 0


def test_the_rows_of_calls_have_targets_but_for_their_bounds() -> None:
    p99 = {DURING: 2.0, ALONE: 1.0, KEYS: 1.5}
    without = {DURING: 1.0, ALONE: 0.5, KEYS: 1.5}
    calls = [Call(name, 32_768, HIT, 1.0, p99, without) for name in ("on_report", HASHED)]
    made = list(call_rows([Calls(1.0, 0.5, calls), Calls(2.0, 1.0, calls)]))
    found = {row.name: (row.ratio, row.target, row.met) for row in made if "p99 while" in row.name}
    bounds = {
        f"{name}, 32k, hit: p99 while {what}": (ratio, None, None)
        for name in ("on_report", HASHED)
        for what, ratio in {
            "chunks are found, without collections of garbage, 0.50 to 1.00": 0.75,
            "nothing is found, without collections of garbage, 0.25 to 0.50": 0.375,
        }.items()
    }
    assert found == bounds | {
        "on_report, 32k, hit: p99 while chunks are found, 1.00 to 2.00": (1.5, 1.5, True),
        "on_report, 32k, hit: p99 while nothing is found, 0.50 to 1.00": (0.75, 1.5, True),
        f"{HASHED}, 32k, hit: p99 while chunks are found, 1.00 to 2.00": (1.5, None, None),
        f"{HASHED}, 32k, hit: p99 while nothing is found, 0.50 to 1.00": (0.75, None, None),
    }
    assert made[1].ratio == 0.5
    assert list(call_rows([])) == []


def test_a_database_with_keys_is_not_used(tmp_path: Path) -> None:
    with redis_server("valkey", tmp_path) as server, closing(Redis.from_url(server.url)) as client:
        client.set("mine", "1")
        with pytest.raises(RuntimeError, match="has 1 keys"), whole_database(server.url):
            pytest.fail("it was used")
        client.delete("mine")
        with whole_database(server.url):
            client.set("lmkv", "1")
        assert client.dbsize() == 0
    with whole_database(None):
        pass


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


@pytest.mark.parametrize("in_memory", [False, True])
def test_a_plain_read_reads_as_many_files_as_a_prompt_has(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, in_memory: bool
) -> None:
    with pytest.raises(LookupError, match="no chunks"):
        files_of(tmp_path, in_memory=in_memory)
    with closing(LocalDiskBackend(tmp_path / "kv", bytes(32), direct="off")) as backend:
        for number, nbytes in enumerate((8192, 8192, 8192, 8192, 4096, 4096)):
            backend.write(Chunk(bytes(31) + bytes([number]), memoryview(bytes(nbytes))))
    read = files_of(tmp_path, in_memory=in_memory)
    opened: list[str] = []
    real = os.open
    monkeypatch.setattr("os.open", lambda path, flags: opened.append(str(path)) or real(path, flags))
    read()
    monkeypatch.undo()
    assert len(opened) == len(set(opened)) == 2, "two of two prompts' four whole chunks, and no tail"
    os.truncate(opened[1], 4096)
    with pytest.raises(RuntimeError, match="was not read at once"):
        read()


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


def test_a_plain_read_gets_as_many_values_as_a_prompt_has(tmp_path: Path) -> None:
    with redis_server("valkey", tmp_path) as server, closing(Redis.from_url(server.url)) as client:
        with pytest.raises(LookupError, match="no chunks"):
            values_of(server.url)
        for number, nbytes in enumerate((8192, 8192, 8192, 8192, 4096)):
            client.set(str(number), bytes(nbytes))
        read = values_of(server.url)
        gets = client.info("commandstats")["cmdstat_get"]["calls"]
        read()
        assert client.info("commandstats")["cmdstat_get"]["calls"] == gets + 2
        client.flushall()
        with pytest.raises(RuntimeError, match="Redis has lost"):
            read()


@pytest.mark.nightly("tools")
def test_quick_without_an_engine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    result = CliRunner().invoke(app, ["bench", "--quick", "--no-engine", "--json", "--disk", str(tmp_path)])
    assert result.exit_code == 0, result.output
    found = json.loads(result.stdout.splitlines()[-1])
    assert all(row["value"] > 0 or BEYOND in row["name"] for row in found["rows"])
    ours = [row for row in found["rows"] if ": lmkv" in row["name"]]
    assert len(ours) == 43
    # Without one: the size of an index that others are compared with.
    assert sum(row["target"] is None for row in ours) == 4
    assert json.dumps(found["rows"]).count(LIMIT) == 4 * (1 + 1 + 7)
    left = {path.name for path in tmp_path.iterdir()}
    assert left == ({"lmkv-bench.png"} if find_spec("matplotlib") else set())


def test_what_was_measured_before_an_error_is_shown(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    def measured(*_: object) -> Iterator[Comparison]:
        assert "LMKV_CHUNK_SIZE" not in os.environ
        yield COMPARISON
        raise RuntimeError("an engine that ended")

    monkeypatch.setenv("LMKV_CHUNK_SIZE", "64")
    monkeypatch.setattr(bench, "measured", measured)
    result = CliRunner().invoke(app, ["bench", "--json", "--report", str(tmp_path / "x.png")])
    assert isinstance(result.exception, RuntimeError)
    assert "LMKV_CHUNK_SIZE does not count here" in result.stderr
    assert [row["value"] for row in json.loads(result.stdout.splitlines()[-1])["rows"]] == [4.0, 0.1, 0.2]


def test_no_new_prompt_begins_like_one_of_a_conversation() -> None:
    load = Load(users=3, turns=2)
    said, new = (
        [each.prompt(number, user, [], 0)[:16] for number in range(3) for user in range(3)]
        for each in (load, evolve(load, new=True))
    )
    assert not {*map(tuple, said)} & {*map(tuple, new)}


def test_each_engine_with_lmkv_is_compared_with_itself_round_by_round() -> None:
    def rounds(*seconds: float) -> list[Round]:
        return [Round(seconds=each, ttfts=[], cached=0, answers={"0-0": [1], "0-1": [2]}) for each in seconds]

    found = {VLLM_ALONE: rounds(1, 2, 4), HALF: rounds(0.5, 1, 2), skipped(HALF): rounds(1, 1.5, 1)}
    both, itself = throughputs("x", found, 1.0)
    assert both.bars == {VLLM_ALONE: 1.0, HALF: 2.0}
    assert (both.ratios, both.targets) == ({HALF: [2, 2, 2]}, {})
    assert itself.bars == {skipped(HALF): 2.0, HALF: 2.0}
    assert (itself.ratios, itself.targets) == ({HALF: [2, 1.5, 0.5]}, {HALF: 1.0})


def test_answers_that_differ_are_named() -> None:
    right, wrong = ({"0-0": [1], "0-1": [answer]} for answer in (2, 3))
    alone, ours = (Round(seconds=1, ttfts=[], cached=0, answers=answers) for answers in (right, wrong))
    assert answers({"vLLM alone": [alone], "lmkv": [alone]}) == "all answers are equal"
    assert answers({"vLLM alone": [alone], "lmkv": [ours]}) == "ANSWERS DIFFER (user-turn): lmkv, round 0: 0-1"


@pytest.mark.parametrize("script", ["copy.py", "lookup.py", "miss.py", "multiturn.py", "ttft.py", "gpu_requests.py"])
def test_the_benchmarks_start(tmp_path: Path, script: str) -> None:
    python(tmp_path, str(BENCHMARKS / script), "--help")


def test_pairs_meet_their_target_with_the_lower_end_of_their_interval() -> None:
    surely, by_chance = [(1.0, 0.999)] * 20, [(1.0, 0.98)] * 8 + [(1.0, 1.02)] * 12
    alone, ours, other = pair_rows({"vLLM alone": by_chance, "lmkv": surely, "lmkv, again": by_chance})
    assert (alone.target, ours.met, other.met) == (None, True, False)
    assert other.ratio == 1.02


@pytest.mark.parametrize(
    ("name", "sources", "right"),
    [
        (OWN, {}, True),
        (own_ram(DISK), {"cpu": 90, "disk": 0}, True),
        (own_ram(DISK), {"cpu": 45, "disk": 45}, False),
        (DISK, {"cpu": 0, "disk": 90}, True),
        (DISK, {"cpu": 45, "disk": 45}, False),
        (DISK, {"cpu": 90, "disk": 0}, False),
    ],
)
def test_a_hit_counts_where_all_of_it_came_from_that_tier(name: str, sources: dict[str, int], right: bool) -> None:
    answer = Answer(token_ids=(1,), ttft_s=0.030, hit_tokens=90, sources=sources)
    assert is_hit_in(name, answer, 100) == right
    assert not is_hit_in(name, answer, 200), "half of the prompt at most was found"


FIRST_TOKENS = {OWN: [1.0] * 6, RAM: [1.05] * 6, SHARED: [1.7] * 6, DISK: [2.1] * 6} | {
    name_of(tier): [1.0] * 6 for tier in (SHARED, DISK) for name_of in (own_ram, plain_read_of)
}


def test_a_lower_tier_is_shown_beside_the_same_engines_host_memory_and_a_plain_read() -> None:
    rows = {row.name: row for each in comparisons("x", 9.0, FIRST_TOKENS, set()) for row in each.rows()}
    assert rows["x: computed"].value == 9
    found = {name: (row.ratio, row.target, row.met) for name, row in rows.items() if row.ratio}
    assert found[f"x: {RAM}"] == (1.05, RAM_TARGET, True)
    assert found[f"x, shared memory: {SHARED}"] == (1.7 / 2.1, 1.0, True)
    assert found[f"x, disk: {DISK}"] == (1.0, 1.0, True)
    assert {rows[f"x, disk: {name}"].value for name in (own_ram(DISK), plain_read_of(DISK))} == {1}
    assert not any("redis" in name for name in rows)


@pytest.mark.parametrize("name", [DISK, own_ram(DISK)])
def test_nothing_is_said_of_a_tier_whose_answers_came_from_elsewhere(name: str) -> None:
    first, *others = comparisons("x", 9.0, FIRST_TOKENS, {name})
    assert name in first.note
    assert [each.title for each in others] == ["x, shared memory"]


def test_host_memory_has_no_target_beside_a_prefix_cache_that_missed() -> None:
    first, *_ = comparisons("x", 9.0, FIRST_TOKENS, {OWN})
    assert all(row.met is None for row in first.rows())


def test_engines_that_ran_one_after_the_other_are_not_compared_by_rounds() -> None:
    seconds = {**FIRST_TOKENS, OWN: [1.0] * 6, RAM: [0.5, 3.0] * 3}
    first, *others = comparisons("x", 9.0, seconds, set(), in_turn=False)
    assert not first.ratios
    assert "one after the other" in first.note
    rows = {row.name: (row.ratio, row.met) for row in first.rows()}
    assert rows[f"x: {RAM}"] == (1.75, None)
    verdicts = [row.met for each in others for row in each.rows() if row.target is not None]
    assert verdicts == [True, True], "a lower tier's bounds are of its own engine"


def test_the_benchmark_of_scale_measures_one_size(tmp_path: Path) -> None:
    done = python(tmp_path, str(BENCHMARKS / "scale.py"), "--one", "3000")
    figures = json.loads(done.splitlines()[-1])
    assert {"metrics of a second, us", "explain a request, us", *SHOWN} <= set(figures)
    assert all(value >= 0 for value in figures.values())


def test_a_picture_has_a_place_for_every_comparison(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    for count in (1, 2, 5):
        path = tmp_path / f"{count}.png"
        report.draw([COMPARISON] * count, "a machine", path)
        assert path.read_bytes().startswith(b"\x89PNG")


def test_the_picture_of_conversations_is_drawn_from_an_earlier_run(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    rows = [
        asdict(Row(f"{engine}: {what}", 10.0, unit))
        for engine in ("vLLM alone", "lmkv, RAM")
        for what, unit in (("throughput", "requests/s"), ("prompt tokens not computed", "tokens"))
    ]
    (tmp_path / "turns.json").write_text("printed before\n" + json.dumps({"machine": "a machine", "rows": rows}) + "\n")
    picture = tmp_path / "turns.svg"
    python(
        tmp_path,
        str(BENCHMARKS / "multiturn.py"),
        "--drawn-from",
        str(tmp_path / "turns.json"),
        "--picture",
        str(picture),
    )
    drawn = picture.read_text()
    assert all(text in drawn for text in ("a machine", "Throughput", "Prompt tokens not computed", "lmkv, RAM"))


def test_without_matplotlib_it_says_what_to_install(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(bench, "find_spec", lambda name: None)
    bench.drawn([COMPARISON], tmp_path / "x.png")
    assert 'pip install "lmkv[plot]"' in capsys.readouterr().err
    assert not (tmp_path / "x.png").exists()
