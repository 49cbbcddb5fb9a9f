"""A graph that lies on several ranks: exchange, sampling, features, training."""
