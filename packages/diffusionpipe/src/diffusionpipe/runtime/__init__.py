"""Runs a plan on real ranks: instructions, messages, steps, checkpoints, and devices that sleep."""
