"""Who writes and who reads which value: what passes the borders of a plan's stages.

Layers name the values that they read and write, so all traffic follows from names: a stage imports
what it reads and another stage wrote, exports what another stage reads, and is fed by frozen outputs
where it reads an input of the backbone, a key that no layer writes.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass

from diffusionpipe.job.layers import OUTPUT
from diffusionpipe.planner.plan import Plan
from diffusionpipe.planner.traffic import find_stage_feeds
from shared.errors import ConfigError

__all__ = ["BackboneFlow", "Dataflow", "StageFlow"]


@dataclass(frozen=True, kw_only=True, slots=True)
class StageFlow:
    """What passes the borders of one virtual stage.

    Attributes:
        backbone: index of its backbone.
        first, stop: its layers.
        inputs: keywords of the backbone that its layers read.
        imports: values of other stages that its layers read.
        exports: values of its layers that other stages read.
        frozen: frozen outputs on which its inputs, and on the last stage the target, depend.
        is_last: its layers write the backbone's output, from which the loss is computed.
    """

    backbone: int
    first: int
    stop: int
    inputs: tuple[str, ...]
    imports: tuple[str, ...]
    exports: tuple[str, ...]
    frozen: tuple[str, ...]
    is_last: bool

    @property
    def is_prepared(self) -> bool:
        """Whether its ranks need a micro-batch's inputs or target."""
        return bool(self.inputs) or self.is_last


@dataclass(frozen=True, kw_only=True, slots=True)
class BackboneFlow:
    """Names of one backbone's values.

    Attributes:
        reads, writes: of each layer, in order.
        feeds: frozen outputs on which an input, or "target", depends.
        differentiable: values whose gradients are needed.
    """

    reads: Sequence[tuple[str, ...]]
    writes: Sequence[tuple[str, ...]]
    feeds: Mapping[str, tuple[str, ...]]
    differentiable: Collection[str]

    def cut(self, backbone: int, span: tuple[int, int], frozen: tuple[str, ...]) -> StageFlow:
        """What passes the borders of a span of layers."""
        first, stop = span
        written = [key for keys in self.writes[first:stop] for key in keys]
        read = dict.fromkeys(key for keys in self.reads[first:stop] for key in keys)
        earlier = {key for keys in self.writes[:first] for key in keys}
        later = {key for keys in self.reads[stop:] for key in keys}
        return StageFlow(
            backbone=backbone,
            first=first,
            stop=stop,
            inputs=tuple(key for key in read if key not in written and key not in earlier),
            imports=tuple(key for key in read if key in earlier),
            exports=tuple(key for key in written if key in later),
            frozen=frozen,
            is_last=OUTPUT in written,
        )


@dataclass(frozen=True, kw_only=True, slots=True)
class Dataflow:
    """Names of a job's values.

    Attributes:
        backbones: names of each backbone's.
        components: by frozen component, the names of its outputs.
    """

    backbones: tuple[BackboneFlow, ...]
    components: Mapping[str, tuple[str, ...]]

    def cut_stages(self, plan: Plan) -> tuple[StageFlow, ...]:
        """What passes the borders of each of a plan's virtual stages.

        Raises:
            ConfigError: the spans of a backbone do not hold each of its layers once, in order.
        """
        for backbone, flow in enumerate(self.backbones):
            spans = [plan.spans[stage] for stage in plan.list_backbone(backbone)]
            ends = [0, *(stop for _, stop in spans)]
            if [first for first, _ in spans] != ends[:-1] or ends[-1] != len(flow.reads):
                raise ConfigError(
                    f"plan.spans: expected the {len(flow.reads)} layers of backbone {backbone} once "
                    f"and in order, got {spans}; make the plan from a profile of this job"
                )
        stages = zip(
            plan.backbones, plan.spans, find_stage_feeds(plan, self.backbones), strict=True
        )
        return tuple(self.backbones[of].cut(of, span, frozen) for of, span, frozen in stages)
