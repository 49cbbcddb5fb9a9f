import json
from dataclasses import replace
from math import inf, nan

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import fx

from lancet.graph.batch_axes import BatchAxes
from lancet.graph.operations import Op
from lancet.moe.dispatch import mark_end, mark_start
from lancet.planner.batch_cut import BatchCut
from lancet.planner.partition import PartCosts, best_ranges, choose_ranges, merge_costs
from lancet.planner.plan import Plan, load_plans, make_plan, save_plans
from shared.errors import ConfigError, DataError


def list_ranges(num_groups, max_range):
    """All ways to cut a sequence into ranges."""
    if not num_groups:
        yield []
    for length in range(1, min(num_groups, max_range) + 1):
        for rest in list_ranges(num_groups - length, max_range):
            yield [*rest, (num_groups - length, num_groups)]


@given(
    st.integers(0, 8),
    st.integers(1, 9),
    st.dictionaries(
        st.tuples(st.integers(0, 8), st.integers(0, 8)), st.integers(0, 9).map(float) | st.just(inf)
    ),
)
def test_ranges_are_the_cheapest_of_all(num_groups, max_range, costs):
    def cost(first, stop):
        assert 0 <= first < stop <= num_groups
        assert stop - first <= max_range
        return costs.get((first, stop), float(stop - first) ** 2)

    least = min(
        sum(cost(*span) for span in ranges) for ranges in list_ranges(num_groups, max_range)
    )
    if least == inf:
        with pytest.raises(DataError, match=f"ranges of finite cost over {num_groups} groups"):
            best_ranges(num_groups, max_range, cost)
        return
    total, ranges = best_ranges(num_groups, max_range, cost)
    assert total == least == sum(cost(*span) for span in ranges)
    assert ranges in list(list_ranges(num_groups, max_range))


def test_of_equal_costs_the_longest_range():
    assert best_ranges(4, 4, lambda first, stop: float(stop - first)) == (4.0, [(0, 4)])


def test_bad_input_is_named():
    with pytest.raises(ConfigError, match="got -1 and 2"):
        best_ranges(-1, 2, lambda first, stop: 0.0)
    with pytest.raises(ConfigError, match="got 3 and 0"):
        best_ranges(3, 0, lambda first, stop: 0.0)
    with pytest.raises(DataError, match="range 0:1: expected a cost, got nan"):
        best_ranges(3, 1, lambda first, stop: nan)
    with pytest.raises(DataError, match="none go on from group 1"):
        best_ranges(3, 1, lambda first, stop: inf if first == 1 else 1.0)


def make_layers(num_layers=2):
    """A graph of layers: a product with a weight, then an exchange; all of its tensors have the batch."""
    graph = fx.Graph()
    weight, hidden = graph.placeholder("weight"), graph.placeholder("x")
    for _ in range(num_layers):
        hidden = graph.call_function(torch.mm, (hidden, weight))
        hidden = graph.call_function(mark_end, (graph.call_function(mark_start, (hidden,)),))
    graph.output(graph.call_function(torch.mm, (hidden, weight)))
    nodes = list(graph.nodes)
    dependent = frozenset(node for node in nodes if node.name != "weight")
    axes = {node: (0, 1) if node in dependent else None for node in nodes}
    for node in nodes:
        node.meta["example_value"] = None
    return graph, BatchAxes(8, frozenset(), axes, dependent, {}, frozenset())


def make_costs(graph, product_s, exchange_s, numbers=(1, 2), product_bytes=8):
    """A product and an exchange take these seconds of the whole batch, by number of parts."""
    nodes = list(graph.nodes)
    kinds = ["all_to_all" if node.target is mark_start else "compute" for node in nodes]
    time_s = {
        n: [
            exchange_s(n) if node.target is mark_start else product_s(n) * (node.target is torch.mm)
            for node in nodes
        ]
        for n in numbers
    }
    num_bytes = [product_bytes * (node.target is torch.mm) for node in nodes]
    num_bytes[0] = 100
    return PartCosts(kinds, time_s, [0.0] * len(nodes), num_bytes)


def test_parts_that_compute_more_pay_for_it_in_both_passes():
    graph, axes = make_layers()

    def choose(added_s, **settings):
        costs = make_costs(graph, lambda n: 4 / n + added_s * (n > 1), lambda n: 4 / n)
        return choose_ranges(graph, axes, costs, **settings)

    # Two exchanges of 4 s between three products of 4 s: in two parts all but 2 s of them hide.
    assert choose(0.0).cut_s == pytest.approx(12.0)
    assert choose(0.0).whole_s == 20.0
    # In the forward pass, three products in two parts take 6 * 0.1 s more, and twice that backward.
    assert choose(0.1).cut_s == pytest.approx(12.0 + 3 * 0.6)
    assert choose(0.1).ranges
    # 12 + 18 * 0.4 is less than 20, but by less than a tenth.
    nothing = choose(0.4)
    assert (nothing.ranges, nothing.extra_bytes) == ((), 0)
    assert "parts save too little of the forward pass in replay, 20.0 s whole" in nothing.reason
    assert choose(0.4, may_stay_whole=False).ranges


def test_joining_parts_takes_its_time():
    graph, axes = make_layers()
    costs = make_costs(graph, lambda n: 4 / n, lambda n: 4 / n)
    # Only the last product is read whole.
    costs = replace(costs, copy_s=[0.5] * len(costs.copy_s))
    assert choose_ranges(graph, axes, costs).cut_s == pytest.approx(12.5)


def test_many_layers_may_be_one_range():
    graph, axes = make_layers(20)
    costs = make_costs(graph, lambda n: 4 / n, lambda n: 4 / n)
    chosen = choose_ranges(graph, axes, costs)
    assert len(chosen.ranges) == 1
    # All but the fill of the pipeline is hidden.
    assert chosen.cut_s == pytest.approx(21 * 4.0)


def test_more_parts_only_where_they_are_faster():
    graph, axes = make_layers()

    def choose(latency_s):
        costs = make_costs(
            graph, lambda n: 4 / n, lambda n: 8 / n + latency_s * (n > 1), numbers=(1, 2, 4, 8)
        )
        return {num_parts for *_, num_parts in choose_ranges(graph, axes, costs).ranges}

    # Exchanges take longer than products, which are exposed before the first one and after the last.
    assert choose(0.0) == {8}
    assert choose(10.0) == set()
    assert choose(0.2) == {4}


def test_bytes_that_parts_add():
    graph, axes = make_layers()
    costs = make_costs(graph, lambda n: 4 / n, lambda n: 4 / n)
    chosen = choose_ranges(graph, axes, costs)
    (first, stop, num_parts) = chosen.ranges[0]
    assert (len(chosen.ranges), num_parts) == (1, 2)
    # The weight's gradient twice; the batch has no bytes here, and the last product is joined.
    assert (first, stop) == (2, len(graph.nodes) - 1)
    assert chosen.extra_bytes == 2 * 100 + 8


def test_costs_of_all_ranks():
    kinds = ["compute", "all_to_all"]
    merged = merge_costs(
        [
            PartCosts(kinds, {1: [1.0, 5.0], 2: [0.6, 3.0], 4: [0.1, 2.0]}, [2.0, 0.0], [8, 1]),
            PartCosts(kinds, {1: [3.0, 4.0], 2: [1.6, 7.0], 4: [0.3, 0.0]}, [4.0, 0.0], [6, 2]),
        ]
    )
    # Four parts take no less than the whole.
    assert merged.time_s == {1: [2.0, 4.5], 2: [1.1, 5.0], 4: [0.5, 1.125]}
    assert merged.copy_s == [3.0, 0.0]
    assert merged.num_bytes == [8, 2]


def test_a_plan_keeps_its_parts(tmp_path):
    cut = BatchCut(digest="abc", ranges=((3, 7, 2), (7, 20, 4)), extra_bytes=5)
    plan = make_plan("forward 0", "d", "2.13", [Op("a", "compute", 1.0)], [], None, None, cut)
    save_plans(tmp_path / "plan.json", [plan])
    assert load_plans(tmp_path / "plan.json") == [plan]
    assert plan.cut == cut
    old = json.loads(plan.to_json()) | {"format": 2}
    del old["cut"]
    assert Plan.from_json(json.dumps(old)) == replace(plan, cut=BatchCut())
    for ranges in (((3, 3, 2),), ((3, 7, 1),), ((3, 7, 9),), ((7, 20, 2), (3, 7, 2))):
        bad = replace(plan, cut=replace(cut, ranges=ranges))
        save_plans(tmp_path / "bad.json", [bad])
        with pytest.raises(DataError, match=r"expected ranges one after another, each in 2 to 8"):
            load_plans(tmp_path / "bad.json")
