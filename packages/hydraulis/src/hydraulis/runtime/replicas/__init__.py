"""Runs unequal replicas side by side, another set of them each step."""

from hydraulis.runtime.replicas.runner import ReplicaRunner

__all__ = ["ReplicaRunner"]
