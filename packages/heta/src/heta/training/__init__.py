"""Run: sampling, exchange, the training step, evaluation and checkpoints."""
