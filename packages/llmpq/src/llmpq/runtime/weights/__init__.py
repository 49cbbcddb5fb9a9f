"""A model's weights as they lie in a folder: files, checks, and forms in which they are stored."""
