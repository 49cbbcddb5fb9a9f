"""The list of methods: adding one touches its own file, this list and a test."""

from collections.abc import Callable

import numpy as np

from shared.registry import Registry

__all__ = ["METHODS", "Method"]

Method = Callable[[np.ndarray, np.ndarray, np.ndarray], np.ndarray]
"""Takes values [n], starts [ranges] and stops [ranges], all checked; returns int64 sums [ranges]."""

METHODS: Registry[str, Method] = Registry("method")
METHODS.add("prefix", "lancet.summing.prefix:sum_ranges", "prefix sums: one subtraction a range")
METHODS.add("loop", "lancet.summing.loop:sum_ranges", "one numpy sum a range")
