"""A cost for the small tasks, for runs with a bound on the cost."""

from __future__ import annotations

from typing import Any

from hybridflow.tasks.rewards import reward

__all__ = ["leading_nine"]


@reward
def leading_nine(sample: dict[str, Any], text: str) -> float:
    """1 for a response that begins with 9, else -0.1, so that a mean of 0 allows one in eleven."""
    return 1.0 if text.startswith("9") else -0.1
