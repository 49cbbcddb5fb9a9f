"""A model's weights and optimizer state as files: sharded, and exported whole."""
