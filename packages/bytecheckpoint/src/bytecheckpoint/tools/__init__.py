"""What works on whole checkpoints without ranks: convert, reshard, verify, compare, list."""
