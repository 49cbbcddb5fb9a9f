"""Programs of operations that planners' tests share."""

from itertools import permutations

from hypothesis import strategies as st

from lancet.graph.operations import Op

__all__ = ["backward", "list_orders", "programs", "replay_s"]

SECONDS = st.integers(0, 6).map(float)


@st.composite
def programs(draw, kinds=("compute", "compute", "all_to_all", "all_reduce"), max_ops=9):
    """Random operations, each after a random set of those before it."""
    ops = []
    for number in range(draw(st.integers(1, max_ops))):
        sources = st.lists(st.sampled_from([op.name for op in ops]), max_size=3) if ops else None
        after = tuple(draw(sources)) if sources is not None else ()
        ops.append(Op(f"op{number}", draw(st.sampled_from(kinds)), draw(SECONDS), after))
    return ops


def backward(num_layers, *, gradient_s=1.0, weight_s=1.0, exchange_s=1.0):
    """Backward pass of MoE layers as autograd traces it: each weight gradient, then what it delays."""
    ops = [Op("loss", "compute", 0.1)]
    previous = "loss"
    for layer in range(num_layers):
        for part in ("combine", "experts", "dispatch", "attention"):
            name = f"{part}{layer}"
            if part in ("combine", "dispatch"):
                ops.append(Op(name, "all_to_all", exchange_s, (previous,)))
            else:
                ops.append(Op(f"{name} weight", "compute", weight_s, (previous,)))
                ops.append(Op(name, "compute", gradient_s, (previous,)))
            previous = name
    return ops


def replay_s(ops):
    """Makespan in seconds, each start relaxed until nothing changes."""
    ends = {op.name: 0.0 for op in ops}
    while True:
        changed = False
        for number, op in enumerate(ops):
            is_compute = op.kind == "compute"
            ahead = [
                other.name for other in ops[:number] if (other.kind == "compute") == is_compute
            ]
            start = max([0.0, *(ends[name] for name in (*ahead[-1:], *op.after))])
            if ends[op.name] != start + op.time_s:
                ends[op.name], changed = start + op.time_s, True
        if not changed:
            return max(ends.values(), default=0.0)


def list_orders(ops):
    """All launch orders that keep the order of communications, as sequences of operations."""
    compute = [op for op in ops if op.kind == "compute"]
    communications = [op for op in ops if op.kind != "compute"]
    for permutation in permutations(compute):
        lanes, order, launched = [list(permutation), list(communications)], [], set()
        while any(lanes):
            heads = [lane for lane in lanes if lane and launched.issuperset(lane[0].after)]
            if not heads:
                break
            order.append(heads[0].pop(0))
            launched.add(order[-1].name)
        else:
            yield order
