"""Settings of llama.cpp: the type of each layer's tensors, and how layers are split over devices.

llama.cpp has formats of its own; each width takes the nearest one in size. Its split is of layers and
the output together, in proportions: whole numbers of layers, with the output on the last device.
"""

from __future__ import annotations

import shlex
from itertools import groupby
from pathlib import Path

from llmpq.planner.plan import Plan
from shared.files import write_atomically

__all__ = ["TYPES", "export", "tensor_split", "tensor_types"]

TYPES = {3: "q3_K", 4: "q4_K", 8: "q8_0", 16: "bf16"}
"""llama.cpp's type for each width; where columns are no multiple of 256 it takes a larger one."""


def export(plan: Plan, folder: Path, out: Path) -> list[str]:
    """Writes the commands to the file `out`; see `llmpq.integrations.export`."""
    quantise = " ".join(f"--tensor-type '{pattern}={kind}'" for pattern, kind in tensor_types(plan))
    kept = TYPES[16]  # embedding and output, which plans leave as they are
    quantise += f" --token-embedding-type {kept} --output-tensor-type {kept}"
    base = TYPES[min(plan.bits)].upper().replace("Q3_K", "Q3_K_M").replace("Q4_K", "Q4_K_M")
    ranks = ", ".join(str(stage.rank) for stage in plan.stages)
    split = f"--split-mode layer --tensor-split {tensor_split(plan)}"
    lines = [
        f"python convert_hf_to_gguf.py {shlex.quote(str(folder))} --outtype bf16 --outfile model-bf16.gguf",
        f"llama-quantize {quantise} model-bf16.gguf model.gguf {base}",
        f"# devices in the order of the plan's ranks: {ranks}",
        f"llama-cli --model model.gguf --gpu-layers {plan.num_layers + 1} {split}",
    ]
    write_atomically(out, "\n".join(lines) + "\n")
    return [f"wrote {out}:", *lines]


def tensor_types(plan: Plan) -> list[tuple[str, str]]:
    """Patterns of tensor names, one for consecutive layers of one width, and their types."""
    found = []
    for bits, layers in groupby(enumerate(plan.bits), key=lambda entry: entry[1]):
        numbers = "|".join(str(layer) for layer, _ in layers)
        found.append((rf"blk\.({numbers})\.(attn|ffn)_.*weight", TYPES[bits]))
    return found


def tensor_split(plan: Plan) -> str:
    """The value of --tensor-split: layers of each device, and the output with the last one's."""
    counts = [stage.layers[1] - stage.layers[0] for stage in plan.stages]
    counts[-1] += 1
    return ",".join(map(str, counts))
