"""Plans inside of other libraries' training loops."""
