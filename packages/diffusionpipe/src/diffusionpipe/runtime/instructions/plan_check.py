"""Checks a plan's orders against a job: everything is done once."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterable

from diffusionpipe.planner.plan import Plan
from diffusionpipe.planner.traffic import PlannedMessage, Rows
from diffusionpipe.runtime.instructions.dataflow import Dataflow
from diffusionpipe.runtime.shapes import Shapes
from shared.errors import ConfigError

__all__ = ["check_orders", "check_splits"]


def check_orders(plan: Plan, flow: Dataflow) -> None:
    """Checks that a plan's ranks together do everything once.

    Raises:
        ConfigError: a pass is left out, done twice or by a rank without the stage; frozen components
            are unlike the job's, or a sample is encoded never or twice. Names the rank or component.
    """
    passes = Counter(
        (rank, action.kind, action.stage, action.micro_batch)
        for rank, order in enumerate(plan.order)
        for action in order
        if action.kind in ("forward", "estimate", "backward")
    )
    expected = Counter(
        (rank, kind, stage, micro_batch)
        for kind in dict.fromkeys(("forward", "backward", *(kind for _, kind, *_ in passes)))
        for stage, ranks in enumerate(plan.devices)
        for rank in ranks
        for micro_batch in range(plan.num_micro_batches)
    )
    for key in (expected - passes) + (passes - expected):
        rank, kind, stage, micro_batch = key
        raise ConfigError(
            f"plan.order[{rank}]: expected each pass of the stages {plan.stages_of(rank)} once, got "
            f"{passes[key]} x {kind} of stage {stage}, micro-batch {micro_batch}; plan anew"
        )
    encoded: dict[str, list[Rows]] = defaultdict(list)
    for action in (action for order in plan.order for action in order if action.kind == "encode"):
        encoded[action.name].append(action.samples)
    if set(encoded) != set(flow.components):
        raise ConfigError(
            f"plan.order: expected the job's frozen components {sorted(flow.components)}, got "
            f"{sorted(encoded)}; make the plan from a profile of this job"
        )
    for name, ranges in encoded.items():
        ends = [0, *(stop for _, stop in sorted(ranges))]
        if [*(first for first, _ in sorted(ranges)), plan.batch_size] != ends:
            raise ConfigError(
                f"plan.order: expected each of {plan.batch_size} samples encoded once by {name}, got "
                f"{sorted(ranges)}; plan anew"
            )


def check_splits(plan: Plan, messages: Iterable[PlannedMessage], shapes: Shapes) -> None:
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
        rows = [plan.samples(stage, message.sent_by.micro_batch, rank) for stage, rank in ends]
        for key in message.keys if rows[0] != rows[1] else ():
            if not shapes.values[message.backbone][key].has_rows:
                source, target = message.stages
                raise ConfigError(
                    f"plan.devices: expected as many replicas of the stages {source} and {target}, as "
                    f"{key!r} has not one row a sample and cannot be cut, got "
                    f"{len(plan.devices[source])} and {len(plan.devices[target])}; plan for stages "
                    "of equal numbers of ranks"
                )
