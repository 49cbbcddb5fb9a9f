"""Full-graph GNN training across hosts with adaptively quantised messages behind compute."""

__version__ = "0.1.0"
