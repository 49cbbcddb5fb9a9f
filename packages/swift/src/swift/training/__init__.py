"""The training loop and what it needs to repeat a step."""
