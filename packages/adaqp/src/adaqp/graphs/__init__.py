"""Graphs to train on: what a user hands in, real and generated ones, and files."""
