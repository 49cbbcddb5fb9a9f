"""Candidates: sets of unequal replicas that a step may run, found beforehand from many lengths."""

from hydraulis.planner.proposals.candidates import Candidate, propose
from hydraulis.planner.proposals.shapes import ReplicaShape, exclusions

__all__ = ["Candidate", "ReplicaShape", "exclusions", "propose"]
