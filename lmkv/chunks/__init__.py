"""Chunks, the units in which KV is stored: their keys and namespaces, their layout in memory, and their format on
disk.
"""
