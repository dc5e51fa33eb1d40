"""Where the bytes lie and how they move: the slab, the paged KV memory, and the copies between them."""
