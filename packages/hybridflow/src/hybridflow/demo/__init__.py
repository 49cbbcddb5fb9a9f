"""The demo and its baseline."""
