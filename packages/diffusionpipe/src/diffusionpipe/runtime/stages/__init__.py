"""What a rank computes: its layers forward and backward, gradients, and whether all is finite."""

from diffusionpipe.runtime.stages.compute import StageCompute
from diffusionpipe.runtime.stages.gradients import GradientSums
from diffusionpipe.runtime.stages.health import BadValues, Health
from diffusionpipe.runtime.stages.tracing import Trace, trace_job

__all__ = ["BadValues", "GradientSums", "Health", "StageCompute", "Trace", "trace_job"]
