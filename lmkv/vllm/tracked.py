"""A request from its arrival to its end, as both directions see it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from attrs import define, field

from lmkv.claims import Lease
from lmkv.hashing import KeyChain
from lmkv.promotion import Promotion
from lmkv.protocols import ChunkKey
from lmkv.vllm.options import RequestOptions
from lmkv.vllm.stream import Stream

BlockTables = Sequence[Sequence[int]]
"""Block ids of a request in the order of its tokens, one list for each KV cache group."""


class Request(Protocol):
    """What is read of a vLLM request."""

    @property
    def request_id(self) -> str: ...

    @property
    def num_tokens(self) -> int:
        """Known tokens, without placeholders for those that are being sampled."""
        ...

    @property
    def all_token_ids(self) -> Sequence[int]: ...


@define(eq=False)
class Tracked:
    """`root`: of its chunk keys. The rest is written by one side each:

    storing: `stored`, the leading chunks that are stored or being stored.
    loading: `computed`, vLLM's own hit at the last lookup; `lease`, what that lookup promised, until it is
    used or the step ends; `promotion`, chunks being brought up while it waits, since `waiting_since`;
    `streamed` and `streams`, whether the last promise is loaded between steps and how many were.
    """

    request: Request
    root: bytes
    chain: KeyChain
    options: RequestOptions
    stored: int = 0
    computed: int = 0
    lease: Lease | None = None
    promotion: Promotion | None = None
    waiting_since: float | None = None
    worth: bool | None = None
    streamed: bool = False
    streams: int = 0
    stream: Stream | None = None
    logged: tuple[int, int] | None = None
    sources: dict[str, int] = field(factory=dict)
    """Tokens that were promised last, by the tier that had them."""
    hit_tokens: int = 0
    load_bytes: int = 0
    load_seconds: float = 0.0
    bypass: bool = False
    """A load of this request failed: it computes the rest by itself and is not offered anything again."""

    @property
    def request_id(self) -> str:
        return self.request.request_id

    def keys(self, count: int) -> list[ChunkKey]:
        """The first `count` keys, hashing what has become known since the last call."""
        if count > len(self.chain.keys):
            # vLLM's read-only view copies twice when it is sliced; the list behind it once.
            self.chain.extend(getattr(self.request, "_all_token_ids", self.request.all_token_ids))
        return self.chain.keys[:count]

    def tokens(self, first: int, count: int) -> list[int]:
        """So many of its tokens from number `first` on, as far as they are known."""
        return list(self.request.all_token_ids[first : first + count])

    def release(self) -> None:
        """Let go of everything that was promised or brought up; a stream ends with its next piece."""
        self.drop_lease()
        self.drop_promotion()
        if self.stream is not None:
            self.stream.stop()

    def drop_lease(self) -> None:
        if self.lease is not None:
            self.lease.release()
            self.lease = None

    def drop_promotion(self) -> None:
        if self.promotion is not None:
            self.promotion.release()
            self.promotion = None

    def report(self) -> dict[str, object]:
        """What a request that asks for it is told when it ends."""
        return {
            "hit_tokens": self.hit_tokens,
            "sources": dict(self.sources),
            "load_bytes": self.load_bytes,
            "load_seconds": self.load_seconds,
        }
