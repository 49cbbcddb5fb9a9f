"""A plan's static orders as each rank's instructions, with the messages that follow from them."""

from diffusionpipe.runtime.instructions.dataflow import BackboneFlow, Dataflow, StageFlow
from diffusionpipe.runtime.instructions.messages import describe_action, name_lane, scale_rows
from diffusionpipe.runtime.instructions.plan_check import check_splits
from diffusionpipe.runtime.instructions.program import Instruction, Program, compile_programs

__all__ = [
    "BackboneFlow",
    "Dataflow",
    "Instruction",
    "Program",
    "StageFlow",
    "check_splits",
    "compile_programs",
    "describe_action",
    "name_lane",
    "scale_rows",
]
