"""The temporal graph and its storage."""
