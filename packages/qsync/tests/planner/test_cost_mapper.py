import pytest
from hypothesis import given
from hypothesis import strategies as st
from planner_graphs import cast_s, chain, count_cost, graphs, kernel_s, resolve

from qsync import CostMapper, Graph, Op
from shared.errors import ConfigError, DataError

PRECISIONS = ["fp8", "int8", "bf16", "fp16", "fp32"]


def build(graph):
    return CostMapper(graph, kernel_s=kernel_s, cast_s=cast_s)


@given(graph=graphs(), data=st.data())
def test_any_changes_cost_what_the_definition_says(graph, data):
    mapper, chosen, history = build(graph), {}, []
    names = [graph.ops[i].name for i in graph.linears]
    for _ in range(data.draw(st.integers(0, 8)) if names else 0):
        if history and data.draw(st.booleans()):
            mapper.undo()
            chosen = history.pop()
        else:
            history.append(dict(chosen))
            name, precision = (
                data.draw(st.sampled_from(names)),
                data.draw(st.sampled_from(PRECISIONS)),
            )
            mapper.set(name, precision)
            chosen[name] = precision
        casts, total_s = count_cost(graph, chosen)
        assert mapper.casts() == casts
        assert mapper.total_s == pytest.approx(total_s, rel=1e-12)
        assert {op.name: mapper.precision(op.name) for op in graph.ops} == resolve(graph, chosen)
    anew = build(graph)
    for name, precision in chosen.items():
        anew.set(name, precision)
    assert mapper.total_s == anew.total_s
    while history:
        mapper.undo()
        history.pop()
    assert mapper.total_s == build(graph).total_s


def test_lowering_one_of_a_chain_adds_its_five_casts():
    mapper = build(chain(3))
    mapper.set("fc1", "bf16")
    assert mapper.casts() == {
        ("forward", "fc0", "fc1"),
        ("weight", "fc1", "fc1"),
        ("forward", "fc1", "fc2"),
        ("backward", "fc2", "fc1"),
        ("backward", "fc1", "fc0"),
    }


def test_neighbours_of_one_precision_share_no_cast():
    mapper = build(chain(2))
    mapper.set("fc0", "bf16")
    mapper.set("fc1", "bf16")
    assert mapper.casts() == {("weight", "fc0", "fc0"), ("weight", "fc1", "fc1")}


def test_int8_leaves_float32_and_gives_bf16_gradients():
    mapper = build(chain(3))
    mapper.set("fc1", "int8")
    assert ("forward", "fc1", "fc2") not in mapper.casts()
    mapper.set("fc2", "bf16")
    assert ("forward", "fc1", "fc2") in mapper.casts()
    assert ("backward", "fc2", "fc1") not in mapper.casts()


def test_dependent_operators_follow_inputs_that_agree():
    ops = [
        Op("a", "linear", numel=4),
        Op("b", "linear", numel=4),
        Op("add", "dependent", inputs=("a", "b"), numel=4),
        Op("relu", "dependent", inputs=("add",), numel=4),
        Op("softmax", "fixed", inputs=("relu",), numel=4),
    ]
    mapper = build(Graph(ops))
    mapper.set("a", "bf16")
    assert mapper.precision("relu") == "fp32"
    mapper.set("b", "bf16")
    assert (mapper.precision("relu"), mapper.precision("softmax")) == ("bf16", "fp32")
    assert ("forward", "relu", "softmax") in mapper.casts()
    mapper.set("b", "fp16")
    assert mapper.precision("relu") == "fp32"
    mapper.undo()
    assert mapper.precision("relu") == "bf16"


def test_backward_kernels_are_apart_from_forward():
    graph = chain(2)
    mapper = CostMapper(
        graph,
        kernel_s=lambda op, precision: 1.0,
        cast_s=lambda source, target, numel: 0.25,
        backward_kernel_s=lambda op, precision: 2.0,
    )
    mapper.set("fc1", "bf16")
    assert mapper.forward_s == [1.0, 1.5]
    assert mapper.backward_s == [2.25, 2.0]


def test_trial_prices_a_neighbourhood_only():
    calls = []

    def count_kernel_s(op, precision):
        calls.append(op.name)
        return kernel_s(op, precision)

    mapper = CostMapper(chain(500), kernel_s=count_kernel_s, cast_s=cast_s)
    calls.clear()
    touched = mapper.set("fc250", "int8")
    mapper.undo()
    assert touched == [249, 250, 251]
    # Forward of the operator and its consumer, twice.
    assert sorted(calls) == ["fc250", "fc250", "fc251", "fc251"]


def test_a_diamond_of_many_layers_is_visited_once():
    ops = [Op("a", "linear", numel=1)]
    for i in range(60):
        before = ops[-1].name
        ops += [
            Op(f"relu{i}", "dependent", inputs=(before,), numel=1),
            Op(f"add{i}", "dependent", inputs=(before, f"relu{i}"), numel=1),
        ]
    mapper = build(Graph(ops))
    mapper.set("a", "bf16")
    mapper.set("a", "fp16")
    assert mapper.precision("add59") == "fp16"


def test_wrong_changes_are_refused_and_change_nothing():
    mapper = build(Graph([Op("a", "linear"), Op("b", "fixed", inputs=("a",))]))
    before_s = mapper.total_s
    with pytest.raises(ConfigError, match="expected a linear operator, got a fixed one"):
        mapper.set("b", "bf16")
    with pytest.raises(ConfigError, match="int4"):
        mapper.set("a", "int4")
    with pytest.raises(DataError, match="got 'x'"):
        mapper.set("x", "bf16")
    with pytest.raises(ConfigError, match="expected a change to take back"):
        mapper.undo()
    assert mapper.total_s == before_s


def test_missing_price_leaves_the_mapper_as_it_was():
    mapper = CostMapper(
        chain(2),
        kernel_s=lambda op, precision: float("nan") if precision == "int8" else 1.0,
        cast_s=cast_s,
    )
    with pytest.raises(DataError, match="operator 'fc0' in int8: expected finite seconds"):
        mapper.set("fc0", "int8")
    assert (mapper.precision("fc0"), mapper.total_s) == ("fp32", 2.0)
    assert mapper.casts() == set()
    with pytest.raises(ConfigError):
        mapper.undo()
