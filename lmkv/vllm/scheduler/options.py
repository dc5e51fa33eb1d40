"""`SchedulerOptions`: how the scheduler side loads and stores."""

from __future__ import annotations

import time
from typing import Literal

from attrs import frozen

from lmkv.protocols import Clock
from lmkv.vllm.requests.options import MAX_TOKENS


@frozen(kw_only=True)
class SchedulerOptions:
    """Made once, by the connector, from lmkv's and vLLM's configuration. The fields are in order:

    `ranks`: workers that answer each order. `loads`, `stores`: False switches that direction off, as for a
    producer or a consumer. `save_decode`: generated tokens are stored too. `save_unfull_chunk`: tails are
    stored and found, and chunks that begin like the rest of a prompt. `whole_blocks`: a hit ends with a
    block, because loads by layers come after the step has written the rest of that block.
    `min_retrieve_tokens`: smaller hits are computed. `load_or_recompute`: compute chunks that are measured
    to load more slowly. `load_mode`: within the step that reads the KV ("sync"), between steps ("async"), or whichever
    delays others less ("auto"). `concurrent_copies`: the device copies while it computes.
    `prefetch_deadline`: most seconds that a request waits for chunks of lower tiers. `lookahead`: how many
    tokens after a position its KV depends on, so that the end of a key's tokens cannot be served.
    `state_interval`: chunks from one kept state of a long prompt to the next; 0: so many that states take as much room
    as chunks. `pin_ttl`: seconds that a prefetch is kept, and a priority lasts. `audit_rate`: share of hits that are
    computed all the same, and compared, if `audits_computed`; and of loads that are read back. After a wrong one
    `audit_action` drops it, or disables loads as well. `media_by_name`: names of images are theirs alone. `longest`:
    tokens of the longest prompt. `clock`: in seconds.
    """

    ranks: int = 1
    loads: bool = True
    stores: bool = True
    save_decode: bool = True
    save_unfull_chunk: bool = False
    whole_blocks: bool = False
    min_retrieve_tokens: int = 0
    load_or_recompute: bool = True
    load_mode: Literal["auto", "sync", "async"] = "auto"
    concurrent_copies: bool = False
    prefetch_deadline: float = 30.0
    lookahead: int = 0
    state_interval: int = 0
    pin_ttl: float = 300.0
    audit_rate: float = 0.0
    audits_computed: bool = True
    audit_action: Literal["drop", "disable"] = "drop"
    media_by_name: bool = False
    longest: int = MAX_TOKENS
    clock: Clock = time.monotonic
