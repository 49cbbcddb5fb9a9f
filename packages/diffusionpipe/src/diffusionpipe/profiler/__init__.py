"""Measures what a plan needs to know of a job on this machine."""
