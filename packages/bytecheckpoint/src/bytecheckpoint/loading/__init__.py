"""Loading: which bytes are read, by which rank, into which tensors."""
