"""The agent API: an HTTP service inside the engine's process that looks up, prefetches, pins and clears."""
