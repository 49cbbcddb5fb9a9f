"""Tools for whole checkpoints, without ranks: convert, reshard, verify, compare, list."""
