"""Messages between ranks: link costs, buffers, exchanges, and the policies carried out."""
