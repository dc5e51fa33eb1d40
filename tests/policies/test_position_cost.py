"""`position_cost` of ADAPTIVE: a hit far into a prompt saves more than one near its beginning."""

from __future__ import annotations

import hashlib

from lmkv.policies import ADAPTIVE
from lmkv.policies.shadow import Shadow

TIER, LONG, SHORT = 130, 40, 4
"""Chunks that have room, of a long prompt, and of a short one."""


def chain(name: str, chunks: int) -> list[bytes]:
    return [hashlib.sha256(f"{name} {number}".encode()).digest() for number in range(chunks)]


def hits(policy: ADAPTIVE, turns: int) -> tuple[int, int]:
    """Chunks found of long prompts, each of which comes twice, and of twelve short ones, which come in every turn.

    There is room for one kind or the other, as new prompts come in between.
    """
    tier, deep, shallow = Shadow(policy, TIER), 0, 0
    for turn in range(turns):
        tier.request(chain(f"long {turn}", LONG), 1)
        for number in range(15):
            tier.request(chain(f"new {turn} {number}", SHORT), 1)
        deep += tier.request(chain(f"long {turn}", LONG), 1)
        for number in range(12):
            shallow += tier.request(chain(f"short {number}", SHORT), 1)
        for number in range(15, 30):
            tier.request(chain(f"new {turn} {number}", SHORT), 1)
    return deep, shallow


def test_it_keeps_what_costs_more_to_compute() -> None:
    turns = 100
    most, costly = ADAPTIVE(), ADAPTIVE(position_cost=0.1)
    deep, shallow = hits(most, turns)
    assert most.weight > 1
    assert shallow > deep, "more chunks are found of the short ones"
    assert hits(costly, turns)[0] > 2 * deep
    assert costly.weight == 1
