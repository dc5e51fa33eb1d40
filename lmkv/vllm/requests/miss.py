"""`Miss`: why a part of a request was not loaded."""

from __future__ import annotations

from attrs import frozen


@frozen
class Miss:
    """`tokens` of a request were not loaded for a `reason` (see `lmkv.vllm.observe.metrics.REASONS`).

    `tier`: where they were, or are. `seconds_ago`: when they were evicted.
    """

    reason: str
    tokens: int
    tier: str | None = None
    seconds_ago: float | None = None

    @property
    def looked_up(self) -> int:
        """The tokens that were looked up, and missed: none of a request that wants no load, or may have none."""
        return 0 if self.reason in ("skip_load", "unidentified") else self.tokens

    @property
    def told(self) -> str:
        """The reason for whoever must not learn of other salts."""
        return "not_stored" if self.reason == "other_salt" else self.reason

    def __str__(self) -> str:
        where = "" if self.tier is None else f" from {self.tier}" if self.reason == "evicted" else f" in {self.tier}"
        when = "" if self.seconds_ago is None else f" {self.seconds_ago:.0f} s ago"
        return f"{self.tokens} missed: {self.reason.replace('_', ' ')}{where}{when}"

    def report(self) -> dict[str, object]:
        """The miss in the request's report, which must not tell whether another salt's requests share the prompt."""
        fields = {"reason": self.told, "tokens": self.tokens, "tier": self.tier, "seconds_ago": self.seconds_ago}
        return {name: value for name, value in fields.items() if value is not None}
