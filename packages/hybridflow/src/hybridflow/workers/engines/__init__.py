"""Engines that run workers: in this process, in local or torchrun processes, or as Ray actors."""
