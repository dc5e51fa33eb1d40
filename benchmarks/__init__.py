"""Benchmarks of lmkv, and what they share. Run one from the root of the repository: `python -m benchmarks.NAME`."""
