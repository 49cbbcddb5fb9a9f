"""Describe: schema, graph, formats, and the folders of parts."""
