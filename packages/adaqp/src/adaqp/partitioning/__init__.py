"""Cutting a graph into one part per rank."""
