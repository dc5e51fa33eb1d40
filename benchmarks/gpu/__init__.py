"""Compares any KV connector with vLLM alone on a GPU: `python -m benchmarks.gpu`."""
