"""Decides which host computes which relations: closures, predicted step times, plans."""
