"""The parts of a training state: tensors by name, values, random generators, data loaders."""
