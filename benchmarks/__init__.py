"""Benchmarks of lmkv, and the code that they share. Run a benchmark from the root of the repository: `python -m
benchmarks.NAME`.
"""
