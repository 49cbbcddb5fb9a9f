"""What a model remembers of each node, and where the rows of it lie."""

from mspipe.memory.node_memory import NO_MAIL, NodeMemory, RowLayout, State

__all__ = ["NO_MAIL", "NodeMemory", "RowLayout", "State"]
