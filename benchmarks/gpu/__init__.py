"""Any KV connector beside vLLM alone on a GPU: `python -m benchmarks.gpu`."""
