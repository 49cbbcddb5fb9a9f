"""Seconds of micro-batches: from a model's shape, or measured."""
