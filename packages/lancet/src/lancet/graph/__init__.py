"""The training graph: its capture, its operations, where its batch lies, and its rewriting."""
