"""Pure plans: what each layer keeps, stores and computes again, when it moves, and at which addresses."""
