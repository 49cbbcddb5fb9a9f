"""Loading: chooses which rank reads which bytes, and copies them into tensors."""
