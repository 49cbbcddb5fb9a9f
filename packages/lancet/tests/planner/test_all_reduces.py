"""Where all-reduces are listed: nothing is delayed, and all collectives keep their orders by kind."""

from hypothesis import given
from lancet_programs import programs, replay_s

from lancet.graph.operations import Op, OpGraph
from lancet.planner.all_reduces import fit_all_reduces, list_all_reduces_last
from lancet.planner.plan import make_plan
from lancet.simulator import simulate

# The gradient of a dense weight may be computed beside the first exchange, and its sum beside "dx".
PROGRAM = [
    Op("dw", "compute", 1.0),
    Op("sum", "all_reduce", 2.0, ("dw",)),
    Op("mean", "compute", 0.0, ("sum",)),
    Op("combine", "compute", 1.0),
    Op("rows", "all_to_all", 1.0, ("combine",)),
    Op("dx", "compute", 3.0, ("rows",)),
    Op("results", "all_to_all", 1.0, ("dx",)),
    Op("end", "compute", 1.0, ("results",)),
]


def names_of(ops, kind):
    return [op.name for op in ops if op.kind == kind]


@given(programs())
def test_collectives_keep_their_order_by_kind(ops):
    for listing in (list_all_reduces_last(ops), fit_all_reduces(list_all_reduces_last(ops))):
        OpGraph(listing)  # refuses an operation that is listed before what it follows
        assert sorted(op.name for op in listing) == sorted(op.name for op in ops)
        for kind in ("all_to_all", "all_reduce"):
            assert names_of(listing, kind) == names_of(ops, kind)


def ends_by_name(ops):
    replay = simulate(ops)
    return dict(zip((op.name for op in ops), replay.timeline.end_s, strict=True))


@given(programs())
def test_what_fits_delays_nothing(ops):
    listing = list_all_reduces_last(ops)
    fitted = fit_all_reduces(listing)
    assert replay_s(fitted) <= replay_s(listing)
    before, after = ends_by_name(listing), ends_by_name(fitted)
    late = set()
    for op in listing:
        if op.kind == "all_reduce" or late.intersection(op.after):
            late.add(op.name)
        else:
            assert after[op.name] <= before[op.name]


def test_listings_by_hand():
    last = list_all_reduces_last(PROGRAM)
    assert [op.name for op in last] == [
        "dw", "combine", "rows", "dx", "results", "end", "sum", "mean",
    ]  # fmt: skip
    by_name = {op.name: op for op in PROGRAM}
    moved = [by_name[n] for n in ("combine", "rows", "dw", "dx", "results", "end", "sum", "mean")]
    assert [op.name for op in fit_all_reduces(moved)] == [
        "combine", "rows", "dw", "sum", "dx", "results", "end", "mean",
    ]  # fmt: skip


def test_a_plan_puts_sums_between_exchanges():
    plan = make_plan("backward 1", "digest", "torch", PROGRAM, [], None)
    # Captured, "mean" waits for its sum; planned, only "results" is waited for: 6 s are computed.
    assert (plan.before_s, plan.makespan_s) == (10.0, 7.0)
    assert names_of(plan.ordered_ops, "all_reduce") == ["sum"]
    order = list(plan.order)
    assert order.index("rows") < order.index("sum") < order.index("results")


def test_sums_that_an_exchange_waits_for_keep_their_turns():
    ops = [
        Op("first", "all_reduce", 1.0),
        Op("second", "all_reduce", 1.0),
        Op("rows", "all_to_all", 1.0, ("second",)),
        Op("third", "all_reduce", 1.0),
        Op("results", "all_to_all", 1.0),
    ]
    listed = [op.name for op in list_all_reduces_last(ops)]
    assert listed == ["first", "second", "rows", "results", "third"]
