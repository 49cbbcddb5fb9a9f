"""Cuts chains of layers into stages, by dynamic programming."""
