"""The tiered store: which chunk is in which tier, and how chunks move between tiers."""
