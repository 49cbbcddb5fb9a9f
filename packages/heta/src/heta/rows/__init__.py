"""Run: rows of nodes, learnable ones with their optimizers, and the cache of remote ones."""
