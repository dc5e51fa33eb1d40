"""Measures hits in a remote store: real vLLM ends, and another one is asked the same prompts."""

from __future__ import annotations

from pathlib import Path

from attrs import evolve

from lmkv.cli.measure.hit import PROMPTS, Measurement, Plan, Progress, ask_in_turn, started, summarize, warm_up


def measure_remote(plan: Plan, folder: Path, url: str, say: Progress = print) -> Measurement:
    """Run `plan` over the store at `url`; the model and vLLM's logs are written into `folder`.

    The store is measured even where it is slower than computing.
    """
    remote = {"remote_url": url, "remote_timeout": 10.0, "prefetch_deadline": 60.0, "load_or_recompute": False}
    plan = evolve(plan, options={**remote, **plan.options})
    with started(plan, folder, "starting vLLM on a small model with random weights", say) as engine:
        warm_up(engine, plan, PROMPTS, say)
        cold = ask_in_turn("cold", plan, engine, say)
        warm = ask_in_turn("from memory", plan, engine, say)
        say("ending vLLM, which finishes its writes")
        engine.leave()
    with started(plan, folder, "starting another vLLM", say) as engine:
        warm_up(engine, plan, PROMPTS + 1, say)
        loaded = ask_in_turn("from the remote store", plan, engine, say)
        return summarize(plan, cold, warm, remote=loaded, engine=engine.engine, device=engine.device)
