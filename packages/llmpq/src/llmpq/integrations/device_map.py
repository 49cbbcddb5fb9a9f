"""A `device_map` of transformers and accelerate: module name -> device number."""

from __future__ import annotations

import json
from pathlib import Path

from torch import nn

from llmpq.planner.plan import Plan
from llmpq.runtime.gptq import find_layers
from llmpq.runtime.layers import build, read_config
from llmpq.runtime.loader import check_plan
from shared.files import write_atomically

__all__ = ["device_map", "export"]


def export(plan: Plan, folder: Path, out: Path) -> list[str]:
    """Writes the map as JSON to the file `out`; see `llmpq.integrations.export`."""
    check_plan(plan, folder)
    write_atomically(out, json.dumps(device_map(plan, build(read_config(folder))), indent=1) + "\n")
    call = f"from_pretrained(folder, device_map=json.load(open({str(out)!r})))"
    return [f"wrote {out}; load the model with AutoModelForCausalLM.{call}"]


def device_map(plan: Plan, model: nn.Module) -> dict[str, int]:
    """The device of each layer, and of all else: the first stage's, which has both ends.

    Args:
        plan: its stages' ranks are the devices' numbers.
        model: the model, which may be on the meta device.
    """
    layers = find_layers(model)
    names = {module: name for name, module in model.named_modules()}
    first = plan.stages[0].rank
    devices = {}

    def visit(module: nn.Module, name: str) -> None:
        # A module that contains the layers is split; any other goes as a whole.
        if module is layers:
            return
        if not any(child is layers for child in module.modules()):
            devices[name] = first
            return
        for child_name, child in module.named_children():
            visit(child, f"{name}.{child_name}".lstrip("."))

    visit(model, "")
    for stage in plan.stages:
        for layer in range(*stage.layers):
            devices[f"{names[layers]}.{layer}"] = stage.rank
    return devices
