"""Undoing an optimizer's step: inverses of the steps, the bits they miss, marks a parameter."""
