"""Seconds of layers and of a store, on the machine at hand."""
