"""The ranks that save and load together: agreement, failures, and what each did when."""
