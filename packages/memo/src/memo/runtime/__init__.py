"""Runs a plan: records layers' forwards, moves activations, and restores them before the backward."""
