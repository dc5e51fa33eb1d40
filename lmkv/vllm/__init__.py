"""The vLLM connector. Importing this package imports nothing of vLLM; `lmkv.vllm.connector` does."""
