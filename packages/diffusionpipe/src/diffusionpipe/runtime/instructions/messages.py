"""The messages of a step, which follow from names of values and ranges of samples.

A value goes from the stage that writes it to each device that reads it, once; its gradient comes
back once, added up over the device's stages; a frozen output goes from the rank that owns the sample
to each rank whose inputs depend on it.
"""

from __future__ import annotations

from collections import defaultdict, deque
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Literal

from diffusionpipe.job.layers import ESTIMATE, OUTPUT
from diffusionpipe.planner.plan import Action, Plan
from diffusionpipe.planner.traffic import find_routes, match_rows
from diffusionpipe.runtime.instructions.dataflow import Dataflow, StageFlow
from shared.errors import ConfigError

__all__ = [
    "ValueMessage",
    "describe_action",
    "find_samples",
    "join_ranges",
    "list_estimates",
    "list_frozen",
    "list_values",
    "name_lane",
    "order_messages",
    "scale_rows",
]

Rows = tuple[int, int]


@dataclass(frozen=True, kw_only=True, slots=True)
class ValueMessage:
    """Values that one rank sends to another, once a step.

    Attributes:
        kind: "values" go to later stages, "gradients" back, "frozen" to the next step's readers.
        sender, receiver: ranks.
        keys: names of the values.
        ranges: rows of the plan's whole batch.
        sent_by: index in the sender's order of the action that completes it.
        used_by: index in the receiver's order of the action that needs it; -1 for frozen outputs.
        micro_batch: whose values these are; -1 for frozen outputs.
        backbone: whose values these are; -1 for frozen outputs.
        stages: source and target, in the direction of the message; (-1, -1) for frozen outputs.
        is_estimate: values of the pass that predicts without gradient first (self-conditioning).
        number: place in the global order.
    """

    kind: Literal["values", "gradients", "frozen"]
    sender: int
    receiver: int
    keys: tuple[str, ...]
    ranges: tuple[Rows, ...]
    sent_by: int
    used_by: int = -1
    micro_batch: int = -1
    backbone: int = -1
    stages: tuple[int, int] = (-1, -1)
    is_estimate: bool = False
    number: int = -1

    @property
    def label(self) -> str:
        """What errors and traces call it."""
        edge = f"rank {self.sender} to {self.receiver}"
        if self.kind == "frozen":
            first, stop = self.ranges[0][0], self.ranges[-1][1]
            names = ", ".join(self.keys)
            return f"{names} of samples {first} to {stop - 1} of the next batch, {edge}"
        source, target = self.stages
        what = "estimates" if self.is_estimate else self.kind
        return f"{what} of micro-batch {self.micro_batch}, stage {source} to {target}, {edge}"


def scale_rows(rows: Rows, batch_size: int, num_rows: int) -> Rows:
    """Maps rows of the plan's batch to those of a shorter one; neighbours stay neighbours."""
    return rows[0] * num_rows // batch_size, rows[1] * num_rows // batch_size


def name_lane(message: ValueMessage) -> str:
    """Names the connection that a message travels on: one for each kind and direction."""
    return f"{message.kind} {'up' if message.sender > message.receiver else 'down'}"


def describe_action(action: Action) -> str:
    """Describes an action in words."""
    if action.kind == "encode":
        first, stop = action.samples
        return f"encode {action.name} of samples {first} to {stop - 1} of the next batch"
    if action.kind == "step":
        return "step"
    what = f"{action.kind} of stage {action.stage}"
    return what if action.kind == "sum" else f"{what}, micro-batch {action.micro_batch}"


def find_samples(plan: Plan, rank: int, action: Action) -> Rows:
    """Returns the rows of the plan's batch that an action computes; (0, 0) for a sum or step."""
    if action.kind in ("sum", "step"):
        return 0, 0
    if action.kind == "encode":
        return action.samples
    rows = plan.samples(action.stage, action.micro_batch, rank)
    return rows.start, rows.stop


def join_ranges(ranges: Iterable[Rows]) -> list[Rows]:
    """Returns the same rows in as few ranges as possible, in order."""
    joined: list[Rows] = []
    for first, stop in sorted(set(ranges)):
        if joined and first <= joined[-1][1]:
            joined[-1] = joined[-1][0], max(stop, joined[-1][1])
        else:
            joined.append((first, stop))
    return joined


def list_values(
    plan: Plan, flow: Dataflow, place: Mapping[tuple[int, str, int, int], int]
) -> Iterator[ValueMessage]:
    """Lists messages between stages: values forward and their gradients backward.

    Args:
        plan: plan.
        flow: names of values.
        place: index of each pass by (rank, kind, stage, micro-batch).
    """
    for backbone, names in enumerate(flow.backbones):
        own = [stage for stage, of in enumerate(plan.backbones) if of == backbone]
        routes = find_routes(
            names.reads,
            names.writes,
            [plan.spans[stage] for stage in own],
            [plan.devices[stage] for stage in own],
            first_stage=own[0],
        )
        for source, target, keys in routes:
            with_gradient = tuple(key for key in keys if key in names.differentiable)
            for micro_batch in range(plan.num_micro_batches):
                for writer, reader, rows in match_rows(plan, source, target, micro_batch):
                    values = ValueMessage(
                        kind="values",
                        sender=writer,
                        receiver=reader,
                        keys=keys,
                        ranges=((rows.start, rows.stop),),
                        sent_by=place[writer, "forward", source, micro_batch],
                        used_by=place[reader, "forward", target, micro_batch],
                        micro_batch=micro_batch,
                        backbone=backbone,
                        stages=(source, target),
                    )
                    yield values
                    if with_gradient:
                        yield replace(
                            values,
                            kind="gradients",
                            sender=reader,
                            receiver=writer,
                            keys=with_gradient,
                            sent_by=place[reader, "backward", target, micro_batch],
                            used_by=place[writer, "backward", source, micro_batch],
                            stages=(target, source),
                        )
                    if (writer, "estimate", source, micro_batch) in place:
                        yield replace(
                            values,
                            sent_by=place[writer, "estimate", source, micro_batch],
                            used_by=place[reader, "estimate", target, micro_batch],
                            is_estimate=True,
                        )


def list_estimates(
    plan: Plan, stages: Sequence[StageFlow], place: Mapping[tuple[int, str, int, int], int]
) -> Iterator[ValueMessage]:
    """Lists messages of estimates, from the last stage to ranks whose inputs depend on them.

    Args:
        plan: plan, with passes that estimate.
        stages: its virtual stages.
        place: index of each pass by (rank, kind, stage, micro-batch).
    """
    (source,) = (stage for stage, flow in enumerate(stages) if flow.is_last)
    first = {}
    for target, flow in enumerate(stages):
        if ESTIMATE in flow.frozen:
            first.setdefault(plan.devices[target], target)
    for target in first.values():
        for micro_batch in range(plan.num_micro_batches):
            for writer, reader, rows in match_rows(plan, source, target, micro_batch):
                if writer != reader:
                    yield ValueMessage(
                        kind="values",
                        sender=writer,
                        receiver=reader,
                        keys=(OUTPUT,),
                        ranges=((rows.start, rows.stop),),
                        sent_by=place[writer, "estimate", source, micro_batch],
                        used_by=place[reader, "forward", target, micro_batch],
                        micro_batch=micro_batch,
                        backbone=0,
                        stages=(source, target),
                        is_estimate=True,
                    )


def list_frozen(plan: Plan, flow: Dataflow, stages: Sequence[StageFlow]) -> Iterator[ValueMessage]:
    """Lists messages of frozen outputs, from who encodes a sample to those that need it."""
    names = [
        {name for stage in plan.stages_of(rank) for name in stages[stage].frozen}
        for rank in range(plan.num_ranks)
    ]
    needed = [
        join_ranges(
            find_samples(plan, rank, action)
            for action in order
            if action.kind == "forward" and stages[action.stage].frozen
        )
        for rank, order in enumerate(plan.order)
    ]
    for owner, order in enumerate(plan.order):
        for index, action in enumerate(order):
            if action.kind != "encode":
                continue
            first, stop = action.samples
            for reader, ranges in enumerate(needed):
                keys = tuple(key for key in flow.components[action.name] if key in names[reader])
                cut = [(max(start, first), min(end, stop)) for start, end in ranges]
                common = tuple(rows for rows in cut if rows[0] < rows[1])
                if reader != owner and keys and common:
                    yield ValueMessage(
                        kind="frozen",
                        sender=owner,
                        receiver=reader,
                        keys=keys,
                        ranges=common,
                        sent_by=index,
                    )


def order_messages(plan: Plan, messages: Sequence[ValueMessage]) -> list[ValueMessage]:
    """Numbers messages in an order in which the ranks' actions can complete them.

    Within a lane this is the sender's program order. Where one connection carries both directions,
    as over NCCL, both ends can follow it without waiting for each other.

    Raises:
        ConfigError: ranks would wait for each other; names the actions.
    """
    num_missing: dict[Rows, int] = defaultdict(int)
    sent_by: dict[Rows, list[ValueMessage]] = defaultdict(list)
    for message in messages:
        num_missing[message.receiver, message.used_by] += 1
        sent_by[message.sender, message.sent_by].append(message)
    ordered: list[ValueMessage] = []
    position = [0] * plan.num_ranks
    runnable = deque(range(plan.num_ranks))
    while runnable:
        rank = runnable.popleft()
        while position[rank] < len(plan.order[rank]) and not num_missing[rank, position[rank]]:
            for message in sent_by[rank, position[rank]]:
                ordered.append(replace(message, number=len(ordered)))
                num_missing[message.receiver, message.used_by] -= 1
                runnable.append(message.receiver)
            position[rank] += 1
    stuck = [
        f"rank {rank} at {describe_action(plan.order[rank][index])}"
        for rank, index in enumerate(position)
        if index < len(plan.order[rank])
    ]
    if stuck:
        raise ConfigError(
            "plan.order: expected orders in which no ranks wait for each other, got "
            f"{', '.join(stuck)}; plan anew"
        )
    return ordered
