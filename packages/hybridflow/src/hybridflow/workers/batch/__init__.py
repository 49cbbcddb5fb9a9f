"""Tables of samples that travel between workers, and layouts of models over ranks."""
