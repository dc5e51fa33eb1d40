"""Sessions: a request whose inputs are streamed, one after the other, as vLLM's realtime API has them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from tests.vllm.harness import Engine, engine, external_hits, generated, prompt

FIRST, SECOND = prompt(71, 300), prompt(72, 250)


def session(running: Engine, *inputs: list[int]) -> list[list[int]]:
    """What is generated after each input: three tokens, of which vLLM throws the last away for the next input."""
    from vllm import SamplingParams
    from vllm.sampling_params import RequestOutputKind

    front, answers = running.llm.llm_engine, []
    core: Any = front.engine_core.engine_core
    for tokens in inputs:
        sampling = SamplingParams(
            temperature=0, max_tokens=3, ignore_eos=True, detokenize=False, output_kind=RequestOutputKind.DELTA
        )
        given = front.input_processor.process_inputs(
            "session", {"prompt_token_ids": list(tokens)}, sampling, supported_tasks=("generate",), resumable=True
        )
        core.add_request(*core.preprocess_add_request(given))
        answers.append([])
        while core.scheduler.requests["session"].status.name != "WAITING_FOR_STREAMING_REQ":
            outputs, _ = core.step()
            for output in outputs.get(0).outputs if outputs else ():
                answers[-1] += output.new_token_ids
    core.abort_requests(["session"])
    while core.scheduler.has_requests() or (running.connector is not None and running.connector.sides.scheduler.busy):
        core.step()
    return answers


def test_what_a_session_has_stored_is_found_by_its_whole_prompt(model: Path) -> None:
    with engine(model, connector=None) as plain:
        expected = session(plain, FIRST, SECOND)
        whole = [*FIRST, *expected[0][:2], *SECOND]
        rest = plain.ids([whole], max_tokens=3)
    assert rest == expected[1:], "the third token was thrown away"
    with engine(model) as running:
        assert session(running, FIRST, SECOND) == expected
        found = running.again([whole], max_tokens=3)
        assert external_hits(found[0]) == len(whole) - 1
        assert generated(found) == rest
        running.forget_local()
        assert session(running, FIRST, SECOND) == expected
        running.assert_nothing_leaked()
