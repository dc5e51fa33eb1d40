"""The parts that need no vLLM."""

from __future__ import annotations

import socket
import sys
from collections import Counter
from collections.abc import Iterable
from contextlib import nullcontext
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from attrs import evolve

from kv_connector_torture import __main__ as program, report
from kv_connector_torture.checks import Answer, Prefixes, Problem, by_weights, key_of, untrue
from kv_connector_torture.run import Execution, Hooks
from kv_connector_torture.schedule import LONGEST, Operation, Schedule, make, shrink, simpler
from kv_connector_torture.storage import FAULTS, Storage, fill_in, free_ports, serving
from kv_connector_torture.trial import Result, Setup
from tests.servers import needs_package, redis_server

ENGINE = {"num_gpu_blocks_override": 38}
HERE = report.Command((), Path())


def made(seed: int = 3, **more: Any) -> Schedule:
    return make(seed, "gqa", 80, ENGINE, **more)


# -- schedules -----------------------------------------------------------------------------------------


def test_a_schedule_is_a_function_of_its_seed() -> None:
    assert made() == made()
    assert made().operations != made(4).operations


def test_a_schedule_has_all_that_it_is_asked_for() -> None:
    schedule = made(adapters=2, weights=2, faults=["flip"])
    done = [operation.do for operation in schedule.operations]
    assert set(done) == {"ask", "step", "abort", "reset", "restart", "fault"}
    assert done.count("ask") == 80
    assert {asked.lora for asked in schedule.asked} == {0, 1, 2}
    assert {asked.salt for asked in schedule.asked} == {"", "a", "b"}
    resets = [operation for seed in range(9) for operation in made(seed).operations if operation.do == "reset"]
    assert {reset.connector for reset in resets} == {True, False}
    assert {weights for weights, _ in by_weights(made(5, weights=2).operations)} == {0, 1}


def test_prompts_share_beginnings_and_fit() -> None:
    schedule = made()
    # As long as an answer may be.
    said = {asked.name: [7] * asked.max_tokens for asked in schedule.asked}
    prompts = [schedule.tokens(one.prompt) for one in schedule.asked if not _turns(one)]
    assert len({tuple(prompt[:40]) for prompt in prompts if len(prompt) > 40}) < len(prompts) / 2
    full = evolve(schedule, said=said)
    assert max(len(full.tokens(asked.prompt)) for asked in schedule.asked) <= LONGEST + 128
    assert any(_turns(asked) for asked in schedule.asked)


def _turns(asked: Operation) -> list[str]:
    return [name for name, _ in asked.prompt if name.startswith("r")]


def test_a_schedule_comes_back_from_json() -> None:
    schedule = evolve(made(adapters=1, weights=2, faults=FAULTS), said={"r1": [5, 6]})
    assert Schedule.from_json(schedule.to_json()) == schedule


def test_a_part_of_a_schedule_keeps_the_answers_that_it_needs() -> None:
    turn = Operation("ask", "r3", (("b1", 4), ("r1", 2)), max_tokens=1)
    schedule = Schedule(0, "gqa", (), said={"r1": [8, 9, 10], "r2": [1]}).cut([turn])
    assert schedule.said == {"r1": [8, 9, 10]}
    assert schedule.tokens(turn.prompt)[4:] == [8, 9]
    assert key_of(schedule, turn, 1).weights == 1


# -- smallest schedules --------------------------------------------------------------------------------


def test_the_smallest_list_is_found() -> None:
    tried = []

    def fails(items: list[int]) -> bool:
        tried.append(items)
        return {3, 57} <= set(items) and items.index(3) < items.index(57)

    assert shrink(range(100), fails) == [3, 57]
    assert len(tried) < 80


def test_operations_become_simpler() -> None:
    asked = Operation("ask", "r1", (("b1", 90), ("d1", 3), ("d2", 30)), max_tokens=9, salt="a", lora=2)

    def fails(operations: list[Operation]) -> bool:
        return any(("d1", 3) in operation.prompt and operation.lora for operation in operations)

    smallest = shrink([asked, Operation("step", count=5)], fails, simpler=simpler)
    assert smallest == [Operation("ask", "r1", (("d1", 3),), max_tokens=1, lora=2)]


def test_when_time_is_over_the_smallest_so_far_is_enough() -> None:
    found = shrink(range(8), lambda items: 7 in items, over=iter([False, True, True, True]).__next__)
    assert found == [4, 5, 6, 7]


# -- checks --------------------------------------------------------------------------------------------


def test_the_longest_beginning_is_that_of_the_same_salt() -> None:
    prefixes = Prefixes()
    prefixes.add("a", [1, 2, 3, 4])
    prefixes.add("a", [1, 2, 9])
    assert prefixes.longest("a", [1, 2, 3, 5]) == 3
    assert prefixes.longest("b", [1, 2, 3, 5]) == 0


def test_what_cannot_be_cached_is_untrue() -> None:
    assert untrue(cached=32, prompt=33, longest=32) is None
    assert "whose last one is always computed" in str(untrue(cached=33, prompt=33, longest=33))
    assert "began with more than 31 of them" in str(untrue(cached=32, prompt=64, longest=31))


@pytest.mark.parametrize(
    ("given", "found"),
    [
        (Answer([5, 6, 7], [-1.0, -1.0, -1.0], frozenset()), None),
        (Answer([5, 6, 7], [-1.0, -1.0005, -1.0], frozenset()), None),
        (Answer([5, 6, 7], [-1.0, -1.01, -1.0], frozenset()), 1),
        (Answer([5, 6, 7], [-1.0, float("nan"), -1.0], frozenset()), 1),
        (Answer([5, 9, 7], [-1.0, -1.0, -1.0], frozenset()), 1),
        (Answer([5, 6, 9], [-1.0, -1.0, -1.0], frozenset()), None),
        (Answer([5, 6], [-1.0, -1.0], frozenset()), 2),
    ],
)
def test_answers_are_compared_up_to_a_near_tie(given: Answer, found: int | None) -> None:
    expected = Answer([5, 6, 7], [-1.0, -1.0, -1.0], frozenset({2}))
    difference = expected.differs(given)
    assert (difference and difference[0]) == found


def test_deaths_by_other_exceptions_are_other_problems() -> None:
    dead = Problem("death", "ValueError: 3 blocks")
    assert dead.nature == Problem("death", "ValueError: 4 blocks").nature
    assert dead.nature != Problem("death", "KeyError: 'r1'").nature
    assert Problem("difference", "a: b").nature == Problem("difference", "c: d").nature


# -- engines that do not end requests ------------------------------------------------------------------


class FakeEngine:
    """Ends no request but `ends`, and holds the blocks of `holds`."""

    def __init__(self, ends: str = "", holds: str = "") -> None:
        self.counts, self.scheduler, self._ends, self._holds = Counter[str](), SimpleNamespace(running=[]), ends, holds
        self.cached, self.says, self.aborted = 0, 5, list[str]()

    def ask(self, name: str, *_: Any, **__: Any) -> None:
        pass

    def step(self) -> list[Any]:
        likely = {5: SimpleNamespace(logprob=-1.0), 6: SimpleNamespace(logprob=-2.0)}
        answer = SimpleNamespace(token_ids=[self.says], logprobs=[likely])
        return [SimpleNamespace(request_id=self._ends, outputs=[answer], num_cached_tokens=self.cached)]

    def abort(self, name: str) -> None:
        self.aborted.append(name)

    def held(self) -> set[str]:
        return {self._holds} - {""}

    def left(self) -> str:
        return ""

    def all_counts(self) -> Counter[str]:
        return self.counts


def executed(engine: FakeEngine, schedule: Schedule, tmp_path: Path, *hooks: Hooks) -> tuple[Problem | None, list[int]]:
    answers = {key_of(schedule, asked, 0): Answer([5], [-1.0], frozenset()) for asked in schedule.asked}
    reached: list[int] = []

    def made(weights: int) -> Any:
        return nullcontext(engine)

    execution = Execution(schedule, answers, made, (), Storage(tmp_path), 0.05, lambda: None, reached.append, hooks)
    return execution.run(), reached


TWO = Schedule(0, "gqa", tuple(Operation("ask", name, (("b1", 4),), max_tokens=1) for name in ("r1", "r2")))


def test_a_request_that_does_not_end_is_a_hang(tmp_path: Path) -> None:
    problem, _ = executed(FakeEngine(ends="r1"), TWO, tmp_path)
    assert problem is not None
    assert (problem.kind, problem.request) == ("hang", "r2")


def test_where_ended_requests_hold_blocks_it_is_a_leak(tmp_path: Path) -> None:
    problem, _ = executed(FakeEngine(ends="r1", holds="r1"), TWO, tmp_path)
    assert problem is not None
    assert problem.kind == "leak"
    assert "request r2 has not ended after 0 s, and 1 that have ended hold blocks" in problem.text


def test_every_operation_is_told_before_it_is_done(tmp_path: Path) -> None:
    first, second = TWO.operations
    schedule = evolve(TWO, operations=(first, Operation("step", count=0), Operation("restart"), second))
    assert executed(FakeEngine(ends="r1"), schedule, tmp_path)[1] == [0, 1, 2, 3]


ONE = TWO.cut(TWO.operations[:1])


def test_a_hit_that_is_too_long_is_untrue_whatever_the_answer(tmp_path: Path) -> None:
    """The wrong answer is only what comes of it."""
    engine = FakeEngine(ends="r1")
    engine.cached, engine.says = 3, 6
    problem, _ = executed(engine, ONE, tmp_path)
    assert problem is not None
    assert problem.kind == "truthfulness"
    assert "3 tokens are reported as cached" in problem.text
    assert "token 0 of the answer differs: 6 instead of 5" in problem.text
    assert (problem.expected, problem.given, problem.position) == ([5], [6], 0)


class Watching(Hooks):
    """Says all that it is asked for, and writes down that it was."""

    def __init__(self, **says: str) -> None:
        super().__init__()
        self._says, self.asked = says, list[str]()

    def _answer(self, name: str) -> str:
        self.asked.append(name)
        return self._says.get(name, "")

    def alarm(self) -> str:
        return self._answer("alarm")

    def left(self) -> str:
        return self._answer("left")

    def ended(self) -> str:
        return self._answer("ended")


@pytest.mark.parametrize(
    ("says", "kind"), [({}, None), ({"alarm": "fire"}, "alarm"), ({"left": "a pin"}, "leak"), ({"ended": "T"}, "leak")]
)
def test_what_hooks_find_is_a_problem(tmp_path: Path, says: dict[str, str], kind: str | None) -> None:
    hooks = Watching(**says)
    problem, _ = executed(FakeEngine(ends="r1"), ONE, tmp_path, hooks)
    assert (problem and problem.kind) == kind
    if problem is None:
        assert {"alarm", "left", "ended"} <= set(hooks.asked)
    else:
        assert next(iter(says.values())) in problem.text


class Aborting(Hooks):
    def aborts(self, names: Iterable[str]) -> Iterable[str]:
        self.counts["seen"] += 1
        return names


def test_hooks_abort_requests_and_count(tmp_path: Path) -> None:
    engine, hooks = FakeEngine(), Aborting()
    problem, _ = executed(engine, TWO, tmp_path, hooks)
    assert problem is None
    assert engine.aborted == ["r1", "r2"]
    assert hooks.counts["seen"] >= 1


# -- findings ------------------------------------------------------------------------------------------


class FakeTrials:
    """Every trial with r7 fails, at its last operation or before the first. The sixth is interrupted."""

    def __init__(self, starts: bool) -> None:
        self.answers: dict[Any, Any] = {}
        self.count = 0
        self._starts = starts

    def run(self, schedule: Schedule, **_: float) -> Result:
        self.count += 1
        if self.count == 6:
            raise KeyboardInterrupt
        at = len(schedule.operations) - 1 if self._starts else None
        failed = "r7" in {asked.name for asked in schedule.asked}
        return Result(schedule, Problem("death", "no licence") if failed else None, at=at, log="lines\nno licence")


def status(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, *, starts: bool, schedule: Schedule) -> int:
    (tmp_path / "schedule.json").write_text(schedule.to_json())
    options = ["--schedule", str(tmp_path / "schedule.json"), "--report", str(tmp_path)]
    monkeypatch.setattr(sys, "argv", ["torture", *options])
    monkeypatch.setattr(program, "Trials", lambda setup: FakeTrials(starts))
    return program.Session(program.arguments(), tmp_path, report.Command.given()).run()


def test_when_interrupted_the_smallest_schedule_so_far_is_reported(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    whole = made()
    assert status(tmp_path, monkeypatch, starts=True, schedule=whole) == 1
    assert "failed in 1 of 1 trials" in (tmp_path / "report-1.md").read_text()
    smallest = Schedule.from_json((tmp_path / "schedule-1.json").read_text())
    assert "r7" in {asked.name for asked in smallest.asked}
    assert len(smallest.operations) < len(whole.operations) / 2


def test_an_engine_that_does_not_start_is_told_without_another_trial(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    schedule = Schedule(0, "gqa", tuple(Operation("ask", f"r{number}", (("b1", 4),)) for number in (7, 8)))
    assert status(tmp_path, monkeypatch, starts=False, schedule=schedule) == 1
    said = capsys.readouterr().out
    assert "death before the first operation: no licence\nlines\nno licence\n" in said
    assert "1 of 2 operations after 0 more trials" in said
    assert "No engine has started." in (tmp_path / "report-1.md").read_text()


def test_a_count_that_is_0_at_the_end_is_a_failure(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    counts = Counter(requests=1, preemptions=1, aborts=1, resets=1, cached_tokens=1, accepted_drafts=0)
    trials = SimpleNamespace(answers={}, run=lambda schedule: Result(schedule, counts=counts))
    monkeypatch.setattr(sys, "argv", ["torture", "--requests", "1"])
    monkeypatch.setattr(program, "Trials", lambda setup: trials)
    assert program.Session(program.arguments(), tmp_path, HERE).run() == 1
    assert "nothing was tested: no accepted drafts\n" in capsys.readouterr().out


# -- command lines -------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("options", "why"),
    [
        ("--connector ExampleConnector", "Expecting value"),
        ("--connector @nowhere.json", "No such file"),
        ("--engine []", "not a JSON object: []"),
        ("--requests 0", "less than 1: 0"),
        ("--length 0", "less than 1: 0"),
        ("--patience 0", "not more than 0: 0"),
        ("--model nowhere", "no folder: nowhere"),
        ("--schedule nowhere.json", "no schedule: nowhere.json"),
        ("--kinds ,", "at least one kind"),
        ("--kinds own", "`own` with --model only"),
        ("--kinds gpa", "there is no gpa"),
        ("--kinds nowhere:gqa", "No module named 'nowhere'"),
        ("--kinds json:gqa", "has no attribute 'KINDS'"),
    ],
)
def test_a_wrong_command_line_is_refused_before_anything_starts(
    options: str, why: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys, "argv", ["torture", *options.split()])
    with pytest.raises(SystemExit) as ended:
        program.arguments()
    assert ended.value.code == 2
    assert why in capsys.readouterr().err


# -- faults --------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", FAULTS)
def test_files_break(tmp_path: Path, kind: str) -> None:
    storage = Storage(tmp_path)
    assert not storage.strike(kind, 0.5)
    content = bytes(range(200))
    for name in ("a", "b", "c"):
        (tmp_path / "folder").mkdir(exist_ok=True)
        (tmp_path / "folder" / name).write_bytes(content)
    assert storage.strike(kind, 0.5)
    left = {path.name: path.read_bytes() for path in tmp_path.rglob("*") if path.is_file()}
    _check(kind, left, content)


def test_the_last_file_breaks_as_well(tmp_path: Path) -> None:
    """Places are rounded, some of them to 1."""
    (tmp_path / "only").write_bytes(b"content")
    assert Storage(tmp_path).strike("delete", 1.0)
    assert not (tmp_path / "only").exists()


@pytest.mark.parametrize("kind", FAULTS)
def test_values_in_redis_break(tmp_path: Path, kind: str) -> None:
    needs_package("redis", "pip install 'lmkv[redis]'")
    from redis import Redis

    with redis_server("valkey", tmp_path) as server:
        client: Any = Redis(port=server.port)
        storage = Storage(tmp_path / "nothing", f"redis://127.0.0.1:{server.port}")
        assert not storage.strike(kind, 0.5)
        content = bytes(range(200))
        for name in ("a", "b", "c"):
            client.set(name, content)
        assert storage.strike(kind, 0.5)
        _check(kind, {name.decode(): client.get(name) for name in client.scan_iter()}, content)
        storage.empty_redis()
        assert client.dbsize() == 0


def _check(kind: str, left: dict[str, bytes], content: bytes) -> None:
    untouched = {"a": content, "c": content}
    match kind:
        case "empty":
            assert left == {}
        case "delete":
            assert left == untouched
        case "truncate":
            broken = left.pop("b")
            assert left == untouched
            assert content.startswith(broken)
            assert broken != content
        case _:
            broken = left.pop("b")
            assert left == untouched
            assert sum((one ^ other).bit_count() for one, other in zip(broken, content, strict=True)) == 1


# -- setups and reports --------------------------------------------------------------------------------


def test_a_connector_gets_the_folder_and_the_port_of_its_trial() -> None:
    connector = {"kv_port": "{port}", "kv_connector_extra_config": {"path": "{folder}/x", "count": 3}}
    filled = fill_in(connector, {"folder": '/a "folder"', "port": "81"})
    assert filled == {"kv_port": "81", "kv_connector_extra_config": {"path": '/a "folder"/x', "count": 3}}
    assert fill_in(None, {}) is None


def test_a_setup_is_filled_in(tmp_path: Path) -> None:
    setup = Setup(tmp_path, {"url": "{redis}"}, server="serve {port} {port2}", redis="redis://127.0.0.1:{port}")
    setup = evolve(setup, prefill={"path": "{folder}"})
    filled = setup.filled_in(81, 82)
    assert filled.prefill == {"path": str(tmp_path / "storage")}
    assert filled.connector == {"url": "redis://127.0.0.1:81"}
    assert filled.server == "serve 81 82"
    assert filled.storage == Storage(tmp_path / "storage", "redis://127.0.0.1:81")


def test_a_server_listens_until_its_trial_ends(tmp_path: Path) -> None:
    [port] = free_ports(1)
    with serving(f"{sys.executable} -m http.server --bind 127.0.0.1 {port}", port, tmp_path / "log"):
        socket.create_connection(("127.0.0.1", port)).close()
    with pytest.raises(ConnectionRefusedError):
        socket.create_connection(("127.0.0.1", port))


def test_a_server_that_does_not_start_says_why(tmp_path: Path) -> None:
    [port] = free_ports(1)
    command = f"{sys.executable} -c 'raise SystemExit(\"no licence\")'"
    with pytest.raises(RuntimeError, match="no licence"), serving(command, port, tmp_path / "log"):
        pass


def test_a_report_says_what_differs_and_how_to_see_it_again(tmp_path: Path) -> None:
    asked = Operation("ask", "r2", (("b1", 30), ("r1", 9)), max_tokens=3, salt="a")
    problem = Problem("difference", "token 1 differs", "r2", [5, 6, 7], [5, 9, 7], 1)
    failure = report.Failure(Result(Schedule(1, "gqa", (asked,), ENGINE), problem, at=0), 176, [True, False, True])
    setup = Setup(tmp_path, {"kv_connector": "X"}, around=("package:bug",))
    command = report.Command(["--seed", "1"], tmp_path, {"PYTHONPATH": "a folder"})
    path = report.write(tmp_path / "out", failure, setup, command, 1)
    text = path.read_text()
    for part in (
        "python -m kv_connector_torture --seed 1",
        f"cd {tmp_path} && PYTHONPATH='a folder' {sys.executable} -m kv_connector_torture ",
        f'--schedule {tmp_path}/out/schedule-1.json --connector \'{{"kv_connector": "X"}}\' --around package:bug',
        "Seen at operation 1.",
        "failed in 2 of 3 trials",
        "It has 1 of 176 operations",
        "1. ask r2: b1[:30] + r1[:9], 3 tokens, salt a",
        "expected [5, 6, 7]",
        "given    [5, 9, 7]",
        "They differ from token 1 on.",
    ):
        assert part in text
    assert Schedule.from_json((tmp_path / "out" / "schedule-1.json").read_text()) == failure.result.schedule


def test_a_report_of_an_error_of_many_lines_has_one_title_and_the_same_patience(tmp_path: Path) -> None:
    problem = Problem("death", "ValidationError: 1 error\n  no such connector")
    failure = report.Failure(Result(Schedule(1, "gqa", ()), problem), 3, [True])
    text = report.write(tmp_path, failure, Setup(tmp_path, patience=7.5), HERE, 1).read_text()
    assert text.startswith("# Death: ValidationError: 1 error no such connector\n\n")
    assert "schedule-1.json --patience 7.5\n" in text


def test_the_versions_are_those_of_what_connectors_import(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    found = {"nixl": ["nixl"], "nixl_cu13": ["nixl-cu13"], "lmcache": ["lmcache"], "theirs": ["their-connector"]}
    monkeypatch.setattr(report, "packages_distributions", lambda: found)
    monkeypatch.setattr(report, "version", lambda package: f"version of {package}")
    nested = {"connectors": [{"kv_connector": "X", "kv_connector_module_path": "theirs.connector"}]}
    setup = Setup(tmp_path, {"kv_connector": "MultiConnector", "kv_connector_extra_config": nested})
    assert {"their-connector", "lmkv"} <= report.versions(setup).keys()
    setup = Setup(tmp_path, {"kv_connector": "NixlConnector"}, {"kv_connector": "LMCacheMPConnector"})
    assert {"nixl", "nixl-cu13", "lmcache"} <= report.versions(setup).keys()
    assert not {"nixl", "lmcache"} & report.versions(Setup(tmp_path)).keys()
