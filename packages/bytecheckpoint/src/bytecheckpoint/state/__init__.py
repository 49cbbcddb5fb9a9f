"""What a training state consists of: tensors by name, values, generators, data loaders."""
