"""The tiered store: knows which chunk is in which tier, and moves chunks between tiers."""
