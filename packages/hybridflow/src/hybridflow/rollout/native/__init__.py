"""Generation with the trainer's own weights in its own layout."""
