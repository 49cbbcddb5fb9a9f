"""Measures what plans are made of: a layer's passes, its bytes, and the way to the store."""
