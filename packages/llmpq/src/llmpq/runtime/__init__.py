"""Runs a plan: stages load their own layers, and micro-batches pass through them in a ring."""
