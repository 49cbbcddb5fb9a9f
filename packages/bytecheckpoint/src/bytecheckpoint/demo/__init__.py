"""The demo: a small training on real text that is killed and resumed elsewhere."""
