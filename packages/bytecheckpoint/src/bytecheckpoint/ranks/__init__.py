"""The ranks that save and load together: agreement, failures, and timing."""
