"""The messages of a step in an order in which ranks can complete them, and rows of shorter batches."""

from __future__ import annotations

from collections import defaultdict, deque
from collections.abc import Iterable, Sequence

from diffusionpipe.planner.plan import Action, Plan
from diffusionpipe.planner.traffic import PlannedMessage, Rows
from shared.errors import ConfigError

__all__ = ["describe_action", "find_samples", "name_lane", "order_messages", "scale_rows"]


def scale_rows(rows: Rows, batch_size: int, num_rows: int) -> Rows:
    """Maps rows of the plan's batch to those of a shorter one; neighbours stay neighbours."""
    return rows[0] * num_rows // batch_size, rows[1] * num_rows // batch_size


def name_lane(message: PlannedMessage) -> str:
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


def order_messages(
    order: Sequence[Sequence[Action]], messages: Iterable[PlannedMessage]
) -> list[PlannedMessage]:
    """Numbers messages in an order in which the ranks' actions can complete them.

    Within a lane this is the sender's program order. Where one connection carries both directions,
    as over NCCL, both ends can follow it without waiting for each other.

    Raises:
        ConfigError: ranks would wait for each other; names the actions.
    """
    num_missing: dict[tuple[int, Action | None], int] = defaultdict(int)
    outgoing: dict[tuple[int, Action], list[PlannedMessage]] = defaultdict(list)
    for message in messages:
        num_missing[message.receiver, message.used_by] += 1
        outgoing[message.sender, message.sent_by].append(message)
    ordered: list[PlannedMessage] = []
    position = [0] * len(order)
    runnable = deque(range(len(order)))
    while runnable:
        rank = runnable.popleft()
        for action in order[rank][position[rank] :]:
            if num_missing[rank, action]:
                break
            for message in outgoing[rank, action]:
                ordered.append(message._replace(number=len(ordered)))
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
