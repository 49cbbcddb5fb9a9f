"""A model's weights and optimizer state as files: sharded checkpoints, and export of weights."""
