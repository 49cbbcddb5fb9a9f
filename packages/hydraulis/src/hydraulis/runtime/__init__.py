"""Training steps: attention by document, on one rank or a group of them, and the engine."""
