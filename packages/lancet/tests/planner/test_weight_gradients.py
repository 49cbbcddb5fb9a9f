from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st
from lancet_programs import backward, list_orders, programs, replay_s

from lancet.graph.operations import Op
from lancet.planner.memory import KeptTensor
from lancet.planner.weight_gradients import assign_dw, schedule
from lancet.simulator import simulate
from shared.errors import ConfigError, DataError


def published_greedy(ops):
    """The greedy in sets of names, straight from its description."""
    position = {op.name: number for number, op in enumerate(ops)}
    time_s = {op.name: op.time_s for op in ops}
    before = {}
    for op in ops:
        before[op.name] = set(op.after).union(*(before[name] for name in op.after))
    exchanges = [op.name for op in ops if op.kind == "all_to_all"]
    sums = {op.name for op in ops if op.kind == "all_reduce"}
    beside = {
        x: [
            op.name
            for op in ops
            if op.kind == "compute"
            and x not in before[op.name]
            and op.name not in before[x]
            and not sums & before[op.name]
        ]
        for x in exchanges
    }
    labelled = {name for names in beside.values() for name in names}
    used, assigned = set(), {x: [] for x in exchanges}
    for number, x in enumerate(exchanges):
        left = time_s[x]
        while left > 0:
            available = [
                name for name in beside[x] if name not in used and before[name] & labelled <= used
            ]
            if not available:
                break
            best = min(available, key=lambda name: (abs(time_s[name] - left), position[name]))
            if time_s[best] > 2 * left and assigned[x]:
                break
            assigned[x].append(best)
            used.add(best)
            left -= time_s[best]
        forced = set()
        for name in beside[x]:
            if name not in used and not any(name in beside[y] for y in exchanges[number + 1 :]):
                forced |= {name} | (before[name] & labelled) - used
        assigned[x] += sorted(forced, key=position.__getitem__)
        used |= forced
    return {x: tuple(names) for x, names in assigned.items()}


def check_order(ops, order):
    """Checks that an order keeps dependencies and communications' order; returns its operations."""
    by_name = {op.name: op for op in ops}
    assert sorted(order) == sorted(by_name)
    launched = set()
    for name in order:
        assert launched.issuperset(by_name[name].after)
        launched.add(name)
    captured = [op.name for op in ops if op.kind != "compute"]
    assert [name for name in order if by_name[name].kind != "compute"] == captured
    return [by_name[name] for name in order]


def test_greedy_by_hand():
    # x has 3 s: the weight gradient of 3 s fits it best, although that of 1 s is listed first.
    ops = [
        Op("a", "compute", 1.0),
        Op("short", "compute", 1.0, ("a",)),
        Op("long", "compute", 3.0, ("a",)),
        Op("x", "all_to_all", 3.0, ("a",)),
        Op("b", "compute", 1.0, ("x",)),
        Op("y", "all_to_all", 1.5, ("b",)),
        Op("c", "compute", 1.0, ("y",)),
    ]
    assert assign_dw(ops) == {"x": ("long",), "y": ("short",)}
    plan = schedule(ops)
    assert plan.order == ("a", "x", "long", "b", "y", "short", "c")
    # Captured: 1 + 4 of weight gradients beside x, then 1.5 s of y exposed.
    assert (plan.before_s, plan.makespan_s, plan.exposed_s) == (8.5, 7.5, 0.5)


def test_first_listed_of_equals_and_no_waste():
    ops = [
        Op("x", "all_to_all", 2.0),
        Op("near below", "compute", 1.0),
        Op("near above", "compute", 3.0),
        Op("equal", "compute", 1.0),
        Op("y", "all_to_all", 0.4, ("x",)),
    ]
    # 1 and 3 are equally near to 2: the first listed. Then 1 s fits; y is free for 3 s: its first.
    assert assign_dw(ops) == {"x": ("near below", "equal"), "y": ("near above",)}
    # With something given already, 3 s beside 1.4 s would be a waste. The last takes what is left.
    ops[3] = replace(ops[3], time_s=0.6)
    assert assign_dw(ops) == {"x": ("near below", "equal"), "y": ("near above",)}


def test_twice_the_time_left_is_no_waste():
    ops = [
        Op("x", "all_to_all", 3.0),
        Op("first", "compute", 2.0),
        Op("second", "compute", 2.0),
        Op("y", "all_to_all", 9.0, ("x",)),
    ]
    assert assign_dw(ops) == {"x": ("first", "second"), "y": ()}


def test_optimizer_work_is_left_alone():
    ops = [
        Op("weight", "compute", 1.0),
        Op("x", "all_to_all", 2.0),
        Op("sum", "all_reduce", 1.0, ("weight",)),
        Op("update", "compute", 1.0, ("sum",)),
    ]
    assert assign_dw(ops) == {"x": ("weight",)}


@given(programs(max_ops=14))
def test_greedy_is_the_published_one(ops):
    assigned = assign_dw(ops)
    assert assigned == published_greedy(ops)
    names = [name for given_names in assigned.values() for name in given_names]
    assert len(set(names)) == len(names)


@given(programs(max_ops=12))
def test_order_is_valid_and_its_times_are_those_of_its_replay(ops):
    plan = schedule(ops)
    ordered = check_order(ops, plan.order)
    assert plan.makespan_s == replay_s(ordered) == simulate(ordered).makespan_s
    assert plan.before_s == replay_s(ops) >= plan.makespan_s
    compute_s = sum(op.time_s for op in ops if op.kind == "compute")
    assert plan.exposed_s == pytest.approx(plan.makespan_s - compute_s)
    if plan.makespan_s == plan.before_s:
        assert plan.order == tuple(op.name for op in ops)


@given(programs(max_ops=10))
def test_communication_that_may_change_its_order_is_as_fast_at_least(ops):
    kept, free = schedule(ops), schedule(ops, keeps_order=False)
    by_name = {op.name: op for op in ops}
    # The replay refuses an order in which an operation comes before one that it follows.
    timeline = simulate([by_name[name] for name in free.order])
    assert len(free.order) == len(ops)
    assert timeline.makespan_s == free.makespan_s <= kept.makespan_s


def test_parts_of_a_batch_need_communication_in_another_order():
    # The first part's exchanges stand before the second's, which is ready long before.
    ops = [
        Op("a1", "compute", 1.0),
        Op("x1", "all_to_all", 1.0, ("a1",)),
        Op("b1", "compute", 1.0, ("x1",)),
        Op("y1", "all_to_all", 1.0, ("b1",)),
        Op("a2", "compute", 1.0),
        Op("x2", "all_to_all", 1.0, ("a2",)),
        Op("b2", "compute", 1.0, ("x2",)),
        Op("y2", "all_to_all", 1.0, ("b2",)),
    ]
    assert schedule(ops).makespan_s == 7.0
    assert schedule(ops, keeps_order=False).makespan_s == 5.0


def test_all_to_alls_without_time_leave_the_captured_order():
    ops = [op if op.kind == "compute" else replace(op, time_s=0.0) for op in backward(4)]
    assert schedule(ops).order == tuple(op.name for op in ops)


@pytest.mark.parametrize("weight_s", [0.25, 0.5, 1.0, 2.0])
@pytest.mark.parametrize("exchange_s", [0.25, 0.5, 1.0, 2.0])
def test_weight_gradients_hide_all_to_alls_up_to_their_own_time(weight_s, exchange_s):
    ops = backward(6, weight_s=weight_s, exchange_s=exchange_s)
    plan = schedule(ops)
    exposed_before_s = simulate(ops).exposed_s
    # Captured order hides a weight gradient already where it is listed beside an all-to-all.
    communication_s = sum(op.time_s for op in ops if op.kind != "compute")
    hidden_s = communication_s - plan.exposed_s
    assert plan.exposed_s <= exposed_before_s
    assert hidden_s >= 0.8 * min(12 * weight_s, communication_s)


@given(programs(max_ops=8))
def test_no_order_of_computing_beats_the_least_of_all_orders(ops):
    # Seven compute operations at most: all 5,040 orders.
    if sum(op.kind == "compute" for op in ops) > 6:
        ops = ops[:6]
    least_s = min(replay_s(order) for order in list_orders(ops))
    assert schedule(ops).makespan_s >= least_s


@st.composite
def programs_with_tensors(draw):
    ops = draw(programs(max_ops=10))
    names = [op.name for op in ops]
    readers_of = {name: tuple(op.name for op in ops if name in op.after) for name in names}
    tensors = [
        KeptTensor(
            num_bytes=draw(st.integers(0, 9)),
            maker=name,
            readers=readers_of[name],
            is_kept=draw(st.booleans()),
        )
        for name in names
    ]
    for _ in range(draw(st.integers(0, 6))):
        readers = draw(st.lists(st.sampled_from(names), max_size=3))
        tensors.append(KeptTensor(num_bytes=draw(st.integers(0, 9)), readers=tuple(readers)))
    return ops, tensors


def peak_bytes(ops, tensors):
    """Peak by intervals: from the maker's position to the last reader's, or that one's first wait."""
    position = {op.name: number for number, op in enumerate(ops)}
    live = [0] * len(ops)
    for tensor in tensors:
        users = [name for name in (tensor.maker, *tensor.readers) if name is not None]
        first = position[tensor.maker] if tensor.maker is not None else 0
        last = len(ops) - 1 if tensor.is_kept else -1
        for name in users:
            if ops[position[name]].kind == "compute":
                last = max(last, position[name])
            else:
                waits = [position[op.name] for op in ops if name in op.after]
                last = max(last, min(waits, default=len(ops) - 1))
        for number in range(first, last + 1):
            live[number] += tensor.num_bytes
    return max(live, default=0)


@given(programs_with_tensors(), st.integers(0, 12))
def test_memory_stays_within_the_slack(program, slack_bytes):
    ops, tensors = program
    plan = schedule(ops, tensors=tensors, slack_bytes=slack_bytes)
    ordered = check_order(ops, plan.order)
    assert peak_bytes(ordered, tensors) <= peak_bytes(ops, tensors) + slack_bytes
    assert plan.makespan_s <= plan.before_s


def test_slack_decides_how_much_is_hidden():
    # Each weight gradient keeps 10 bytes alive until it has run.
    ops = backward(6, exchange_s=2.0)
    weights = [op for op in ops if op.name.endswith("weight")]
    tensors = [KeptTensor(num_bytes=10, maker=op.after[0], readers=(op.name,)) for op in weights]
    hidden = []
    for slack_bytes in (0, 20, 40, 1000):
        plan = schedule(ops, tensors=tensors, slack_bytes=slack_bytes)
        ordered = check_order(ops, plan.order)
        assert peak_bytes(ordered, tensors) <= peak_bytes(ops, tensors) + slack_bytes
        hidden.append(plan.before_s - plan.makespan_s)
    assert hidden == sorted(hidden)
    assert hidden[0] < hidden[-1]
    assert plan.makespan_s == schedule(ops).makespan_s


def test_bad_memory_is_named():
    ops = [Op("a", "compute", 1.0)]
    with pytest.raises(ConfigError, match="slack_bytes: expected 0 or more, got -1"):
        schedule(ops, slack_bytes=-1)
    with pytest.raises(DataError, match="tensor 0: expected operations of the graph, got 'b'"):
        schedule(ops, tensors=[KeptTensor(num_bytes=1, readers=("b",))], slack_bytes=0)
    with pytest.raises(
        DataError, match="tensor of operation 'a': expected 0 bytes or more, got -1"
    ):
        KeptTensor(num_bytes=-1, maker="a")
