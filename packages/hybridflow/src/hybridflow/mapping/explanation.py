"""A mapping in words: sets, layouts, memory, stages, and what it was preferred to."""

from __future__ import annotations

from hybridflow.mapping.plan import Alternative, Mapping, ModelPlan, SetPlan
from hybridflow.mapping.workload import STAGES
from shared.units import format_bytes, format_s

__all__ = ["explain"]


def explain(mapping: Mapping) -> str:
    """Describe a mapping in some lines; all times are simulated.

    Returns:
        Per set its GPUs, models, layouts, memory and seconds; the stages with the set that bounds
        each; the best of the other kinds; and how many placements there were.
    """
    lines = [f"Simulated step: {format_s(mapping.step_s)} on {mapping.num_gpus} GPUs."]
    for found in mapping.sets:
        lines += _set(found, mapping)
    used = sum(found.num_gpus for found in mapping.sets)
    if used < mapping.num_gpus:
        lines.append(f"Idle: {mapping.num_gpus - used} GPUs, which would make no step faster.")
    lines += _stages(mapping)
    lines += [_alternative(other, mapping.step_s) for other in mapping.alternatives]
    lines.append(
        f"Placements: {mapping.num_placements:,}, of which bounds and memory ruled out "
        f"{mapping.num_ruled_out:,} before any GPUs were divided."
    )
    return "\n".join(lines)


def _set(found: SetPlan, mapping: Mapping) -> list[str]:
    peak, usable = format_bytes(found.peak_bytes), format_bytes(mapping.usable_bytes)
    ranks = f"GPUs {found.first_rank}-{found.ranks[-1]}"
    lines = [f"{ranks} ({found.num_gpus}): {peak} of {usable} a GPU at most."]
    return lines + [f"  {_model(model)}" for model in found.models]


def _model(model: ModelPlan) -> str:
    text = f"{model.name}: p-t-d {model.pp}-{model.tp}-{model.dp}"
    if model.generation_tp is not None:
        waves = "1 wave" if model.num_waves == 1 else f"{model.num_waves} waves"
        text += f", generation p-t {model.generation_pp}-{model.generation_tp} in {waves}"
    text += f", {format_bytes(model.resident_bytes)} stay"
    work = max(model.working_bytes, model.generation_bytes)
    text += f" and {format_bytes(work)} for its work"
    times = [
        f"{stage} {format_s(seconds)}"
        for stage, seconds in zip(STAGES, model.stage_s, strict=True)
        if seconds
    ]
    return f"{text}; {', '.join(times)}"


def _stages(mapping: Mapping) -> list[str]:
    lines = []
    for index, (stage, seconds) in enumerate(zip(STAGES, mapping.stage_s, strict=True)):
        slowest = max(mapping.sets, key=lambda found: found.stage_s[index])
        names = " + ".join(model.name for model in slowest.models if model.stage_s[index])
        lines.append(f"{stage}: {format_s(seconds)}, bound by {names or 'nothing'}.")
    return lines


def _alternative(other: Alternative, step_s: float) -> str:
    if other.stage_s is None:
        return f"Best {other.kind}: does not fit into memory."
    sets = " | ".join(f"{' + '.join(names)} on {num_gpus}" for names, num_gpus in other.sets)
    total_s = sum(other.stage_s)
    return f"Best {other.kind}: {format_s(total_s)}, {total_s / step_s:.2f}x ({sets})."
