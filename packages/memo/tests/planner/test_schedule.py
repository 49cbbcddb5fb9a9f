"""Schedules: each moving layer is sent once, waited for in time, and fetched once, in buffers' turns."""

from hypothesis import given
from hypothesis import strategies as st

from memo.planner.layer_plan import LayerPlan
from memo.planner.schedule import CopyStep, schedule

KINDS = [
    LayerPlan(),
    LayerPlan(mode="whole"),
    LayerPlan(mode="restore", stored={"input": 1.0}),
    LayerPlan(mode="restore", resident=frozenset({"input"})),
    LayerPlan(mode="restore", default_fraction=0.5),
]
MOVING = [KINDS[1], KINDS[2], KINDS[4]]
LAYERS = st.lists(st.sampled_from(KINDS), min_size=1, max_size=12)


@given(LAYERS, st.integers(1, 4), st.integers(1, 4))
def test_one_step_is_possible_and_within_its_limits(layers, max_sending, num_buffers):
    """Carried out move by move, by a machine that copies as late as it may."""
    moves = schedule(layers, max_sending=max_sending, num_buffers=num_buffers)
    moving = {number for number, layer in enumerate(layers) if layer in MOVING}
    sending, sent, fetched = [], set(), set()

    def do(these):
        for move in these:
            assert move.layer in moving
            if move.action == "send":
                assert move.layer not in sent
                sending.append(move.layer)
                sent.add(move.layer)
            elif move.action == "await_sent":
                assert move.layer in sent
                sending[:] = [one for one in sending if one > move.layer]
            else:
                assert move.action == "fetch"
                assert move.layer in sent
                assert move.layer not in fetched
                fetched.add(move.layer)
                held.add(move.layer)
                assert len(held) <= num_buffers

    held = set()
    for number in range(len(layers)):
        do(moves.before_forward[number])
        if number in moving:
            assert len(sending) < max_sending, "one more is about to go"
        do(moves.after_forward[number])
        assert len(sending) <= max_sending
    assert sent == moving
    for number in reversed(range(len(layers))):
        held = {one for one in held if one <= number}  # later layers gave their buffers back
        for move in moves.before_backward[number]:
            assert move.action == "fetch"
            assert move.layer <= number
            assert move.layer not in fetched
            fetched.add(move.layer)
            held.add(move.layer)
        assert number in fetched or number not in moving
        assert len(held) <= num_buffers
        ahead = sorted(one for one in moving if one <= number)[-num_buffers:]
        assert number not in moving or set(ahead) <= fetched, (
            "as many are on their way as there are buffers"
        )
    assert fetched == moving


def test_a_schedule_of_five_layers():
    moves = schedule([KINDS[2]] * 5, max_sending=2, num_buffers=2)
    assert moves.before_forward[2] == (CopyStep("await_sent", 0),)
    assert moves.after_forward[0] == (CopyStep("send", 0),)
    assert moves.after_forward[4] == (
        CopyStep("send", 4),
        CopyStep("fetch", 4),
        CopyStep("fetch", 3),
    )
    assert moves.before_backward == (
        (), (CopyStep("fetch", 0),), (CopyStep("fetch", 1),), (CopyStep("fetch", 2),), (),
    )  # fmt: skip


def test_nothing_moves_where_nothing_is_stored():
    moves = schedule([KINDS[0], KINDS[3]])
    assert not any(map(any, (moves.before_forward, moves.after_forward, moves.before_backward)))
