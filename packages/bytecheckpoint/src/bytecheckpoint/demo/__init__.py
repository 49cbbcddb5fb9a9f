"""The demo: a small training run on real text, killed and resumed on other numbers of ranks."""
