"""Traces of torch.profiler: recorded, read, sorted into steps, operators and collectives."""
