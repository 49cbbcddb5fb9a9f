"""An executor runs the order that is chosen by name, and the captured one where a graph has no such order."""

import time

import torch
from torch import fx

from lancet.graph.capture import CapturedGraph
from lancet.graph.operations import LaunchOrder
from lancet.runtime.executor import GraphExecutor
from shared.comms import Group

_collectives = torch.ops._c10d_functional
_launched: list[str] = []
_late_s = 0.0


def _double(rows, name):
    _launched.append(name)
    if name == "early":
        time.sleep(_late_s)
    return 2 * rows


def _capture(group):
    """Rows are doubled and exchanged; others are doubled meanwhile, or behind."""
    graph = fx.Graph()
    rows = graph.placeholder("rows")
    early = graph.create_node("call_function", _double, (rows, "early"), name="early")
    start = graph.create_node(
        "call_function",
        _collectives.all_to_all_single.default,
        (early, [1, 1], [1, 1], group.checked().group_name),
        name="exchange",
    )
    received = graph.call_function(_collectives.wait_tensor.default, (start,))
    reader = graph.create_node("call_function", _double, (received, "reader"), name="reader")
    free = graph.create_node("call_function", _double, (rows, "free"), name="free")
    graph.output((reader, free))
    return CapturedGraph(fx.GraphModule({}, graph), "backward", {})


def _run(names):
    group = Group.world()
    executor = GraphExecutor(
        _capture(group), group, "graph", lambda _: None, lambda _: None, None, lambda *_: True
    )
    rows = torch.tensor([10.0, 20.0]) + group.rank
    executor.run([rows])
    executor.add_order("beside", LaunchOrder(("early", "exchange", "free", "reader")))
    executor.add_order("ahead", LaunchOrder(("free", "early", "exchange", "reader")))
    runs = []
    for name in names:
        executor.order_name = name
        _launched.clear()
        outputs = executor.run([rows])
        runs.append(([*_launched], [output.tolist() for output in outputs]))
    return runs


def test_orders_run_by_name(pool):
    names = ("captured", "beside", "ahead", "unknown")
    for rank, runs in enumerate(pool.run(_run, names).results):
        launched = [order for order, _ in runs]
        assert launched == [
            ["early", "reader", "free"],
            ["early", "free", "reader"],
            ["free", "early", "reader"],
            ["early", "reader", "free"],
        ]
        received = [4 * (10.0 * (rank + 1) + sender) for sender in range(2)]
        kept = [2 * (10.0 + rank), 2 * (20.0 + rank)]
        assert all(outputs == [received, kept] for _, outputs in runs)


def _time_exchange(late_s):
    global _late_s
    group = Group.world()
    executor = GraphExecutor(
        _capture(group), group, "graph", lambda _: None, lambda _: None, None, lambda *_: True
    )
    _late_s = late_s[group.rank]
    try:
        executor.run([torch.tensor([10.0, 20.0])])
    finally:
        _late_s = 0.0
    return executor.time_s


def test_an_exchange_is_timed_from_its_start_on_the_last_rank(pool):
    punctual, late = pool.run(_time_exchange, [0.0, 0.5]).results
    assert late["early"] >= 0.5 > punctual["early"]
    assert 0 < punctual["exchange"] < 0.25
