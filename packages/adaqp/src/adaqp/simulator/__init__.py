"""Measures what a prediction needs, and predicts a step's seconds from it."""
