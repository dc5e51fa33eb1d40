"""The tiered store: an index of the KV chunks in host memory and in lower tiers, and the code that moves chunks."""
