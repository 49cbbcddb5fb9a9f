from itertools import product
from math import sin

import pytest
from hypothesis import given
from hypothesis import strategies as st
from planner_graphs import cast_s, chain, count_cost, graphs, kernel_s

from qsync import CostMapper, Graph, Op
from qsync.planner.blocks import Infeasible, choose_fastest, fit_memory, split_blocks
from qsync.planner.memory import SavedBytes, SavedTensor

ALLOWED = ["int8", "bf16", "fp32"]


def build(graph):
    return CostMapper(graph, kernel_s=kernel_s, cast_s=cast_s)


def test_blocks_end_where_one_output_is_left():
    ops = [
        Op("a", "linear"),
        Op("b", "linear", inputs=("a",)),
        Op("c", "linear", inputs=("a",)),
        Op("add", "dependent", inputs=("b", "c")),
        Op("d", "linear", inputs=("add",)),
    ]
    assert split_blocks(Graph(ops)) == [[0], [1, 2, 3], [4]]


@given(graph=graphs(max_ops=9))
def test_only_a_blocks_last_output_crosses_its_end(graph):
    blocks = split_blocks(graph)
    assert [i for block in blocks for i in block] == list(range(len(graph.ops)))
    ends = {block[-1] for block in blocks}
    for i in range(len(graph.ops) - 1):
        crossing = {j for j in range(i + 1) if any(k > i for k in graph.consumers[j])}
        assert (i in ends) == (crossing <= {i})


@given(graph=graphs(max_ops=6))
def test_no_uniform_precision_and_no_single_change_is_faster(graph):
    mapper = build(graph)
    choose_fastest(mapper, ALLOWED)
    names = [graph.ops[i].name for i in graph.linears]
    chosen = {name: mapper.precision(name) for name in names}
    best_s = mapper.total_s + 1e-12
    for precision in ALLOWED:
        assert best_s >= 0
        assert count_cost(graph, dict.fromkeys(names, precision))[1] >= best_s - 2e-12
        for name in names:
            assert count_cost(graph, chosen | {name: precision})[1] >= best_s - 2e-12


def test_block_that_no_single_change_improves_is_enumerated():
    """Two operators save time only together: alone either one pays more for casts."""
    graph = chain(3, numel=10, weight_numel=0)
    shares = {"fc0": 9.0, "fc1": 0.5, "fc2": 0.5}

    def pair_s(op, precision):
        return shares[op.name] if precision == "fp32" else (0.1 if op.name != "fc0" else 9.5)

    mapper = CostMapper(graph, kernel_s=pair_s, cast_s=lambda source, target, numel: 0.25)
    names = ["fc0", "fc1", "fc2"]
    choose_fastest(mapper, ["bf16", "fp32"])
    found_s = mapper.total_s
    least_s = float("inf")
    for chosen in product(["bf16", "fp32"], repeat=3):
        for name, precision in zip(names, chosen, strict=True):
            mapper.set(name, precision)
        least_s = min(least_s, mapper.total_s)
    assert found_s == least_s


def count(mapper, tensors):
    def precision(name):
        return mapper.precision(name) if name in mapper.graph.index else "fp32"

    return SavedBytes(tensors, precision)


def lower_naively(mapper, saved, limit_bytes):
    """The definition: all moves are priced anew after each."""
    graph = mapper.graph
    reads = [[i for i in each if graph.ops[i].kind == "linear"] for each in graph.consumers]
    sets = [[i] for i in graph.linears] + [each for each in reads if len(each) > 1]
    names = [op.name for op in graph.ops]
    while saved.total > limit_bytes:
        offers = []
        for move, (group, precision) in enumerate(product(sets, ALLOWED)):
            before_s, before = mapper.total_s, saved.total
            for i in group:
                mapper.set(names[i], precision)
            saved.update(names)
            if saved.total < before:
                ratio = (mapper.total_s - before_s) / (before - saved.total)
                offers.append((round(ratio, 12), move, group, precision))
            for _ in group:
                mapper.undo()
            saved.update(names)
        if not offers:
            return False
        _, _, group, precision = min(offers)
        for i in group:
            mapper.set(names[i], precision)
        saved.update(names)
    return True


@given(graph=graphs(max_ops=7), data=st.data())
def test_moves_that_are_not_priced_anew_have_kept_their_prices(graph, data):
    names = [op.name for op in graph.ops]
    tensors = [
        SavedTensor(op=names[i], source=source, numel=data.draw(st.integers(1, 50)), role="operand")
        for i in graph.linears
        for source in data.draw(st.sets(st.sampled_from([*names, "x", "y"]), max_size=2))
    ]
    # No two operators cost the same, so that rounding decides nothing.
    fast, plain = (
        CostMapper(
            graph,
            kernel_s=lambda op, p: kernel_s(op, p) * (1 + 0.1 * sin(graph.index[op.name])),
            cast_s=cast_s,
        )
        for _ in range(2)
    )
    saved = count(fast, tensors)
    limit = data.draw(st.floats(0.3, 1.0)) * saved.total
    fits = lower_naively(plain, count(plain, tensors), limit)
    try:
        fit_memory(fast, ALLOWED, saved, limit)
    except Infeasible:
        assert not fits
    else:
        assert fits
    assert [fast.precision(name) for name in names] == [plain.precision(name) for name in names]
    assert saved.total == count(fast, tensors).total


def test_memory_is_met_at_the_least_seconds():
    """Three operators keep one input: lowering fewer than all keeps it in float32 besides."""
    graph = Graph(
        [Op("x0", "fixed", numel=100), *(Op(f"q{i}", "linear", ("x0",), 100) for i in range(3))]
    )
    mapper = build(graph)
    tensors = [SavedTensor(op=f"q{i}", source="x", numel=100, role="operand") for i in range(3)]
    assert count(mapper, tensors).total == 400
    with pytest.raises(Infeasible, match="got 312 B at the least, 12 B too much"):
        fit_memory(mapper, ALLOWED, count(mapper, tensors), 300)
    mapper = build(graph)
    fit_memory(mapper, ALLOWED, count(mapper, tensors), 350)
    assert {mapper.precision(f"q{i}") for i in range(3)} == {"int8"}
    mapper = build(graph)
    fit_memory(mapper, ALLOWED, count(mapper, tensors), 400)
    assert {mapper.precision(f"q{i}") for i in range(3)} == {"fp32"}
