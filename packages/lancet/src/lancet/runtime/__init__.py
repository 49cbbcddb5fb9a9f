"""Running captured graphs on ranks: the backend, the executor, exchanges, checks."""
