"""Chunks: their keys and namespaces, their layout in memory, and their format on disk."""
