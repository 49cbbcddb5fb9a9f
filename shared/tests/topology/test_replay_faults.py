import math

import pytest

from shared.errors import ConfigError, DataError
from shared.topology import Operation, Replay
from shared.topology.replay.graph import OperationGraph

A, B = Operation("a", "q", 1.0), Operation("b", "q", 1.0, after=["a"])


@pytest.mark.parametrize(
    ("operations", "queues", "says"),
    [
        ([A, B, A], None, "two operations are called 'a', numbers 0 and 2"),
        ([B], None, "'b' comes after the unknown operation 'a'"),
        ([A, A._replace(name="b", after="a")], None, r"got the text 'a'; write \('a',\)"),
        ([A, A._replace(name="b", after="xy")], None, "got the text 'xy'"),
        ([A], {"p": "given"}, "'a' is on the unknown queue 'q'; the queues given are 'p'"),
        ([A._replace(queue=("q", "q"))], None, "'a' must hold one queue or several different ones"),
        ([A._replace(queue=())], None, "'a' must hold one queue or several different ones"),
        ([A._replace(duration_s=-1.0)], None, "'a': the duration must be finite and not negative"),
        ([A._replace(duration_s=math.nan)], None, "'a': the duration must be .*, got nan s"),
        ([A._replace(earliest_s=math.inf)], None, "'a': the earliest start must be .*, got inf s"),
        ([A._replace(priority=math.nan)], None, "'a': priority must be finite, got nan"),
        ([A, B._replace(after={"a": -0.5})], None, "'b': the lag after 'a' must be .*, got -0.5 s"),
        ([A._replace(after=["a"])], None, "in a cycle: 'a' comes after 'a'; drop one"),
        (
            [B._replace(queue="p"), A._replace(after={"b": 1.0})],
            None,
            "in a cycle: 'b' comes after 'a', 'a' comes after 'b'; drop one",
        ),
        (
            [B._replace(queue=("p", "q")), A._replace(queue=("p", "q"))],
            {"p": "readiness", "q": "given"},
            "'a' is listed on 'q' behind 'b'",
        ),
        ([B, A], None, "deadlock .*: 'b' comes after 'a', 'a' is listed on 'q' behind 'b'; list"),
        (
            [Operation(i, f"q{i}", 1.0, after=[(i + 1) % 50]) for i in range(50)],
            None,
            "10 comes after 11, 11 comes after 12, and 38 more back to the first; drop one",
        ),
    ],
)
def test_operations_that_cannot_be_replayed(operations, queues, says):
    with pytest.raises(DataError, match=says):
        Replay(operations, queues)


def test_deadlock_in_the_given_order_is_none_by_readiness():
    assert Replay([B, A], {"q": "readiness"}).run().start_s.tolist() == [1.0, 0.0]


def test_orders_that_cannot_be():
    both = {"p": "readiness", "q": "priority"}
    with pytest.raises(ConfigError, match=r"'a' holds .*; give them one order"):
        Replay([A._replace(queue=("p", "q"))], both)
    with pytest.raises(ConfigError, match="queue 'q': the order must be one of given, readiness, "):
        OperationGraph([A], {"q": "fifo"})


def test_what_a_timeline_does_not_have():
    timeline = Replay([A]).run()
    with pytest.raises(DataError, match="no operation is called 'z'"):
        timeline.span_s("z")
    with pytest.raises(DataError, match="no queue is called 'z'; there are 'q'"):
        timeline.gaps_s("z")
    with pytest.raises(DataError, match=r"one duration for each of the 1 operations, .* \[2\]"):
        Replay([A]).run([1.0, 2.0])
