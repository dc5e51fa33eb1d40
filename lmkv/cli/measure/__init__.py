"""Measurements of lmkv beside its limits, on this machine and on real vLLM."""
