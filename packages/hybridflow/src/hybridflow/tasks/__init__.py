"""Small problems with verifiable answers, on which an algorithm is seen to learn within a minute."""

from hybridflow.tasks.arithmetic import Arithmetic
from hybridflow.tasks.base import QuestionTask, Task, match_each, match_fraction
from hybridflow.tasks.digit_sort import DigitSort

__all__ = ["Arithmetic", "DigitSort", "QuestionTask", "Task", "match_each", "match_fraction"]
