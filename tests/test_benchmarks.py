"""The benchmarks start, and their rows say what was measured."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path

import pytest
import torch
from attrs import evolve
from redis import Redis

from benchmarks import copy, rounds, scale, talk, tiers, troubles
from benchmarks.peers import files_of, seconds_of, values_of, whole_database
from benchmarks.rounds import Row, beside
from benchmarks.ttft import DISK, OWN, SHARED, WITHIN, is_hit_in, own_ram, plain_read_of, read_within, rows_of
from benchmarks.users import Load, Round, skipped
from lmkv.backends.disk import LocalDiskBackend
from lmkv.cli.bench import PAGES_TARGET
from lmkv.cli.engines import Answer
from lmkv.protocols import Chunk
from tests.pages import ROOT
from tests.servers import needs_package, redis_server
from tests.tables import raised

NAMES = sorted(path.stem for path in (ROOT / "benchmarks").glob("*.py"))
LIBRARIES = {"__init__", "bound_connectors", "lmcache_copies", "peers", "rounds", "users"}


def run(*words: str) -> str:
    """What a benchmark prints, run as its page says."""
    command = [sys.executable, "-m", *words]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=300, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


@pytest.mark.parametrize("name", [*(name for name in NAMES if name not in LIBRARIES), "gpu"])
def test_each_benchmark_starts_as_its_page_says(name: str) -> None:
    if name in ("audit", "recurrent"):
        needs_package("vllm", "see docs/vllm.md")
    page = run(f"benchmarks.{name}", "--help")
    assert f"python -m benchmarks.{name}" in page


def test_figures_are_written_with_what_they_were_measured_on(tmp_path: Path) -> None:
    file = tmp_path / "found.json"
    printed = run("benchmarks.calls", "--quick", "--only", "keys", "--json", "--write", str(file))
    found = json.loads(file.read_text())
    assert json.loads(printed.splitlines()[-1]) == found
    assert found["command"] == "python -m benchmarks.calls --quick --only keys --json"
    assert {"torch", "numpy", "python"} <= set(found["versions"])
    assert all(found[name] for name in ("date", "machine", "commit"))
    assert [row["name"].partition(":")[0] for row in found["rows"]] == ["keys of 131,072 tokens"] * 2


def test_rows_before_an_error_are_written(tmp_path: Path) -> None:
    def rows() -> Iterator[Row]:
        yield Row("a", 1.0, "s")
        raise RuntimeError("later")

    file = tmp_path / "found.json"
    with pytest.raises(RuntimeError, match="later"):
        rounds.finish(rows(), rounds.arguments("page").parse_args(["--write", str(file)]))
    assert [row["name"] for row in json.loads(file.read_text())["rows"]] == ["a"]


def test_a_figure_without_rounds_is_beside_another() -> None:
    assert beside("p99", 3.0, "s", "alone", 2.0, 1.0) == Row("p99", 3.0, "s", "alone", 1.5, None, 1.0, False)
    assert beside("speed", 3.0, "GB/s", "alone", 2.0, 1.0).met
    assert beside("p99", 3.0, "s", "alone", 0.0, 1.0).met is None


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


@pytest.mark.parametrize("in_memory", [False, True])
def test_a_plain_read_reads_as_many_files_as_a_prompt_has(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, in_memory: bool
) -> None:
    raised(LookupError, "no chunks", files_of, tmp_path, in_memory=in_memory)
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
    raised(RuntimeError, "was not read at once", read)


def test_a_plain_read_gets_as_many_values_as_a_prompt_has(tmp_path: Path) -> None:
    with redis_server("valkey", tmp_path) as server, closing(Redis.from_url(server.url)) as client:
        raised(LookupError, "no chunks", values_of, server.url)
        for number, nbytes in enumerate((8192, 8192, 8192, 8192, 4096)):
            client.set(str(number), bytes(nbytes))
        read = values_of(server.url)
        gets = client.info("commandstats")["cmdstat_get"]["calls"]
        read()
        assert client.info("commandstats")["cmdstat_get"]["calls"] == gets + 2
        client.flushall()
        raised(RuntimeError, "Redis has lost", read)


def test_a_store_is_measured_beside_its_client_and_left_as_it_was(tmp_path: Path) -> None:
    with redis_server("valkey", tmp_path) as server, closing(Redis.from_url(server.url)) as client:
        rows = list(tiers.of_store(server.url, 2))
        assert client.dbsize() == 0
    ours = [row for row in rows if ": lmkv" in row.name]
    assert [row.of for row in ours] == ["its own client, 1 thread", "its own client, 8 threads"] * 2
    assert all(row.value > 0 and row.target for row in ours)


@pytest.mark.slow("its copies wait for all cores, busily")
def test_a_folder_is_measured_beside_plain_files_and_left_as_it_was(tmp_path: Path) -> None:
    rows = list(tiers.of_folder(tmp_path, 2, (1,)))
    beside_plain = [row for row in rows if row.of == "plain files, 1 thread" and ": lmkv" in row.name]
    assert [row.target for row in beside_plain] == [0.9, 1.0]
    assert list(tmp_path.iterdir()) == []


@pytest.mark.slow("its copies wait for all cores, busily")
def test_copies_are_measured_beside_their_limits(tmp_path: Path) -> None:
    rows = list(copy.measure("1 chunk", 2, 1, 2, None, tmp_path))
    assert [row.target for row in rows if row.name.endswith(": lmkv")] == [PAGES_TARGET] * 2
    assert all(row.value > 0 for row in rows)
    assert torch.cuda.is_available() or len(list(copy.on_a_device("1 chunk", 2, 1, 2, "simulated"))) == 4


def test_one_size_of_an_index_is_measured() -> None:
    figures = json.loads(run("benchmarks.scale", "--one", "3008").splitlines()[-1])
    assert {"memory a chunk, bytes", "metrics of a second, us", "evict and index a chunk, us"} <= set(figures)
    assert all(value >= 0 for value in figures.values())


def test_the_rows_of_calls_have_targets_but_for_their_bounds() -> None:
    name = "on_report, 32k, hit: p99 while chunks are found"
    found = {name: [2.0, 1.0], name + scale.UNCOLLECTED: [1.0, 1.0]}
    later = {name: [2.0, 2.0], name + scale.UNCOLLECTED: [1.0, 2.0]}
    shown = {row.name: (row.ratio, row.within, row.target) for row in scale.call_rows([found, later])}
    assert shown == {name: (1.5, (1.0, 2.0), 1.5), name + scale.UNCOLLECTED: (0.75, (0.5, 1.0), None)}
    assert list(scale.call_rows([])) == []


def test_no_new_prompt_begins_like_one_of_a_conversation() -> None:
    load = Load(users=3, turns=2)
    said, new = (
        [each.prompt(number, user, [], 0)[:16] for number in range(3) for user in range(3)]
        for each in (load, evolve(load, new=True))
    )
    assert not {*map(tuple, said)} & {*map(tuple, new)}


def test_a_conversation_repeats_what_was_said_and_a_pool_repeats_prompts() -> None:
    load = Load(users=2, turns=2, question=10)
    assert load.prompt(0, 1, [7, 7, 7], 1)[:3] == [7, 7, 7]
    pool = evolve(load, pool=3)
    asked = [tuple(pool.prompt(0, user, [1], turn)) for turn in range(2) for user in range(2)]
    assert len(set(asked)) == 3
    assert asked[0] == asked[3]
    assert pool.prompt_tokens == 40


def rounds_of(*seconds: float, answer: int = 2) -> list[Round]:
    answers = {"0-0": [1], "0-1": [answer]}
    return [Round(seconds=each, cpu=each, ttfts=[each], cached=5, answers=answers) for each in seconds]


def test_each_engine_with_lmkv_is_compared_with_vllm_alone_and_with_itself_round_by_round() -> None:
    found = {talk.ALONE: rounds_of(1, 2, 4), "lmkv": rounds_of(0.5, 1, 2), skipped("lmkv"): rounds_of(1, 1.5, 1)}
    rows = {(row.name, row.of): row for row in talk.rows(Load(users=2, turns=2, question=10, answer=5), found)}
    beside_alone, itself = rows["throughput: lmkv", talk.ALONE], rows["throughput: lmkv", skipped("lmkv")]
    assert (beside_alone.ratio, beside_alone.target, beside_alone.met) == (2.0, 1.0, True)
    assert (itself.ratio, itself.within, itself.met) == (1.5, (0.5, 2.0), None)
    assert rows["time to first token, p50: lmkv", talk.ALONE].ratio == 0.5
    assert rows["answers equal to those of vLLM alone: lmkv", None].value == 100
    assert rows["prompt tokens not computed: lmkv", None].value == pytest.approx(100 * 15 / (3 * 70))


def test_answers_that_differ_are_named() -> None:
    alone = rounds_of(1.0)
    assert list(talk.differences({talk.ALONE: alone, "lmkv": alone})) == []
    [(name, said)] = talk.differences({talk.ALONE: alone, "lmkv": rounds_of(1.0, answer=3)})
    assert (name, said) == ("lmkv", "round 0, lmkv: other answers than of vLLM alone for 0-1 (user-turn)")


def test_pairs_meet_their_target_with_the_lower_end_of_their_interval() -> None:
    surely, by_chance = [(1.0, 0.999)] * 20, [(1.0, 0.98)] * 8 + [(1.0, 1.02)] * 12
    rows = talk.pair_rows({"vLLM alone": by_chance, "lmkv": surely, "lmkv, again": by_chance})
    alone, ours, other = (row for row in rows if row.of)
    assert (alone.target, ours.met, other.met) == (None, True, False)
    assert other.ratio == pytest.approx(1.02)


def test_the_time_within_lmkv_is_a_share_of_the_rounds() -> None:
    parts = [{"connector": 0.02, "copies": 0.01, "metrics": 0.001}] * 6
    found = [evolve(one, within=within) for one, within in zip(rounds_of(1, 1, 1, 1, 1, 1), parts, strict=True)]
    shown = {row.name: (row.ratio, row.met) for row in talk.within_rows(found)}
    assert shown == {
        "within the connector": (0.02, False),
        "within the copies": (0.01, None),
        "within the metrics": (0.001, True),
    }


def test_a_lower_tier_is_shown_beside_the_same_engines_host_memory_and_a_plain_read() -> None:
    seconds = {OWN: [1.0] * 6, WITHIN: [1.05] * 6, SHARED: [1.7] * 6, DISK: [2.1] * 6}
    seconds |= {name_of(tier): [1.0] * 6 for tier in (SHARED, DISK) for name_of in (own_ram, plain_read_of)}
    seconds[read_within(DISK)] = [2.0] * 6
    rows = {(row.name, row.of): (row.ratio, row.met) for row in rows_of("in use", seconds) if row.ratio}
    assert rows[f"first token, in use: {WITHIN}", OWN] == (1.05, True)
    bound = "{}'s own host memory, and 1.1 times a plain read of {}"
    assert rows[f"first token, in use: {SHARED}", bound.format(SHARED, SHARED)] == (1.7 / 2.1, True)
    assert rows[f"first token, in use: {DISK}", bound.format(DISK, DISK)] == (1.0, True)
    assert rows[f"first token, in use: {DISK}", f"{bound.format(DISK, DISK)} within vLLM"][0] == 2.1 / 3.2


def test_a_hit_counts_where_all_of_it_came_from_that_tier() -> None:
    cases: list[tuple[str, dict[str, int], bool]] = [
        *((OWN, {}, True), (own_ram(DISK), {"cpu": 90, "disk": 0}, True), (DISK, {"cpu": 90, "disk": 0}, False)),
        *((own_ram(DISK), {"cpu": 45, "disk": 45}, False), (DISK, {"cpu": 0, "disk": 90}, True)),
    ]
    for name, sources, right in cases:
        answer = Answer(token_ids=(1,), ttft_s=0.030, hit_tokens=90, sources=sources)
        assert is_hit_in(name, answer, 100) == right
        assert not is_hit_in(name, answer, 200), "half of the prompt at most was found"


def test_a_proxy_passes_on_at_the_speed_that_it_is_told(tmp_path: Path) -> None:
    with redis_server("valkey", tmp_path) as server:
        proxy = troubles.Proxy(server.port)
        try:
            with closing(Redis(port=proxy.start())) as client:
                client.set("a", bytes(1 << 20))
                proxy.bytes_per_second = float(1 << 23)
                took = seconds_of(lambda: client.get("a"))
                assert took >= 0.1
        finally:
            proxy.listener.close()
