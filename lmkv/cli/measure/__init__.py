"""Measurements on this machine and on real vLLM, for `lmkv demo`, `lmkv bench` and the benchmarks."""
