"""Per-node memory of a model (state and messages) and the stores of its rows."""

from mspipe.memory.node_memory import NodeMemory
from mspipe.memory.row_layout import NO_MAIL, RowLayout, State

__all__ = ["NO_MAIL", "NodeMemory", "RowLayout", "State"]
