"""Features of nodes and edges: stores, files, and caches in front of them."""
