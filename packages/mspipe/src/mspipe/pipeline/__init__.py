"""The training pipeline: its stages, staleness, workers, and report."""
