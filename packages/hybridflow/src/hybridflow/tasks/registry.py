"""The tasks that a recipe can name as "NAME:NUMBER"; recipes and their checks read this list."""

from __future__ import annotations

from collections.abc import Callable

from hybridflow.tasks.base import Task
from shared.registry import Registry

__all__ = ["TASKS"]

TASKS: Registry[str, Callable[[int, int], Task]] = Registry("task")
"""By name, what makes a task of a recipe's number and seed."""
TASKS.add("digit-sort", "hybridflow.tasks.digit_sort:make", "NUMBER digits to sort")
TASKS.add("arithmetic", "hybridflow.tasks.arithmetic:make", "sums of numbers up to NUMBER")
