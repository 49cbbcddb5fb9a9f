"""What a new user of a package runs on the first day, for `tools/day_one.py`."""
