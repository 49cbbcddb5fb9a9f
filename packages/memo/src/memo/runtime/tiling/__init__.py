"""Layers whose row-local parts go tile by tile, so that only attention sees whole tensors."""
