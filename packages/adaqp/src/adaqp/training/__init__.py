"""Training on a rank's share: settings, layers, trainer, checkpoints, comparisons."""
