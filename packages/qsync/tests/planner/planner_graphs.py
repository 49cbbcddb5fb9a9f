"""Random graphs and their costs, computed from the definition without anything incremental."""

from hypothesis import strategies as st

from qsync import Graph, Op

OUTPUT = {"fp32": "fp32", "bf16": "bf16", "fp16": "fp16", "int8": "fp32", "fp8": "bf16"}
BACKWARD = {"fp32": "fp32", "bf16": "bf16", "fp16": "fp16", "int8": "bf16", "fp8": "bf16"}
SHARE = {"fp32": 1.0, "bf16": 0.55, "fp16": 0.6, "int8": 0.3, "fp8": 0.25}


def kernel_s(op, precision):
    return (1 + op.numel) * SHARE[precision] * 0.1


def cast_s(source, target, numel):
    assert source != target
    return 1e-3 + numel * (0.011 if source == "fp32" else 0.007)


@st.composite
def graphs(draw, max_ops=8):
    kinds = st.sampled_from(["linear", "linear", "dependent", "fixed"])
    ops = []
    for i in range(draw(st.integers(1, max_ops))):
        names = [op.name for op in ops]
        inputs = draw(st.lists(st.sampled_from(names), max_size=3, unique=True)) if names else []
        kind = draw(kinds)
        weight = draw(st.integers(0, 9)) if kind == "linear" else 0
        ops.append(
            Op(
                f"op{i}",
                kind,
                inputs=tuple(inputs),
                numel=draw(st.integers(0, 9)),
                weight_numel=weight,
            )
        )
    return Graph(ops)


def resolve(graph, chosen):
    """Precision of every operator, by the definition."""
    precisions = {}
    for op in graph.ops:
        arrivals = {OUTPUT[precisions[name]] for name in op.inputs}
        precisions[op.name] = "fp32"
        if op.kind == "linear":
            precisions[op.name] = chosen.get(op.name, "fp32")
        elif op.kind == "dependent" and len(arrivals) == 1:
            precisions[op.name] = arrivals.pop()
    return precisions


def count_cost(graph, chosen):
    """All casts and the total seconds, by the definition."""
    precisions, casts, total_s = resolve(graph, chosen), set(), 0.0
    numel = {op.name: op.numel for op in graph.ops}
    for op in graph.ops:
        own = precisions[op.name]
        total_s += kernel_s(op, own)
        if op.weight_numel and own != "fp32":
            casts.add(("weight", op.name, op.name))
            total_s += cast_s("fp32", own, op.weight_numel)
        for name in op.inputs:
            other = precisions[name]
            if OUTPUT[other] != own:
                casts.add(("forward", name, op.name))
                total_s += cast_s(OUTPUT[other], own, numel[name])
            if BACKWARD[other] != BACKWARD[own]:
                casts.add(("backward", op.name, name))
                total_s += cast_s(BACKWARD[own], BACKWARD[other], numel[name])
    return casts, total_s


def chain(num_ops, numel=4, weight_numel=2):
    return Graph(
        Op(
            f"fc{i}",
            "linear",
            inputs=(f"fc{i - 1}",) if i else (),
            numel=numel,
            weight_numel=weight_numel,
        )
        for i in range(num_ops)
    )
