"""Cuts the nodes of a graph into parts, at once or as events arrive."""
