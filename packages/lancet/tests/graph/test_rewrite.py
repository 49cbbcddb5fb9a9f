"""Graphs of aten operators, made by hand: what their operations wait for, and their new orders."""

import pytest
import torch
from torch import fx

from lancet.graph.rewrite import collectives, is_repeatable, list_ops, merge_waits, reorder

aten, c10d = torch.ops.aten, torch.ops._c10d_functional


def add_exchange(graph, rows, group="ours"):
    start = graph.call_function(c10d.all_to_all_single.default, (rows, [1, 1], [1, 1], group))
    return start, graph.call_function(c10d.wait_tensor.default, (start,))


@pytest.fixture
def graph():
    return fx.Graph()


@pytest.fixture
def rows(graph):
    return graph.placeholder("rows")


def needs_of(graph):
    return {op.name: set(op.after) for op in list_ops(graph, "ours", {})}


def test_readers_of_a_wait_follow_its_collective(graph, rows):
    start, wait = add_exchange(graph, rows)
    reader = graph.call_function(aten.relu.default, (wait,))
    graph.output((reader,))
    ops = list_ops(graph, "ours", {reader.name: 2.0})
    assert [(op.name, op.kind, op.time_s, op.after) for op in ops] == [
        (start.name, "all_to_all", 0.0, ()),
        (reader.name, "compute", 2.0, (start.name,)),
    ]


def test_what_writes_to_its_arguments_keeps_all_others_on_their_side(graph, rows):
    before = graph.call_function(aten.relu.default, (rows,))
    other = graph.call_function(aten.neg.default, (rows,))
    write = graph.call_function(aten.copy_.default, (rows, before))
    after = graph.call_function(aten.neg.default, (rows,))
    graph.output((after,))
    needs = needs_of(graph)
    assert needs[write.name] == {before.name, other.name}
    assert needs[after.name] == {write.name}
    assert not is_repeatable(graph)


def test_random_operators_keep_their_order(graph, rows):
    first = graph.call_function(aten.rand_like.default, (rows,))
    middle = graph.call_function(aten.relu.default, (rows,))
    second = graph.call_function(aten.bernoulli.default, (rows,))
    graph.output((first, middle, second))
    assert needs_of(graph) == {first.name: set(), middle.name: set(), second.name: {first.name}}
    assert not is_repeatable(graph)


def test_collectives_over_other_ranks_keep_their_order(graph, rows):
    ours, _ = add_exchange(graph, rows)
    first, first_wait = add_exchange(graph, rows, "theirs")
    total = graph.call_function(c10d.all_reduce.default, (rows, "sum", "others"))
    graph.output((first_wait, total))
    assert list(collectives(graph, "ours")) == [ours]
    needs = needs_of(graph)
    assert (needs[ours.name], needs[first.name]) == (set(), set())
    assert needs[total.name] == {first.name}
    assert needs[first_wait.name] == {first.name}


def test_one_wait_is_left_and_rows_are_counted_from_sizes(graph, rows):
    start, wait = add_exchange(graph, rows)
    again = graph.call_function(c10d.wait_tensor.default, (start,))
    num_rows = graph.call_function(aten.sym_size.int, (wait, 0))
    view = graph.call_function(aten.view.default, (again, [num_rows, -1]))
    graph.output((wait, view))
    merge_waits(graph, "ours")
    graph.lint()
    (merged,) = start.users
    assert merged.target is c10d.wait_tensor.default
    assert view.args[0] is merged
    assert graph.output_node().args[0] == (merged, view)
    total = view.args[1][0]
    assert total.args == (1, 1)


def test_a_wait_goes_to_its_first_reader_in_the_new_order(graph, rows):
    start, wait = add_exchange(graph, rows)
    reader = graph.call_function(aten.relu.default, (wait,))
    free = graph.call_function(aten.neg.default, (rows,))
    graph.output((reader, free))
    result = reorder(graph, "ours", [start.name, free.name, reader.name])
    result.lint()
    assert [node.name for node in result.nodes if node.op == "call_function"] == [
        start.name, free.name, wait.name, reader.name,
    ]  # fmt: skip
