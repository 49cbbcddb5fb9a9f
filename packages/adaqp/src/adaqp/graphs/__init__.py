"""Graphs to train on: the user's, real and generated ones, and file formats."""
