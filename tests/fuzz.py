"""The suite's properties of what comes from outside, searched by coverage instead of at random, for as long as wanted.

    pip install atheris
    python -m tests.fuzz headers -max_total_time=600

What to fuzz is the first word: `headers` of chunks, `folders` with any files, configuration `files`, the connector's
`extra` configuration, `http` requests to the agent API, answers of `peers` to it, the `claims` of requests, `traces` to
simulate, or answers of `remotes`. The rest are libFuzzer's options. It ends with a traceback at the first failure.
"""

from __future__ import annotations

import sys
import tempfile
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import atheris

with atheris.instrument_imports(include=["lmkv", "yaml"]):
    from hypothesis import given, strategies as st

    from tests.agent import test_fuzz_http, test_fuzz_peers
    from tests.agent.serving import service_of, store_over
    from tests.backends.disk.attacks.test_any_folder import test_any_folder
    from tests.backends.remote.test_hostile import test_any_answers
    from tests.chunks.test_codec import test_sealed_lies_are_rejected_or_harmless
    from tests.cli.test_simulate import test_any_lines_are_a_trace_or_are_refused
    from tests.test_fuzz import test_any_extra_configuration, test_any_file
    from tests.vllm.scheduler.test_claims import test_any_claims


def main() -> None:
    with ExitStack() as stack:
        store = stack.enter_context(store_over(Path(stack.enter_context(tempfile.TemporaryDirectory())) / "kv"))
        service = service_of(store)

        @given(test_fuzz_http.requests)
        def any_request(asked: test_fuzz_http.Asked) -> None:
            test_fuzz_http.refused_or_answered(service, asked)

        engine = stack.enter_context(
            test_fuzz_peers.beside_another(Path(stack.enter_context(tempfile.TemporaryDirectory())) / "kv")
        )

        @given(st.sampled_from(test_fuzz_peers.CALLS), test_fuzz_peers.answers)
        def any_answer(call: tuple[str, str], answer: bytes) -> None:
            test_fuzz_peers.answered(engine, *call, answer)

        targets: dict[str, Callable[..., Any]] = {
            "folders": test_any_folder, "headers": test_sealed_lies_are_rejected_or_harmless, "files": test_any_file,
            "extra": test_any_extra_configuration, "http": any_request,
            "traces": test_any_lines_are_a_trace_or_are_refused, "remotes": test_any_answers, "peers": any_answer,
            "claims": test_any_claims,
        }  # fmt: skip
        if len(sys.argv) < 2 or sys.argv[1] not in targets:
            sys.exit(f"{__doc__}\nWhat to fuzz: {', '.join(targets)}")
        target = targets[sys.argv.pop(1)]
        atheris.Setup(sys.argv, target.hypothesis.fuzz_one_input)  # type: ignore[attr-defined]
        atheris.Fuzz()


if __name__ == "__main__":
    main()
