"""Loops over an algorithm's two parts: synchronous, one step apart, or fully asynchronous.

All take prompts as a function of the step, so that a run can resume at any step: `Prompts.batch`,
or `lambda step: task.batch(step, 64)`. All are iterators over the metrics of each step.
"""

from hybridflow.algorithms.loops.async_ import Asynchronous
from hybridflow.algorithms.loops.buffer import Buffer, admitted
from hybridflow.algorithms.loops.off_policy import Correction
from hybridflow.algorithms.loops.one_step import OneStep
from hybridflow.algorithms.loops.sync import run

__all__ = ["Asynchronous", "Buffer", "Correction", "OneStep", "admitted", "run"]
