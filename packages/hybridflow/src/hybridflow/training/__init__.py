"""From a recipe to a run: settings, placement, models, steps, checkpoints."""
