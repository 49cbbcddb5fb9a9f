"""Settings of vLLM: how many layers each pipeline stage has, beside a folder of rounded weights.

What runs on an A100, a T4 or an L4 is what vLLM's Marlin kernels take there (compute capability 7.5 and
newer): 4 bits with zero points, 8 bits without, in groups of 32, 64 or 128 columns or of a row, for
matrices of multiples of 64 rows and 128 columns.
"""

from __future__ import annotations

import shlex
from pathlib import Path

from llmpq.config import ModelSpec
from llmpq.integrations import compressed_tensors
from llmpq.planner.plan import Plan
from shared.errors import ConfigError

__all__ = ["export", "partition"]

_STORED_BITS = {3: 4, 4: 4, 8: 8}
_SYMMETRIC_BITS = (8,)
_GROUP_SIZES = (32, 64, 128, -1)
_ROWS, _COLUMNS = 64, 128
"""Multiples of rows and columns that Marlin's tiles need."""


def export(plan: Plan, folder: Path, out: Path) -> list[str]:
    """Writes the folder `out` for vLLM to serve; see `llmpq.integrations.export`.

    Codes of 3 bits are stored in 4, and those of 8 bits are rounded anew where they need a zero point.
    """
    spec = ModelSpec.from_hf(folder)
    is_rounded = min(plan.bits) < 16
    is_row = plan.group_size >= max(matrix.in_features for matrix in spec.matrices)
    if is_rounded and plan.group_size not in _GROUP_SIZES and not is_row:
        raise ConfigError(
            f"group size: vLLM's kernels for A100, T4 and L4 expect groups of 32, 64 or 128 columns, or "
            f"of a row (-1), got {plan.group_size}; plan with another --group-size"
        )
    compressed_tensors.write_folder(
        plan, folder, out, _STORED_BITS, symmetric_bits=_SYMMETRIC_BITS, dequantize=False
    )
    ranks = ", ".join(str(stage.rank) for stage in plan.stages)
    serve = f"vllm serve {shlex.quote(str(out))} --pipeline-parallel-size {len(plan.stages)}"
    lines = [
        f"wrote {out}",
        f"vLLM's stages in order are the plan's ranks {ranks}; start it with:",
        f"VLLM_PP_LAYER_PARTITION={partition(plan)} {serve}",
        "a T4 has no bfloat16: add --dtype half there",
    ]
    if 8 in plan.bits:
        lines.append(
            "8-bit layers are written without zero points, as vLLM's kernels take them; where that needs "
            "a larger scale they are rounded a second time, so that logits differ a little"
        )
    odd = [
        matrix.name
        for matrix in spec.matrices
        if matrix.out_features % _ROWS or matrix.in_features % _COLUMNS
    ]
    if is_rounded and odd:
        lines.append(
            f"vLLM's Marlin kernels expect multiples of {_ROWS} rows and {_COLUMNS} columns, which "
            f"{', '.join(odd)} are not: vLLM will look for a slower kernel, and may find none"
        )
    return lines


def partition(plan: Plan) -> str:
    """The value of VLLM_PP_LAYER_PARTITION: layers of each stage."""
    return ",".join(str(stage.layers[1] - stage.layers[0]) for stage in plan.stages)
