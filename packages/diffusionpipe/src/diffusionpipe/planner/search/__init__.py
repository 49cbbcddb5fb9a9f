"""Chooses among shapes of plans, and makes whole plans of the best."""
