"""The continual loop: rounds, link prediction, replay, evaluation, checkpoints, reports."""
