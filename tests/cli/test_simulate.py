"""`lmkv simulate`: traces of each format, sizes, tiers and engines."""

from __future__ import annotations

import json
import os
import random
import tempfile
import tracemalloc
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import zstandard
from hypothesis import given, strategies as st
from typer.testing import CliRunner

from lmkv.cli.app import app
from lmkv.cli.simulate import size_of
from lmkv.errors import UsageError
from lmkv.policies import Shadow, make_policy
from lmkv.simulation import clairvoyant, replay, replay_tiers
from lmkv.simulation.trace import read_trace
from tests.tables import raised


@pytest.fixture
def sessions(tmp_path: Path) -> Path:
    """Sessions that grow by a few blocks a request, and begin within an hour."""
    chance = random.Random(1)
    lines = []
    for name in range(40):
        length, requests = chance.randint(4, 9), []
        for turn in range(chance.randint(2, 12)):
            requests.append([60.0 * name + 30.0 * turn, length * 64 + 5, 100, 0, [[0, length]]])
            length += chance.randint(1, 6)
        lines.append(json.dumps({"id": f"s{name}", "requests": requests}))
    path = tmp_path / "sessions.jsonl"
    path.write_text("\n".join(lines))
    return path


def simulated(*arguments: object) -> dict[str, Any]:
    result = CliRunner().invoke(app, ["simulate", *map(str, arguments), "--json"])
    assert result.exit_code == 0, result.output
    found: dict[str, Any] = json.loads(result.stdout)
    return found


def ratios(found: dict[str, Any], capacity: str) -> dict[str, float]:
    return {row["policy"]: row["hit_ratio"] for row in found["rows"] if row["capacity"] in (capacity, "")}


def test_policies_are_between_nothing_and_the_optimum(sessions: Path) -> None:
    found = simulated(sessions, "--capacity", "10%,40%", "--policy", "LRU", "--policy", "ADAPTIVE")
    for capacity in ("10%", "40%"):
        here = ratios(found, capacity)
        assert list(here) == ["Unbounded", "Clairvoyant", "LRU", "ADAPTIVE"]
        assert 0 < here["LRU"] <= here["Clairvoyant"] <= here["Unbounded"]
        assert 0 < here["ADAPTIVE"] <= here["Clairvoyant"]
    assert ratios(found, "10%")["LRU"] < ratios(found, "40%")["LRU"]


def test_a_compressed_trace_is_the_same(sessions: Path) -> None:
    packed = sessions.with_suffix(".jsonl.zst")
    with zstandard.open(packed, "wt", encoding="utf-8") as file:
        file.write(sessions.read_text())
    assert [request.keys for request in read_trace(packed).requests] == [
        request.keys for request in read_trace(sessions).requests
    ]
    assert simulated(packed, "--capacity", "10%")["rows"][0]["hit_ratio"] > 0


def test_larger_chunks_are_cut_from_the_blocks(sessions: Path) -> None:
    small, large = read_trace(sessions), read_trace(sessions, 256)
    assert [len(request.keys) // 4 for request in small.requests] == [len(request.keys) for request in large.requests]
    raised(UsageError, "multiple of the trace's block size of 64", read_trace, sessions, 100)


def test_prefixes_share_keys_and_sessions_do_not(sessions: Path) -> None:
    trace = read_trace(sessions)
    by_session: dict[str, list[list[bytes]]] = {}
    for request in trace.requests:
        by_session.setdefault(request.session, []).append(request.keys)
    for chains in by_session.values():
        assert all(later[: len(earlier)] == earlier for earlier, later in pairwise(chains))
    firsts = {chains[0][0] for chains in by_session.values()}
    assert len(firsts) == len(by_session)


def test_a_prefix_router_beats_one_that_takes_turns(sessions: Path) -> None:
    def near(router: str) -> float:
        sizes = ("--ram", "10%", "--disk", "50%", "--policy", "LRU")
        found = simulated(sessions, *sizes, "--engines", 3, "--router", router)
        return float(ratios(found, "10%")["LRU, ram of 3"])

    assert near("prefix") > near("round-robin")


def test_tiers_find_together_what_one_of_both_sizes_finds_at_most(sessions: Path) -> None:
    here = simulated(sessions, "--ram", "5%", "--disk", "30%", "--policy", "LRU")["rows"]
    by_name = {row["policy"]: row["hit_ratio"] for row in here}
    assert 0 < by_name["LRU, ram"] + by_name["LRU, disk"] <= by_name["Clairvoyant"]


def test_sessions_that_tell_their_end_make_room_for_others(sessions: Path) -> None:
    found = [
        ratios(simulated(sessions, "--capacity", "10%", "--policy", "LRU", "--told-ends", share), "10%")["LRU"]
        for share in (0, 1)
    ]
    assert found[0] < found[1]


def test_a_picture_is_drawn(sessions: Path, tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    simulated(sessions, "--capacity", "5%,20%", "--plot", tmp_path / "out.png")
    assert (tmp_path / "out.png").read_bytes().startswith(b"\x89PNG")


def test_sizes_are_read_as_people_write_them() -> None:
    assert [size_of(text, 100, 5000) for text in ("5%", "64GiB", "64GB", "20")] == [25_000, 64 << 30, 64 * 10**9, 2000]
    raised(UsageError, "'much' is not a size", size_of, "much", 1, 1)


MOONCAKE: dict[str, Any] = {"timestamp": 5, "input_length": 1500, "output_length": 3, "hash_ids": [1, 2, 3]}
SESSION: dict[str, Any] = {"id": "s", "requests": [[0.5, 200, 3, 0, [[0, 3]]]]}
RAG: dict[str, Any] = {"timestamp": "5", "hash_ids": {"history": []}, "output_length": 2, "session_id": "s"}
HEADER: dict[str, Any] = {"lmkv_trace": 1, "chunk_tokens": 16}
RECORDED: dict[str, Any] = {"t": 0.5, "tokens": 40, "keys": "aa bb", "output": 3, "session": "s"}


def with_each(line: dict[str, Any], **values: list[Any]) -> list[str]:
    """The line with each of these values in its place."""
    return [json.dumps({**line, name: value}) for name, these in values.items() for value in these]


HUGE, DEEP = 10**400, "[" * 200_000
no_runs: list[Any] = [[[0, 10**9]], [[0, 10**30]], [[0, -1]], [["a", 3]], [[0]], None, [[0, 1 << 19]] * 4]
no_runs += [[[HUGE, 3]], [[-1, 3]]]
no_requests: list[Any] = [5, [5], [[0.5]], None, "no", {"a": 1}, [[None, 9, 3, 0, []]], [[0.5, None, 3, 0, []]]]
no_records = with_each(
    RECORDED, keys=[None, 5, ["a"], {}, "aa bb aa", "a" * 101], tokens=[None, "40", -1, 1e400, HUGE, []],
    t=[None, "0", 1e400, -1e400, HUGE, []], output=[None], session=[None, ["s"], {"a": 1}, "s" * 101, HUGE],
)  # fmt: skip
HOSTILE = [
    *("", "[1]", "{}", "no json", "\0", DEEP, '{"hash_ids": [1]}', '{"hash_ids":' * 20_000),
    *with_each(HEADER, chunk_tokens=[0, -1, None, "16", 1e400, HUGE, [], 1.5, True]),
    *(f"{json.dumps(HEADER)}\n{line}" for line in [*no_records, "[]", DEEP]),
    *with_each(
        MOONCAKE,
        timestamp=[None, "5", 10**399, 1e400, True],
        hash_ids=[None, [1, 2, 1], [[1]], [None], 5, "12", [1.5], [True], ["a" * 101], [HUGE]],
        input_length=["5", -5],
        output_length=[None],
    ),
    *with_each(SESSION, requests=[*no_requests, *([[0.5, 200, 3, 0, runs]] for runs in no_runs)]),
    *with_each(RAG, timestamp=["never", None, "nan", "9" * 400], session_id=[None]),
    *with_each(RAG, hash_ids=[{"history": [5]}, {"history": "ab"}, {"history": None}, {"history": [[]]}]),
]


@pytest.mark.parametrize("content", HOSTILE, ids=range(len(HOSTILE)))
@pytest.mark.parametrize("spread", [0, 60])
def test_what_is_no_trace_is_refused_with_its_place(content: str, spread: int, tmp_path: Path) -> None:
    (tmp_path / "x.jsonl").write_text(content)
    with pytest.raises(UsageError, match=r"x\.jsonl(, line [12])?: not a trace: ") as refused:
        read_trace(tmp_path / "x.jsonl", spread=spread)
    assert len(str(refused.value)) < 600
    assert str(refused.value).isprintable()
    assert CliRunner().invoke(app, ["simulate", str(tmp_path / "x.jsonl")]).exit_code == 2


RUN = [0, 64, 1, 0, [[0, 1000]]]
TOO_LARGE: dict[str, tuple[list[Any], int | None]] = {
    "chunks": ([{"id": number, "requests": [RUN]} for number in range(12)], None),
    "blocks": ([{"id": 1, "requests": [RUN] * 1000}] * 20, None),
    "blocks of no chunk": ([{"id": 1, "requests": [RUN] * 1000}] * 20, 64 << 20),
    "requests": ([{"id": 1, "requests": [[0, 64, 1, 0, []]] * 10_000}] * 20, None),
    "ids": ([{**MOONCAKE, "hash_ids": [f"{number} {at}" for at in range(1000)]} for number in range(12)], None),
    "tokens": ([{**RAG, "hash_ids": {"history": [1] * 7}}] * 20, 1),
    "keys": ([HEADER, *({**RECORDED, "keys": " ".join(map(str, range(50_000)))} for _ in range(20))], None),
}


@pytest.mark.parametrize(("lines", "size"), TOO_LARGE.values(), ids=TOO_LARGE)
def test_a_trace_that_takes_too_much_memory_is_refused_with_the_line(
    lines: list[Any], size: int | None, tmp_path: Path
) -> None:
    folder = tmp_path / "x"
    folder.mkdir()
    (folder / "0_trace.jsonl").write_text("\n".join(map(json.dumps, lines)))
    (folder / "1_side.jsonl").write_text('{"history_id": 1, "token_length": 100000}')
    tracemalloc.start()
    try:
        with pytest.raises(UsageError, match=r"line \d+: not a trace: .* need more memory than --memory, 0.00977 GiB"):
            read_trace(folder, size, memory=10 << 20)
        assert tracemalloc.get_traced_memory()[1] < 30 << 20
    finally:
        tracemalloc.stop()


def test_how_much_memory_a_trace_may_take_can_be_said(sessions: Path) -> None:
    few = CliRunner().invoke(app, ["simulate", str(sessions), "--memory", "0.1MiB"])
    assert few.exit_code == 2
    assert "need more memory than" in " ".join(few.stderr.replace("│", " ").split())
    assert CliRunner().invoke(app, ["simulate", str(sessions), "--memory", "1GiB"]).exit_code == 0


def test_a_file_that_is_none_or_broken_is_no_trace(tmp_path: Path, sessions: Path) -> None:
    os.mkfifo(tmp_path / "pipe")
    (tmp_path / "not.zst").write_bytes(b"not compressed")
    with zstandard.open(tmp_path / "cut.zst", "wt", encoding="utf-8") as file:
        file.write(sessions.read_text())
    whole = (tmp_path / "cut.zst").read_bytes()
    (tmp_path / "cut.zst").write_bytes(whole[: len(whole) // 2])
    with zstandard.open(tmp_path / "bomb.zst", "wt", encoding="utf-8") as file:
        for _ in range(20):
            file.write("0" * (1 << 20))
    (tmp_path / "latin.jsonl").write_bytes(b"\xff\xfe")
    for name in ("pipe", "not.zst", "cut.zst", "bomb.zst", "latin.jsonl", "none"):
        raised(UsageError, f"{name}(, line [0-9]+)?: not a trace: ", read_trace, tmp_path / name)
    raised(UsageError, "/dev/zero: not a trace: the path is not a file", read_trace, Path("/dev/zero"))


@pytest.mark.parametrize(
    "options",
    [
        *(["--capacity", each] for each in ("9" * 400, "9" * 400 + "%", "1.2.3", "", "nan", ".", "1e9", "-1")),
        *(["--plot", each] for each in ("/nowhere/at/all.png", "x.nonsense")),
    ],
)
def test_what_an_option_cannot_be_is_said(options: list[str], sessions: Path) -> None:
    pytest.importorskip("matplotlib")
    result = CliRunner().invoke(app, ["simulate", str(sessions), *options])
    assert (result.exit_code, type(result.exception)) == (2, SystemExit)


odd = st.recursive(
    st.one_of(
        *(st.none(), st.booleans(), st.integers(), st.floats(), st.text(max_size=9), st.integers(10**300, 10**310)),
        *(st.integers(-2, 70), st.floats(0, 1e3), st.sampled_from(["", "aa bb", 1 << 40, 1 << 20, -0.0, 1e15])),
    ),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=9), inner, max_size=3),
    max_leaves=8,
)


@st.composite
def spoiled(draw: st.DrawFn, line: Any) -> Any:
    """A line with something else at some places."""
    if draw(st.integers(0, 5)) == 0:
        return draw(odd)
    if isinstance(line, dict):
        return {name: draw(spoiled(value)) for name, value in line.items() if draw(st.integers(0, 19))}
    return [draw(spoiled(each)) for each in line] if isinstance(line, list) else line


hostile_lines = st.one_of(
    *(st.binary(max_size=40), st.text(max_size=40).map(str.encode)),
    st.sampled_from([MOONCAKE, SESSION, RAG, HEADER, RECORDED])
    .flatmap(lambda line: st.one_of(st.just(line), spoiled(line)))
    .map(lambda line: json.dumps(line).encode()),
)


@given(st.lists(hostile_lines, max_size=4), st.sampled_from([0, 60]), st.sampled_from([None, 16, 64, 512, 1000]))
def test_any_lines_are_a_trace_or_are_refused(lines: list[bytes], spread: int, size: int | None) -> None:
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "0_trace.jsonl"
        path.write_bytes(b"\n".join(lines))
        (Path(folder) / "1_side.jsonl").write_bytes(b'{"history_id": 1, "token_length": 70}')
        try:
            trace = read_trace(path, size, spread=spread)
        except UsageError as error:
            assert len(str(error)) < 2000  # noqa: PT017
            return
        for name in ("LRU", "ADAPTIVE"):
            found = replay(trace, make_policy(name), 5, 1)
            assert 0 <= found.hit_tokens <= max(0, trace.tokens)
        assert clairvoyant(trace, 5)[0] >= 0
        replay_tiers(trace, [Shadow(make_policy("LRU"), 3) for _ in range(2)], None, 1, router="least-loaded")
