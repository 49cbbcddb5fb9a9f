from itertools import product

import pytest
from hypothesis import given
from hypothesis import strategies as st
from planner_graphs import cast_s, count_cost, graphs, kernel_s

from qsync import Graph, Op
from qsync.planner.milp import solve

ALLOWED = ["int8", "bf16", "fp16", "fp32"]


@given(graph=graphs(max_ops=6), share=st.floats(0, 1), data=st.data())
def test_highs_finds_the_least_noise_of_all_combinations(graph, share, data):
    names = [graph.ops[i].name for i in graph.linears][:4]
    allowed = data.draw(
        st.sampled_from([["int8", "fp32"], ["bf16", "fp16", "fp32"], ["bf16", "fp32"]])
    )
    values = st.floats(0.1, 10)
    noise = {op.name: {p: data.draw(values) for p in allowed if p != "fp32"} for op in graph.ops}
    all_names = [graph.ops[i].name for i in graph.linears]
    costs = []
    for chosen in product(allowed, repeat=len(all_names)):
        precisions = dict(zip(all_names, chosen, strict=True))
        total = sum(noise[name].get(p, 0.0) for name, p in precisions.items())
        costs.append((count_cost(graph, precisions)[1], total))
    low_s, high_s = min(costs)[0], max(costs)[0]
    limit_s = low_s + share * (high_s - low_s) + 1e-7
    best = min(total for seconds, total in costs if seconds <= limit_s)
    result = solve(
        graph, noise, precisions=allowed, kernel_s=kernel_s, cast_s=cast_s, limit_s=limit_s
    )
    assert result.is_optimal
    assert result.noise == pytest.approx(best, rel=1e-3, abs=1e-5)
    assert count_cost(graph, result.precisions)[1] <= limit_s + 1e-5
    assert names == list(result.precisions)[: len(names)]


def test_dependent_operator_cannot_stay_where_it_would_be_faster():
    """It follows two bf16 inputs although that takes it 10 s, so that one of them stays float32."""
    ops = [
        Op("a", "linear"),
        Op("b", "linear"),
        Op("add", "dependent", inputs=("a", "b")),
    ]
    seconds = {("a", "fp32"): 2.0, ("b", "fp32"): 2.5, ("add", "bf16"): 10.0}
    result = solve(
        Graph(ops),
        {"a": {"bf16": 1.0}, "b": {"bf16": 1.0}},
        precisions=["bf16", "fp32"],
        kernel_s=lambda op, precision: seconds.get((op.name, precision), 1.0),
        cast_s=lambda source, target, numel: 0.0,
        limit_s=4.2,
    )
    assert result.precisions == {"a": "fp32", "b": "bf16"}
    assert result.noise == pytest.approx(1.0)
    both_low = solve(
        Graph(ops),
        {"a": {"bf16": 1.0}, "b": {"bf16": 1.0}},
        precisions=["bf16", "fp32"],
        kernel_s=lambda op, precision: seconds.get((op.name, precision), 1.0),
        cast_s=lambda source, target, numel: 0.0,
        limit_s=3.9,
    )
    assert both_low.precisions is None


@given(graph=graphs(max_ops=4))
def test_impossible_limit_has_no_answer(graph):
    lowest_s = min(
        count_cost(
            graph, dict(zip([graph.ops[i].name for i in graph.linears], chosen, strict=True))
        )[1]
        for chosen in product(ALLOWED, repeat=len(graph.linears))
    )
    result = solve(
        graph, {}, precisions=ALLOWED, kernel_s=kernel_s, cast_s=cast_s, limit_s=0.5 * lowest_s
    )
    assert result.precisions is None
    assert not result.is_optimal
