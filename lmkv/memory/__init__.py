"""Slots in host memory, paged KV memory on a device or the host, and the copies between them."""
