"""Profiles training steps, and predicts the seconds of a step from the profiles."""
