"""Settings of vLLM: how many layers each pipeline stage has, beside a folder of rounded weights."""

from __future__ import annotations

from pathlib import Path

from llmpq.integrations import compressed_tensors
from llmpq.planner.plan import Plan

__all__ = ["export", "partition"]


def export(plan: Plan, folder: Path, out: Path) -> list[str]:
    """Writes the folder `out` for vLLM to serve; see `llmpq.integrations.export`.

    vLLM's kernels have 4 and 8 bits; codes of 3 bits are stored in 4.
    """
    stored_bits = {3: 4, 4: 4, 8: 8}
    compressed_tensors.write_folder(plan, folder, out, stored_bits, dequantize=False)
    ranks = ", ".join(str(stage.rank) for stage in plan.stages)
    serve = f"vllm serve {out} --pipeline-parallel-size {len(plan.stages)}"
    return [
        f"wrote {out}",
        f"vLLM's stages in order are the plan's ranks {ranks}; start it with:",
        f"VLLM_PP_LAYER_PARTITION={partition(plan)} {serve}",
    ]


def partition(plan: Plan) -> str:
    """The value of VLLM_PP_LAYER_PARTITION: layers of each stage."""
    return ",".join(str(stage.layers[1] - stage.layers[0]) for stage in plan.stages)
