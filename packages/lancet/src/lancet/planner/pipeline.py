"""Orders the parts of a chain that is cut along the batch, on the two queues.

After the pipelining of ranges in Lancet (arXiv 2404.19429): maximal runs of one queue's operations in a
part form a group, and of the groups that are ready a queue runs the shortest first, the last one of a
part only if there is no other, and of equal ones that of the first part. Here an order in which the
first group goes first is replayed as well, which is faster for some chains. Both never leave a queue
idle while a group is ready, which in some cases would be better.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from itertools import groupby

from lancet.graph.operations import COMMUNICATION, COMPUTE, Kind, Op
from shared.errors import ConfigError
from shared.topology import Operation, Replay

__all__ = ["PartOrder", "order_parts", "pipelined_s"]


@dataclass(frozen=True, slots=True, kw_only=True)
class PartOrder:
    """In which order parts of a chain run.

    Attributes:
        makespan_s: seconds until the last part ends.
        launches: operation's position in the chain and part, in launch order.
    """

    makespan_s: float
    launches: tuple[tuple[int, int], ...]


def pipelined_s(chain: Iterable[tuple[Kind, float]], parts: int) -> float:
    """Seconds of a chain of operations that is cut into equal parts.

    Args:
        chain: kind and seconds of each operation as a whole; each follows the one before it.
        parts: number of parts, each of which takes `1 / parts` of every operation's seconds.

    Raises:
        ConfigError: there is no part.
        DataError: a kind is unknown, or a time is negative or not finite.
    """
    return order_parts(chain, parts).makespan_s


def order_parts(chain: Iterable[tuple[Kind, float]], parts: int) -> PartOrder:
    """Orders the parts of a chain; arguments and errors as `pipelined_s`.

    Returns:
        The fastest of the orders that the rules give, the first rule's of equals.

    Raises:
        ConfigError: there is no part.
        DataError: a kind is unknown, or a time is negative or not finite.
    """
    if parts < 1:
        raise ConfigError(f"parts: expected 1 or more, got {parts}")
    ops = [Op(str(i), kind, time_s) for i, (kind, time_s) in enumerate(chain)]
    op_queues = _list_queues(ops)
    groups = [list(run) for _, run in groupby(range(len(ops)), key=lambda i: op_queues[i])]
    group_s = [sum(ops[i].time_s for i in group) / parts for group in groups]
    queues = [op_queues[group[0]] for group in groups]
    last = len(groups) - 1
    rules: list[Callable[[int, int], tuple[float, ...]]] = [
        lambda group, part: (group == last, group_s[group], group, part),
        lambda group, part: (group, part),
    ]
    orders = [_replay(group_s, queues, parts, rule) for rule in rules]
    makespan_s, tasks = min(orders, key=lambda order: order[0])
    return PartOrder(
        makespan_s=makespan_s,
        launches=tuple((i, part) for group, part in tasks for i in groups[group]),
    )


def _list_queues(ops: Sequence[Op]) -> list[str]:
    """By operation, its queue; one of no time waits for none and takes that of the one before it."""
    queue = next((op.queue for op in ops if op.time_s), COMPUTE)
    queues = []
    for op in ops:
        queue = op.queue if op.time_s else queue
        queues.append(queue)
    return queues


def _replay(
    group_s: Sequence[float],
    queues: Sequence[str],
    parts: int,
    rule: Callable[[int, int], tuple[float, ...]],
) -> tuple[float, list[tuple[int, int]]]:
    """Makespan, and (group, part) by start, if queues run what is ready by a rule."""
    tasks = [(group, part) for group in range(len(group_s)) for part in range(parts)]
    priority = {task: rank for rank, task in enumerate(sorted(tasks, key=lambda t: rule(*t)))}
    timeline = Replay(
        [
            Operation(
                (group, part),
                queues[group],
                group_s[group],
                ((group - 1, part),) if group else (),
                priority=priority[group, part],
            )
            for group, part in tasks
        ],
        {COMPUTE: "priority", COMMUNICATION: "priority"},
    ).run()
    # Of tasks that start together, one of no time may precede another part's; groups keep order.
    start_s = dict(zip(tasks, timeline.start_s.tolist(), strict=True))
    return timeline.makespan_s, sorted(tasks, key=lambda task: (start_s[task], *task))
