"""The growing graph and the memory it lies in."""
