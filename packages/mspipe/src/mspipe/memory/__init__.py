"""What a model remembers of each node, and where the rows of it lie."""

from mspipe.memory.node_memory import NodeMemory
from mspipe.memory.row_layout import NO_MAIL, RowLayout, State

__all__ = ["NO_MAIL", "NodeMemory", "RowLayout", "State"]
