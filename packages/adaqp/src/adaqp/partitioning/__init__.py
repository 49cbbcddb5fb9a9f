"""Cutting a graph into one part a rank."""
