"""Host memory with its slots, paged KV memory on a device or the host, and copies between slots and paged memory."""
