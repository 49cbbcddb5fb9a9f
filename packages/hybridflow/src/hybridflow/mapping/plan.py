"""The plan that a search returns: each model's GPUs, layout, seconds and bytes.

A plan is plain data, written to and read from JSON with a format number; unknown keys and other
formats are refused.
"""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass, fields
from typing import Any

from hybridflow.mapping.workload import STAGES
from shared.errors import ConfigError
from shared.units import format_bytes, format_s

__all__ = ["Alternative", "Mapping", "ModelPlan", "SetPlan", "explain"]

_FORMAT = 1


@dataclass(frozen=True, kw_only=True, slots=True)
class ModelPlan:
    """One model in its set.

    Attributes:
        name: of the model.
        role: of the model.
        pp: pipeline stages.
        tp: tensor shards.
        dp: replicas.
        generation_pp: the actor's pipeline stages in generation; None for other models.
        generation_tp: the actor's tensor shards in generation; None for other models.
        num_waves: number of times the actor's replicas fill their cache; None for other models.
        resident_bytes: bytes that each GPU always holds.
        working_bytes: further bytes on each GPU in its training or forward passes.
        generation_bytes: further bytes on each GPU for gathered weights and a wave's cache.
        stage_s: simulated seconds of the stages.
    """

    name: str
    role: str
    pp: int
    tp: int
    dp: int
    generation_pp: int | None
    generation_tp: int | None
    num_waves: int | None
    resident_bytes: int
    working_bytes: int
    generation_bytes: int
    stage_s: tuple[float, float, float]


@dataclass(frozen=True, kw_only=True, slots=True)
class SetPlan:
    """Models that share GPUs and take turns on them.

    Attributes:
        first_rank: the first of the set's GPUs.
        num_gpus: their number; their ranks are contiguous.
        models: the models, each on all of these GPUs.
        stage_s: simulated seconds of the stages: the sum of the models', and of the transfers
            between them and the actor if it is in another set.
    """

    first_rank: int
    num_gpus: int
    models: tuple[ModelPlan, ...]
    stage_s: tuple[float, float, float]

    @property
    def ranks(self) -> range:
        """The set's GPUs."""
        return range(self.first_rank, self.first_rank + self.num_gpus)

    @property
    def peak_bytes(self) -> int:
        """Peak bytes of each GPU: resident bytes of all models, working bytes of the largest."""
        work = max(max(model.working_bytes, model.generation_bytes) for model in self.models)
        return sum(model.resident_bytes for model in self.models) + work


@dataclass(frozen=True, kw_only=True, slots=True)
class Alternative:
    """The best mapping of a kind that a plan is compared with.

    Attributes:
        kind: "colocated" (one set), "split" (two sets) or "standalone" (a set for each model).
        sets: names and number of GPUs of each set.
        stage_s: simulated seconds of the stages; None if none of the kind fits into memory.
    """

    kind: str
    sets: tuple[tuple[tuple[str, ...], int], ...]
    stage_s: tuple[float, float, float] | None


@dataclass(frozen=True, kw_only=True, slots=True)
class Mapping:
    """The GPUs and layout of each model.

    Attributes:
        num_gpus: GPUs of the cluster; sets may leave some idle.
        usable_bytes: bytes of each GPU that models may fill.
        sets: by descending number of GPUs.
        stage_s: simulated seconds of the stages, each of its slowest set.
        alternatives: the best of each kind, by number of sets.
        num_placements: number of ways to divide models into sets, and GPUs among the sets.
        num_ruled_out: how many of those a lower bound or memory excluded before GPUs were divided.
    """

    num_gpus: int
    usable_bytes: int
    sets: tuple[SetPlan, ...]
    stage_s: tuple[float, float, float]
    alternatives: tuple[Alternative, ...]
    num_placements: int
    num_ruled_out: int

    @property
    def step_s(self) -> float:
        """Simulated seconds of a step."""
        return sum(self.stage_s)

    def explain(self) -> str:
        """Describes the plan and its reasons in a few lines; all its times are simulated."""
        return explain(self)

    def __str__(self) -> str:
        return self.explain()

    def to_json(self) -> str:
        """The plan as JSON text with a format number."""
        return json.dumps({"format": _FORMAT, **asdict(self)}, indent=2)

    @classmethod
    def from_json(cls, text: str) -> Mapping:
        """Read what `to_json` wrote.

        Raises:
            ConfigError: the text is not JSON, has another format, or keys are missing or unknown.
        """
        try:
            tree = json.loads(text)
        except json.JSONDecodeError as error:
            raise ConfigError(f"mapping: expected JSON as to_json writes it: {error}") from error
        if not isinstance(tree, dict) or tree.pop("format", None) != _FORMAT:
            raise ConfigError(
                f"mapping: expected a mapping of format {_FORMAT}; read it with the release that "
                "wrote it"
            )
        values = _checked(cls, tree, "mapping")
        values["sets"] = tuple(
            _read_set(entry, f"mapping.sets[{index}]") for index, entry in enumerate(tree["sets"])
        )
        values["alternatives"] = tuple(
            _read_alternative(entry, f"mapping.alternatives[{index}]")
            for index, entry in enumerate(tree["alternatives"])
        )
        return cls(**values)


def explain(mapping: Mapping) -> str:
    """Describe a mapping in some lines; all times are simulated.

    Returns:
        GPUs, models, layouts, memory and seconds of each set; the stages, each with its slowest
        set; the best mappings of other kinds; and the number of placements.
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


def _read_set(tree: Any, path: str) -> SetPlan:
    values = _checked(SetPlan, tree, path)
    values["models"] = tuple(
        ModelPlan(**_checked(ModelPlan, entry, f"{path}.models[{index}]"))
        for index, entry in enumerate(tree["models"])
    )
    return SetPlan(**values)


def _read_alternative(tree: Any, path: str) -> Alternative:
    values = _checked(Alternative, tree, path)
    values["sets"] = tuple((tuple(names), num_gpus) for names, num_gpus in tree["sets"])
    return Alternative(**values)


def _checked(record: type, tree: Any, path: str) -> dict[str, Any]:
    expected = {item.name for item in fields(record)}
    if not isinstance(tree, dict) or set(tree) != expected:
        came = sorted(tree) if isinstance(tree, dict) else tree
        raise ConfigError(f"{path}: expected the keys {sorted(expected)}, got {came}")
    values = dict(tree)
    if values["stage_s"] is not None:
        values["stage_s"] = tuple(values["stage_s"])
    return values
