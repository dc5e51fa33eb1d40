"""The agent API: an HTTP service in the engine's process that looks up, prefetches, pins and deletes chunks of
prompts.
"""
