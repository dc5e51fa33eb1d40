"""Chunks, the units in which lmkv stores KV: their keys and namespaces, their layout in memory, and their file
format.
"""
