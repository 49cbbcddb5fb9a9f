"""Sampled neighbourhoods as of any time, and the forms they are returned in."""
