"""Hooks into training frameworks; each needs its framework installed, and no other."""
