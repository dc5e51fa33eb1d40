"""Torture of any KV connector of vLLM: `python -m lmkv.testing.torture --help`."""
