"""`lmkv simulate`: traces of each format, sizes, tiers and engines."""

from __future__ import annotations

import json
import random
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import zstandard
from typer.testing import CliRunner

from lmkv.cli.app import app
from lmkv.cli.simulate import size_of
from lmkv.errors import UsageError
from lmkv.simulation.formats import read_trace


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
    with pytest.raises(UsageError, match="multiple of the trace's blocks of 64"):
        read_trace(sessions, 100)


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
    with pytest.raises(UsageError, match="'much' is no size"):
        size_of("much", 1, 1)


@pytest.mark.parametrize("content", ["", "[1]", "{}", "no json", '{"hash_ids": [1]}'])
def test_what_is_no_trace_is_refused(content: str, tmp_path: Path) -> None:
    (tmp_path / "x.jsonl").write_text(content)
    result = CliRunner().invoke(app, ["simulate", str(tmp_path / "x.jsonl")])
    assert result.exit_code == 2
