"""Which stages replay, against the definition tried out stage by stage."""

from hypothesis import given
from hypothesis import strategies as st

from swift.pipeline.holes import Hole, find_holes


@st.composite
def losses(draw):
    num = draw(st.integers(1, 8))
    lost = draw(st.sets(st.integers(0, num - 1), min_size=1))
    logged = draw(st.lists(st.booleans(), min_size=num - 1, max_size=num - 1))
    return num, lost, logged, draw(st.integers(0, 3))


@given(losses())
def test_replaying_stages_have_their_messages_from_a_log_or_from_each_other(case):
    num, lost, logged, num_helpers = case
    holes = find_holes(num, lost, logged, num_helpers)
    replaying = [stage for hole in holes for stage in hole.stages]
    assert replaying == sorted(set(replaying))
    assert lost <= set(replaying)
    outside = [stage for hole in holes for stage in (hole.first - 1, hole.last + 1)]
    senders = {stage for stage in outside if 0 <= stage < num}
    assert not senders & set(replaying)
    for hole in holes:
        assert hole.first == 0 or logged[hole.first - 1]
        assert hole.last == num - 1 or logged[hole.last]
    # No stage replays without need: without logs it hangs together with a lost one.
    for stage in replaying:
        assert any(not any(logged[min(stage, other) : max(stage, other)]) for other in lost)
    helpers = [stage for hole in holes for stage in hole.helpers]
    assert len(helpers) == len(set(helpers))
    assert not set(helpers) & (senders | set(replaying))
    for hole in holes:
        assert len(hole.helpers) <= num_helpers
        assert hole.first == hole.last or not hole.helpers


def test_holes_of_a_pipeline_of_six():
    every = [True] * 5
    assert find_holes(6, {2}, every) == [Hole(first=2, last=2)]
    assert find_holes(6, {2, 3}, every) == [Hole(first=2, last=3)]
    assert find_holes(6, {2, 4}, every) == [Hole(first=2, last=2), Hole(first=4, last=4)]
    assert find_holes(6, {2}) == find_holes(6, {2}, every)
    assert find_holes(6, {2}, [True, False, False, True, True]) == [Hole(first=1, last=3)]
    assert find_holes(6, {0}, every, 2) == [Hole(first=0, last=0, helpers=(2, 3))]
    shared = find_holes(8, {1, 6}, None, 2)
    assert [hole.helpers for hole in shared] == [(3,), (4,)]
    assert Hole(first=0, last=0, helpers=(2, 3)).replayers == (0, 2, 3)
