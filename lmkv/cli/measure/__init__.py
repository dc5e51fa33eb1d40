"""What `lmkv demo`, `lmkv bench` and the benchmarks measure with, on this machine and on real vLLM."""
