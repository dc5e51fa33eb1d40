"""The tiered store: knows which KV chunk is in which tier, and moves chunks between tiers."""
