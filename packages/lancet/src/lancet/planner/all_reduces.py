"""Where sums of gradients stand on the communication queue.

Nothing waits for the sum of a dense gradient but its division, so its turn is free. At its captured
turn it pins the weight gradient that it adds up: all-to-alls listed after it cannot start before. As
in Lancet's published simulator (arXiv 2404.19429), all-reduces are therefore left out first, and then
put into the gaps between all-to-alls. Here all-reduces keep their order among one another, and so do
all-to-alls.
"""

from __future__ import annotations

from collections.abc import Sequence

from lancet.graph.operations import Op, OpGraph
from lancet.graph.reachability import find_descendants, to_bits
from lancet.simulator import compute_ends

__all__ = ["fit_all_reduces", "list_all_reduces_last", "list_averages_last"]


def list_all_reduces_last(ops: Sequence[Op]) -> list[Op]:
    """Lists the all-reduces that no all-to-all waits for, and what follows them, after all others."""
    graph = OpGraph(ops)
    late = _find_free(graph)
    return sorted(ops, key=lambda op: late >> graph.index[op.name] & 1)


def list_averages_last(ops: Sequence[Op]) -> list[Op]:
    """Lists what follows all-reduces that no all-to-all waits for after all others.

    At its captured turn, the average of a gradient would be waited for before the next gradient is
    computed, and their all-reduces could not be one.
    """
    graph = OpGraph(ops)
    descendants = find_descendants(graph.needs)
    late = _find_free(graph)
    after = 0
    for i in graph.communications:
        if late >> i & 1:
            after |= descendants[i]
    return sorted(ops, key=lambda op: after >> graph.index[op.name] & 1)


def fit_all_reduces(ops: Sequence[Op]) -> list[Op]:
    """Launches all-reduces that no all-to-all waits for while the network is idle between all-to-alls.

    Each goes before the first communication that it does not delay in replay, not before those listed
    ahead of it; the rest come last, and so does what follows an all-reduce. Computing keeps its order.

    Args:
        ops: in launch order.
    """
    graph = OpGraph(ops)
    late = _find_free(graph)
    order = [i for i in range(len(graph.ops)) if not late >> i & 1]
    ends = compute_ends(graph, order)
    others = [i for i in order if graph.ops[i].kind != "compute"]
    waiting = [i for i in graph.communications if late >> i & 1]
    turns: list[int] = []
    free_s = 0.0
    for other in others:
        start_s = ends[other] - graph.time_s[other]
        while waiting:
            ready_s = max((ends[need] for need in graph.needs[waiting[0]]), default=0.0)
            end_s = max(ready_s, free_s) + graph.time_s[waiting[0]]
            # What follows another all-reduce has no end yet. Equal times say nothing of the order.
            needs_late = any(late >> need & 1 for need in graph.needs[waiting[0]])
            if needs_late or ready_s >= start_s or end_s > start_s:
                break
            turns.append(waiting.pop(0))
            free_s = end_s
        turns.append(other)
        free_s = ends[other]
    rank = {i: number for number, i in enumerate(order)}
    previous = -1
    for i in turns:
        # As soon as what it follows is launched.
        previous = rank[i] = max([previous, *(rank[need] for need in graph.needs[i])])
    number = {i: turn for turn, i in enumerate(turns)}
    order = sorted(rank, key=lambda i: (rank[i], i in number, number.get(i, 0)))
    return [graph.ops[i] for i in (*order, *(i for i in range(len(graph.ops)) if i not in rank))]


def _find_free(graph: OpGraph) -> int:
    """The all-reduces whose turn is free, and all that follows them, as a bitset."""
    descendants = find_descendants(graph.needs)
    all_to_alls = to_bits(i for i in graph.communications if graph.ops[i].kind == "all_to_all")
    free = 0
    for i in reversed(graph.communications):
        if graph.ops[i].kind == "all_reduce":
            if descendants[i] & all_to_alls:
                break  # those listed before it keep their turns too, and so their order
            free |= descendants[i] | 1 << i
    return free
