"""`lmkv record` beside an engine that works, until Ctrl+C; its trace is then replayed."""

from __future__ import annotations

from contextlib import closing
from pathlib import Path

from lmkv.policies import LRU
from lmkv.simulation import replay
from lmkv.simulation.trace import read_trace
from tests.agent.serving import TOKEN, service_of_scheduler, serving
from tests.kit import LIMIT, eventually
from tests.terminal import terminal
from tests.vllm.scheduler.simulated_vllm import SimulatedRequest, SimulatedVLLM
from tests.vllm.scheduler.test_explain import CHUNK, OTHERS, PROMPT, engine_of


def serve(engine: SimulatedVLLM, *prompts: list[int]) -> None:
    for tokens in prompts:
        engine.add(SimulatedRequest("secret-id", list(tokens), len(tokens), 1, "secret-salt"))
        engine.finish()


def test_it_records_until_it_is_interrupted(tmp_path: Path) -> None:
    out = tmp_path / "trace.jsonl"
    with closing(engine_of(ram_chunks=60)) as engine, serving(service_of_scheduler(engine.scheduler, CHUNK)) as servers:
        serve(engine, OTHERS[0])
        with terminal("record", str(out), "--url", servers[0].url, LMKV_AGENT_TOKEN=TOKEN) as recording:
            eventually(lambda: out.exists() and out.read_text().count("\n") == 1, "the header", seen=recording.written)
            serve(engine, PROMPT, *OTHERS[1:3], PROMPT)
            eventually(lambda: out.read_text().count("\n") == 5, "the requests", seen=recording.written)
            recording.press(b"\x03")
            assert recording.process.wait(LIMIT) == 0
            assert f"lmkv simulate {out}" in "".join(recording.written().split("\r\n")).replace("\n", "")
    written = out.read_text()
    assert "secret" not in written
    trace = read_trace(out)
    assert [request.tokens for request in trace.requests] == [len(PROMPT), 16, 16, len(PROMPT)]
    whole = len(PROMPT) // CHUNK * CHUNK
    assert replay(trace, LRU(), 1 << 30, 4096).hit_tokens == whole
