"""A plan inside training loops of other libraries."""
