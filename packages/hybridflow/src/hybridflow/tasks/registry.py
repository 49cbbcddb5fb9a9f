"""Registry of the tasks that a recipe can name as "NAME:NUMBER"."""

from __future__ import annotations

from collections.abc import Callable

from hybridflow.tasks.base import Task
from shared.registry import Registry

__all__ = ["TASKS"]

TASKS: Registry[str, Callable[[int, int], Task]] = Registry("task")
"""By name, a function from a recipe's number and seed to a task."""
TASKS.add("digit-sort", "hybridflow.tasks.digit_sort:make", "NUMBER digits to sort")
TASKS.add("arithmetic", "hybridflow.tasks.arithmetic:make", "sums of numbers up to NUMBER")
