"""The files of a checkpoint: data files, index, manifest, and the commit."""
