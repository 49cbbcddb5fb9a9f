"""Checks a plan's orders against a job: everything is done once, and not too early."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence

from diffusionpipe.planner.plan import Action, Plan
from diffusionpipe.runtime.instructions.dataflow import Dataflow
from diffusionpipe.runtime.instructions.messages import ValueMessage, describe_action
from diffusionpipe.runtime.shapes import Shapes
from shared.errors import ConfigError

__all__ = ["check_orders", "check_splits"]


def check_orders(plan: Plan, flow: Dataflow) -> None:
    """Checks that a plan's ranks together do everything once.

    Raises:
        ConfigError: a pass is left out, done twice, too early or by a rank without the stage; a sum
            is missing or too early; frozen components are unlike the job's, or a sample is encoded
            never or twice. Names the rank or component.
    """
    for rank, order in enumerate(plan.order):
        _check_order(plan, rank, order)
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


def _check_order(plan: Plan, rank: int, order: Sequence[Action]) -> None:
    ended: set[tuple[int, int]] = set()
    num_backwards = Counter(action.stage for action in order if action.kind == "backward")
    summed: set[int] = set()
    for index, action in enumerate(order):
        pass_ = (action.stage, action.micro_batch)
        if action.kind == "forward":
            ended.add(pass_)
        elif action.kind == "backward":
            num_backwards[action.stage] -= 1
        elif action.kind == "sum":
            summed.add(action.stage)
        is_early = (action.kind == "backward" and pass_ not in ended) or (
            action.kind == "sum" and num_backwards[action.stage] > 0
        )
        if is_early or (action.kind == "step") != (index == len(order) - 1):
            raise ConfigError(
                f"plan.order[{rank}]: expected a forward before its backward, all backwards of a "
                f"stage before its sum, and one step at the end, got {describe_action(action)} as "
                f"action {index} of {len(order)}; plan anew"
            )
    replicated = {stage for stage in plan.stages_of(rank) if len(plan.devices[stage]) > 1}
    if summed != replicated or not order:
        raise ConfigError(
            f"plan.order[{rank}]: expected a sum for the replicated stages {sorted(replicated)} and a "
            f"step, got sums for {sorted(summed)} in {len(order)} actions; plan anew"
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
