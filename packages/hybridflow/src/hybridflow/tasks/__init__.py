"""Small problems with verifiable answers, which a small model learns within about a minute."""

from hybridflow.tasks.arithmetic import Arithmetic
from hybridflow.tasks.base import QuestionTask, Task, match_each, match_fraction
from hybridflow.tasks.digit_sort import DigitSort

__all__ = ["Arithmetic", "DigitSort", "QuestionTask", "Task", "match_each", "match_fraction"]
