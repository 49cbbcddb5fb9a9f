"""The training graph: its capture, its operations, and its rewriting."""
