"""The first quarter of an hour on a GPU: measure and check the most valuable facts first.

    python benchmarks/gpu_first_run.py [--out FILE] [--only STEP,...] [--list] [--simulate]

Each step runs in a process of its own, which a step that kills its context or hangs does not outlive, and takes
three minutes at most. Prints one line per fact, writes all of them to a JSON file after each step, and says what
to do next. All that a step printed is in a log beside that file. With --only the facts are added to what the file has:
the steps need not be one run. A step is left out, and said to be, where a package is missing that it needs. With
--simulate every step but those of vLLM runs on a simulated device: then the figures mean nothing.
"""

from __future__ import annotations

import sys
from pathlib import Path

# Not this folder: its copy.py would stand in for the standard library's.
ROOT = Path(__file__).resolve().parents[1]
sys.path[0] = str(ROOT)

import argparse
import json
import os
import signal
import subprocess
import time
from collections.abc import Callable, Mapping, Sequence
from importlib.util import find_spec
from typing import Any

from attrs import frozen

Facts = Mapping[str, Any]

IMPORT = "import json, vllm; from vllm import LLM; print(json.dumps({'version': vllm.__version__}))"

SIMULATED = "these figures mean nothing: run it without --simulate on a machine with a GPU"

DISK = {
    "max_local_cpu_size": 0.5,
    "local_disk": "",
    "max_local_disk_size": 8,
    "disk_min_free": 0,
    # Load from the disk, however fast a model of random weights computes.
    "load_or_recompute": False,
    "prefetch_deadline": 30,
}

LMKV = ("torch", "numpy", "attrs", "cachetools", "aiofiles", "yaml")
TESTS = (*LMKV, "pytest", "pytest_timeout", "hypothesis")
VLLM = (*LMKV, "vllm", "transformers")


@frozen
class Step:
    """A command that prints a JSON object on its last line, the seconds it may take, and modules that it needs."""

    name: str
    command: tuple[str, ...]
    seconds: float
    needs: Sequence[str] = ()

    @property
    def missing(self) -> list[str]:
        return [name for name in self.needs if find_spec(name) is None]


def steps(simulate: bool) -> list[Step]:
    flag = ("--simulate",) if simulate else ()
    tests = "tests/memory/test_cuda.py"
    chosen = ("-m", "not gpu", "-k", "small and 3") if simulate else ("-m", "gpu")
    found = [
        Step("probe", ("benchmarks/gpu_probe.py", "--json", *flag), 90, LMKV),
        Step("tests", ("-m", "pytest", "-q", "-p", "no:cacheprovider", *chosen, tests), 180, TESTS),
        Step("copies", ("benchmarks/gpu.py", "--quick", "--json", *flag), 90, LMKV),
    ]
    return found if simulate else found + vllm_steps()


def vllm_steps() -> list[Step]:
    """Runs of vLLM with lmkv, with nothing, with vLLM's own connector, with graphs, and with a disk and aborts.

    The first one imports vLLM: that takes minutes where nobody has before, and would be counted for another step.
    """
    script = "benchmarks/_gpu_vllm.py"
    lmkv = (script, "--connector", "LMKVConnector", "--settings")
    host, theirs = json.dumps({"max_local_cpu_size": 8}), json.dumps({"cpu_bytes_to_use": 8 << 30})
    alike, graphs = ("--backend", "FLASH_ATTN", "--batch-invariant"), ("--backend", "FLASH_ATTN", "--graphs")
    return [
        Step("vllm-import", ("-c", IMPORT), 180, VLLM),
        Step("vllm-lmkv", (*lmkv, host), 150, VLLM),
        Step("vllm", (script,), 100, VLLM),
        Step("vllm-own", (script, "--connector", "OffloadingConnector", "--settings", theirs), 100, VLLM),
        Step("vllm-lmkv-alike", (*lmkv, host, *alike, "--aborts"), 180, VLLM),
        Step("vllm-lmkv-disk", (*lmkv, json.dumps(DISK), "--aborts"), 180, VLLM),
        Step("vllm-aborts", (script, "--aborts"), 120, VLLM),
        Step("vllm-lmkv-graphs", (*lmkv, host, *graphs), 180, VLLM),
    ]


def run(step: Step, log: Path) -> dict[str, Any]:
    """The facts that a step prints, its seconds and exit code among them. `log`: where to write all that it prints."""
    if step.missing:
        return {"exit code": None, "left out for want of": ", ".join(step.missing)}
    started = time.monotonic()
    command = [sys.executable, *step.command]
    env = {**os.environ, "PYTHONPATH": os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")])}
    process = subprocess.Popen(
        command, cwd=ROOT, env=env, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, start_new_session=True
    )
    try:
        output, _ = process.communicate(timeout=step.seconds)
    except subprocess.TimeoutExpired:
        os.killpg(process.pid, signal.SIGKILL)
        output = process.communicate()[0] + f"\nended after {step.seconds:.0f} s"
    log.write_text(output)
    lines = output.strip().splitlines() or [""]
    found: dict[str, Any] = {"exit code": process.returncode, "seconds": round(time.monotonic() - started, 1)}
    return found | (_json(lines[-1]) or {"last lines": lines[-8 if process.returncode else -1 :]})


def _json(line: str) -> dict[str, Any] | None:
    """The facts in a line, with the rows of a benchmark by their names; None when it has none."""
    try:
        value = json.loads(line)
    except ValueError:
        return None
    if not isinstance(value, dict):
        return None
    rows = {row["name"]: row for row in value.pop("rows", ())}
    return (
        value
        | {name: f"{row['value']:.4g} {row['unit']}" for name, row in rows.items()}
        | {f"{name}, of {row['of']}": round(row["ratio"], 3) for name, row in rows.items() if row["ratio"] is not None}
    )


# -- what to do next ------------------------------------------------------------------------------------


@frozen
class Rule:
    """What to do when `applies` to the facts of a step."""

    step: str
    applies: Callable[[Facts], bool]
    advice: str


def _number(facts: Facts, name: str) -> float:
    value = facts.get(name, 0)
    return float(value) if isinstance(value, int | float) else 0.0


def _worst(facts: Facts, part: str) -> float:
    return max((_number(facts, name) for name in facts if part in name), default=0.0)


def _slow(facts: Facts, what: str) -> bool:
    return any(name.startswith(what) and ", of " in name and _number(facts, name) < 0.9 for name in facts)


def _least(facts: Facts, what: str) -> float:
    speeds = [
        float(str(value).split()[0]) for name, value in facts.items() if name.startswith(what) and "GB/s" in str(value)
    ]
    return min(speeds, default=0.0)


RULES = [
    Rule(
        "probe",
        lambda facts: bool(facts.get("borders: inside one, failed of 20")),
        "copies inside one registration"
        " fail: nothing else can work; look at the driver's version and at lmkv/memory/cuda.py, `transfer`",
    ),
    Rule(
        "probe",
        lambda facts: not facts.get("borders: across two, failed of 20"),
        "copies may cross registrations here: lmkv cuts them all the same, at the price of nothing",
    ),
    Rule(
        "probe",
        lambda facts: facts.get("locked memory: not root, limit 64 KiB, 1 GiB registered") is False,
        "RLIMIT_MEMLOCK does stop a server that is not root: limit the slab by it again, and in `lmkv doctor`",
    ),
    Rule(
        "probe",
        lambda facts: _worst(facts, "stalls: populated, pieces of 128 MiB") > 5,
        "registering 128 MiB stalls"
        " a launch by more than 5 ms: choose a smaller PIECE_BYTES in lmkv/memory/pinned.py, by the lines above",
    ),
    Rule(
        "probe",
        lambda facts: _number(facts, "pageable: the caller of a pinned store waits, ms") > 1,
        "a pinned store blocks its caller: it is not asynchronous; see that the slab is registered",
    ),
    Rule(
        "probe",
        lambda facts: facts.get("batches: the driver has cuMemcpyBatchAsync") is False,
        "the driver is older"
        " than CUDA 12.8: each chunk is a call of its own, and long orders may fill a stream's queue",
    ),
    Rule(
        "probe",
        lambda facts: any(_number(facts, f"batches: status of {name}") for name in ("loads", "stores")),
        "the driver refuses many"
        " copies in one call: look up the status in its documentation, and at `_copy_batch` in lmkv/memory/cuda.py",
    ),
    Rule(
        "probe",
        lambda facts: _worst(facts, "small copies: 16 KiB to the device beside copies of 32 MiB, worst") > 1000,
        "vLLM's small copies wait behind large ones: cut transfers to 4 MiB in DeviceCopier, if that line is better",
    ),
    Rule(
        "probe",
        lambda facts: _worst(facts, "small copies: 16 KiB from the device beside calls of 256 MiB, worst") > 1000,
        "vLLM's sampled tokens"
        " wait behind stores: lower `batch_bytes` of `Staging` in lmkv/memory/device.py, if calls of 32 MiB are better",
    ),
    Rule(
        "copies",
        lambda facts: _slow(facts, "store"),
        "stores are below 0.9 of one pinned copy: look at the time of the caller first, then at the gather",
    ),
    Rule(
        "copies",
        lambda facts: _slow(facts, "load, staged"),
        "staged loads are below 0.9 of one pinned copy: look at"
        " the time of the caller first; then let the moves have a stream of their own",
    ),
    Rule(
        "copies",
        lambda facts: _least(facts, "load, direct, 64") > _least(facts, "load, staged, 64"),
        "direct loads win with pages of 64 KiB: lower DIRECT_BYTES in lmkv/memory/device_copier.py",
    ),
]


def failures(found: Mapping[str, Facts]) -> list[str]:
    codes = {name: facts["exit code"] for name, facts in found.items() if facts["exit code"]}
    missing = {name: facts["left out for want of"] for name, facts in found.items() if "left out for want of" in facts}
    return [f"{name} ended with code {code}: mend this first" for name, code in codes.items()] + [
        f"{name} was left out for want of {packages}: install that, then --only {name}"
        for name, packages in missing.items()
    ]


def _of_vllm(name: str, facts: Facts, control: Facts) -> list[str]:
    """Advice from a run on vLLM. `control`: a run with aborts and without a connector."""
    todo = []
    if _worst(facts, "blocks with wrong bytes"):
        todo.append(f"{name}: blocks have other bytes than were stored: wrong KV, mend this before anything else")
    elif facts.get("batches compute alike") and not facts.get("outputs are equal", True):
        todo.append(f"{name}: outputs differ, though batches compute alike and all loaded bytes are right")
    elif _number(facts, "beside aborts: outputs that differ") > _number(control, "beside aborts: outputs that differ"):
        todo.append(
            f"{name}: beside aborts more outputs differ than without lmkv, and all loaded bytes are right: rounding,"
            " unless vllm-lmkv-alike says the same"
        )
    if "lmkv" in name and facts.get("loaded tokens") == 0:
        todo.append(f"{name}: nothing was loaded; read its log with LMKV_LOG_LEVEL=DEBUG")
    if "disk" in name and facts.get("loaded tokens") and not facts.get("tokens from disk"):
        todo.append(f"{name}: nothing was loaded from the disk: lower max_local_cpu_size in DISK")
    return todo


def advice(found: Mapping[str, Facts]) -> list[str]:
    """What to do next, the most urgent first."""
    todo = failures(found)
    for name, facts in found.items():
        todo += _of_vllm(name, facts, found.get("vllm-aborts", {}))
    todo += [rule.advice for rule in RULES if rule.step in found and rule.applies(found[rule.step])]
    plain, ours = (_number(found.get(name, {}), "cold seconds") for name in ("vllm", "vllm-lmkv"))
    if plain and ours > 1.03 * plain:
        todo.append(f"stores cost {ours / plain - 1:.0%} of a cold request: raise device_staging_size, then profile")
    return todo or ["put the figures and their commands into docs/performance.md"]


def _before(out: Path, simulated: bool) -> dict[str, dict[str, Any]]:
    """The facts of steps that ran before, on the same kind of device."""
    try:
        before = json.loads(out.read_text())
    except (OSError, ValueError):
        return {}
    return dict(before["steps"]) if before["simulated"] == simulated else {}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", default="gpu_first_run.json", type=Path)
    parser.add_argument("--only", default="", help="names of steps, with commas between them")
    parser.add_argument("--list", action="store_true", help="the steps, and the seconds that each takes at most")
    parser.add_argument("--simulate", action="store_true")
    options = parser.parse_args()
    chosen = {step.name: step for step in steps(options.simulate)}
    if options.list:
        for step in chosen.values():
            missing = f"  without {', '.join(step.missing)}: left out" if step.missing else ""
            print(f"{step.name:18} {step.seconds:4.0f} s{missing}")
        return 0
    only = list(filter(None, options.only.split(",")))
    if set(only) - chosen.keys():
        parser.error(f"no such steps: {', '.join(sorted(set(only) - chosen.keys()))}; there are {', '.join(chosen)}")
    found: dict[str, dict[str, Any]] = _before(options.out, options.simulate) if only else {}
    for step in [chosen[name] for name in only] or chosen.values():
        found[step.name] = run(step, options.out.with_suffix(f".{step.name}.log"))
        for name, value in found[step.name].items():
            print(f"{step.name}: {name}: {value}", flush=True)
        options.out.write_text(json.dumps({"simulated": options.simulate, "steps": found}, indent=1))
    next_steps = advice(found) if not options.simulate else [SIMULATED, *failures(found)]
    options.out.write_text(json.dumps({"simulated": options.simulate, "steps": found, "next": next_steps}, indent=1))
    for line in next_steps:
        print(f"next: {line}")
    return 1 if any(facts["exit code"] for facts in found.values()) else 0


if __name__ == "__main__":
    sys.exit(main())
