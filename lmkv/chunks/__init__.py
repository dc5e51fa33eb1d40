"""What a chunk is and what it is called: keys, namespaces, its layout in memory and its form on disk."""
