"""Checks a plan's orders against a job: everything is done once."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable

from diffusionpipe.planner.plan import Plan
from diffusionpipe.runtime.instructions.dataflow import Dataflow
from diffusionpipe.runtime.instructions.messages import ValueMessage
from diffusionpipe.runtime.shapes import Shapes
from shared.errors import ConfigError

__all__ = ["check_orders", "check_splits"]


def check_orders(plan: Plan, flow: Dataflow) -> None:
    """Checks that a plan's ranks together do everything once.

    Raises:
        ConfigError: a pass is left out, done twice or by a rank without the stage; frozen components
            are unlike the job's, or a sample is encoded never or twice. Names the rank or component.
    """
    kinds = {action.kind for order in plan.order for action in order}
    for kind in ("forward", "backward", *({"estimate"} & kinds)):
        expected = Counter(
            (stage, micro_batch, rank)
            for stage, ranks in enumerate(plan.devices)
            for micro_batch in range(plan.num_micro_batches)
            for rank in ranks
        )
        got = Counter(
            (action.stage, action.micro_batch, rank)
            for rank, order in enumerate(plan.order)
            for action in order
            if action.kind == kind
        )
        for stage, micro_batch, rank in (expected - got) + (got - expected):
            count = got[stage, micro_batch, rank]
            raise ConfigError(
                f"plan.order[{rank}]: expected each pass of the stages {plan.stages_of(rank)} once, "
                f"got {count} x {kind} of stage {stage}, micro-batch {micro_batch}; plan anew"
            )
    names = {action.name for order in plan.order for action in order if action.kind == "encode"}
    if names != set(flow.components):
        raise ConfigError(
            f"plan.order: expected the job's frozen components {sorted(flow.components)}, got "
            f"{sorted(names)}; make the plan from a profile of this job"
        )
    for name in flow.components:
        ranges = [
            action.samples
            for order in plan.order
            for action in order
            if (action.kind, action.name) == ("encode", name)
        ]
        end = 0
        for first, stop in sorted(ranges):
            if first != end or stop <= first:
                break
            end = stop
        if end != plan.batch_size:
            raise ConfigError(
                f"plan.order: expected each of {plan.batch_size} samples encoded once by {name}, got "
                f"{sorted(ranges)}; plan anew"
            )


def check_splits(plan: Plan, messages: Iterable[ValueMessage], shapes: Shapes) -> None:
    """Checks that only values with a row a sample are cut, where neighbouring stages share rows unlike.

    Args:
        plan: plan.
        messages: between stages.
        shapes: of values.

    Raises:
        ConfigError: a value of another shape would be cut; names it.
    """
    for message in messages:
        if message.kind != "values":
            continue
        ends = zip(message.stages, (message.sender, message.receiver), strict=True)
        rows = [plan.samples(stage, message.micro_batch, rank) for stage, rank in ends]
        for key in message.keys if rows[0] != rows[1] else ():
            if not shapes.values[message.backbone][key].has_rows:
                source, target = message.stages
                raise ConfigError(
                    f"plan.devices: expected as many replicas of the stages {source} and {target}, as "
                    f"{key!r} has not one row a sample and cannot be cut, got "
                    f"{len(plan.devices[source])} and {len(plan.devices[target])}; plan for stages "
                    "of equal numbers of ranks"
                )
