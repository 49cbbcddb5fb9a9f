"""Checks by trial: layers against a forward, rows of frozen functions, what inputs depend on."""
