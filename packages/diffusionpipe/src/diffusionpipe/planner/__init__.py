"""Plans a training step: stages, replicas, the order of passes, and where frozen parts run.

Everything here computes on numbers: no torch, no process group.
"""
