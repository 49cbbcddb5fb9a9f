"""Readers of other formats of checkpoints, and the registry of formats.

A reader makes an index of the byte ranges of existing files, so that everything that reads our own
format by slices reads others by slices too. Their writers are `bytecheckpoint.tools.writers`.
"""
