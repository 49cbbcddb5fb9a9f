"""The messages of a step, as the planner lists them, in an order in which ranks can complete them."""

from __future__ import annotations

from collections import defaultdict, deque
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Literal

from diffusionpipe.planner.plan import Action, Plan
from diffusionpipe.planner.traffic import list_messages
from diffusionpipe.runtime.instructions.dataflow import Dataflow
from shared.errors import ConfigError

__all__ = [
    "Rows",
    "ValueMessage",
    "describe_action",
    "find_samples",
    "name_lane",
    "order_messages",
    "place_messages",
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
    used_by: int
    micro_batch: int
    backbone: int
    stages: tuple[int, int]
    is_estimate: bool
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


def place_messages(plan: Plan, flow: Dataflow) -> Iterator[ValueMessage]:
    """Places the planner's messages in the plan's order, which is that of one kind of step."""
    place = {
        (rank, action): index
        for rank, order in enumerate(plan.order)
        for index, action in enumerate(order)
    }
    for one in list_messages(plan, flow.backbones, flow.components, plan.order):
        source, target = one.sent_by, one.used_by
        yield ValueMessage(
            kind="frozen"
            if target is None
            else "gradients"
            if source.kind == "backward"
            else "values",
            sender=one.sender,
            receiver=one.receiver,
            keys=one.keys,
            ranges=one.ranges,
            sent_by=place[one.sender, source],
            used_by=-1 if target is None else place[one.receiver, target],
            micro_batch=source.micro_batch,
            backbone=one.backbone,
            stages=(source.stage, -1 if target is None else target.stage),
            is_estimate=source.kind == "estimate",
        )


def order_messages(
    order: Sequence[Sequence[Action]], messages: Sequence[ValueMessage]
) -> list[ValueMessage]:
    """Numbers messages in an order in which the ranks' actions can complete them.

    Within a lane this is the sender's program order. Where one connection carries both directions,
    as over NCCL, both ends can follow it without waiting for each other.

    Raises:
        ConfigError: ranks would wait for each other; names the actions.
    """
    num_missing: dict[Rows, int] = defaultdict(int)
    sent_by: Mapping[Rows, list[ValueMessage]] = defaultdict(list)
    for message in messages:
        num_missing[message.receiver, message.used_by] += 1
        sent_by[message.sender, message.sent_by].append(message)
    ordered: list[ValueMessage] = []
    position = [0] * len(order)
    runnable = deque(range(len(order)))
    while runnable:
        rank = runnable.popleft()
        while position[rank] < len(order[rank]) and not num_missing[rank, position[rank]]:
            for message in sent_by[rank, position[rank]]:
                ordered.append(replace(message, number=len(ordered)))
                num_missing[message.receiver, message.used_by] -= 1
                runnable.append(message.receiver)
            position[rank] += 1
    stuck = [
        f"rank {rank} at {describe_action(order[rank][index])}"
        for rank, index in enumerate(position)
        if index < len(order[rank])
    ]
    if stuck:
        raise ConfigError(
            "plan.order: expected orders in which no ranks wait for each other, got "
            f"{', '.join(stuck)}; plan anew"
        )
    return ordered
