"""The agent API: an HTTP service in the engine's process to look up, prefetch, pin and delete the chunks of prompts."""
