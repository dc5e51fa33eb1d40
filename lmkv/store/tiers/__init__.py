"""One tier at a time: its index, its counters and its I/O."""
