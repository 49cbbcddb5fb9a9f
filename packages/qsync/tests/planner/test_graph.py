import pytest

from qsync import Graph, Op
from shared.errors import DataError


def test_positions_and_neighbours():
    graph = Graph(
        [Op("a", "linear"), Op("b", "dependent", inputs=("a", "a")), Op("c", "fixed", ("a", "b"))]
    )
    assert graph.inputs == [[], [0], [0, 1]]
    assert graph.consumers == [[1, 2], [2], []]
    assert graph.linears == [0]
    assert graph.position("c") == 2


def test_unknown_operator_is_named():
    with pytest.raises(DataError, match="operator 'b' reads the unknown operator 'x'"):
        Graph([Op("b", "linear", inputs=("x",))])
    with pytest.raises(DataError, match="expected an operator of the graph, got 'x'"):
        Graph([Op("b", "linear")]).position("x")


def test_repeated_name_is_named():
    with pytest.raises(DataError, match="two operators are called 'a', numbers 0 and 1"):
        Graph([Op("a", "linear"), Op("a", "fixed")])


def test_cycle_is_spelled_out():
    with pytest.raises(DataError, match="in a cycle: 'a' reads 'c' reads 'b' reads 'a'"):
        Graph(
            [
                Op("a", "linear", inputs=("c",)),
                Op("b", "linear", inputs=("a",)),
                Op("c", "linear", inputs=("b",)),
            ]
        )


def test_wrong_order_is_told_from_a_cycle():
    with pytest.raises(DataError, match="'a' reads 'b', which is listed after it"):
        Graph([Op("a", "linear", inputs=("b",)), Op("b", "linear")])


def test_operator_that_reads_itself_is_a_cycle():
    with pytest.raises(DataError, match="in a cycle: 'a' reads 'a'"):
        Graph([Op("a", "linear", inputs=("a",))])


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"numel": -1}, "expected numel of 0 or more, got -1"),
        ({"weight_numel": -2}, "expected weight_numel of 0 or more, got -2"),
    ],
)
def test_negative_count_is_refused(fields, message):
    with pytest.raises(DataError, match=message):
        Op("a", "linear", **fields)
