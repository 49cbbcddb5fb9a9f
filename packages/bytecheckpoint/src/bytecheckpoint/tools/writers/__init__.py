"""Writers of other formats of checkpoints."""
