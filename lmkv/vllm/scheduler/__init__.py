"""The connector on the scheduling thread: what is loaded, what is stored. No vLLM types."""
