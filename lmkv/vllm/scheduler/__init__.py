"""The scheduler side of the connector: which chunks are loaded and stored. No vLLM types."""
