"""Messages between ranks: link costs, buffers, exchanges, and the execution of policies."""
