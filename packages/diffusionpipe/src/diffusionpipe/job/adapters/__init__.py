"""Cuts models of diffusers into layers, one file a family."""
