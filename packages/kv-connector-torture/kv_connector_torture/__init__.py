"""Torture tests for any KV connector of vLLM: `python -m kv_connector_torture --help`."""
