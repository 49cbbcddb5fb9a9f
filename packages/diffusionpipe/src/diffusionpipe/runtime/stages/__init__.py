"""What a rank computes: its layers forward and backward, gradients, and whether all is finite."""

from diffusionpipe.runtime.stages.compute import StageCompute
from diffusionpipe.runtime.stages.gradients import GradientSums
from diffusionpipe.runtime.stages.health import Health, Problem
from diffusionpipe.runtime.stages.tracing import Trace, trace_job

__all__ = ["GradientSums", "Health", "Problem", "StageCompute", "Trace", "trace_job"]
