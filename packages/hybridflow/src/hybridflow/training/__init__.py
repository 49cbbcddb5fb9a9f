"""Recipes and runs: settings, placement, models, steps, checkpoints."""
