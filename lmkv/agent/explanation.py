"""Explains a request's report in a sentence: loaded tokens, missed tokens, and advice."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

ADVICE = {
    "not_stored": "No tier is known to have it. Another model, data type, salt, tag or adapter has chunks of its own.",
    "no_state": "Its chunks are there, but no state of a recurrent layer was kept behind them: see state_interval.",
    "evicted": "A larger tier, or one more below it, would have kept it.",
    "too_short": "Less than a chunk is left, or less than min_retrieve_tokens was found.",
    "not_ready": "It is just being stored: a request that comes later finds it.",
    "tier_unavailable": "That tier fails, and counts as empty until it answers again: see the log.",
    "deadline": "It did not arrive in the time that computing it takes, or within prefetch_deadline: prefetch it.",
    "slower": "Computing it is faster than that tier: load_or_recompute measures both.",
    "not_promoted": "It could not be read, or host memory had no room for it: see max_local_cpu_size.",
    "limited": "The request's max_load_tokens forbids more.",
    "skip_load": "The request asks for no loads with lmkv.skip_load, has no tokens, or its tags are unclear.",
    "not_taken": "vLLM did without the tokens that were found, for prompt log-probabilities or another connector.",
    "failed": "A load for this request failed before: see the log.",
    "audited": "It was found, and computed all the same to compare both: see audit_rate.",
    "switched_off": "An audit has found a wrong chunk, and audit_action ends all loads: see the log, then restart.",
    "unidentified": "It is unknown which weights, adapter or image it is computed with: see the log.",
}
"""Reason of a miss -> its meaning and advice."""


def explained(report: Mapping[str, Any]) -> dict[str, Any]:
    """The report with an `explanation`."""
    return {**report, "explanation": " ".join(_sentences(report))}


def _sentences(report: Mapping[str, Any]) -> list[str]:
    loaded = " and ".join(f"{tokens:,} from {tier}" for tier, tokens in report["sources"].items()) or "none"
    found = f"vLLM's own cache had {report['vllm_tokens']:,} of {report['tokens']:,} tokens; lmkv loaded {loaded}."
    missed = report.get("missed")
    return [found] if missed is None else [found, _miss(missed), ADVICE.get(missed["reason"], "")]


def _miss(missed: Mapping[str, Any]) -> str:
    tier, ago = missed.get("tier"), missed.get("seconds_ago")
    where = "" if tier is None else f" from {tier}" if missed["reason"] == "evicted" else f" in {tier}"
    when = "" if ago is None else f" {ago:.0f} s before"
    return f"{missed['tokens']:,} were missed: {missed['reason'].replace('_', ' ')}{where}{when}."
