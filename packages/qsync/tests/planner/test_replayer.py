import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from planner_graphs import chain

from qsync import bucket_ends
from qsync.planner.replayer import GradientBuckets, RankSeconds, StepReplay
from shared.errors import DataError

SECONDS = st.floats(0, 10)


def test_bucket_waits_for_the_last_rank_and_for_the_bucket_before():
    # Bucket 0 starts at 3 (rank 1) and ends at 5; bucket 1 was ready at 4; bucket 2 starts at 9.
    assert bucket_ends([[1.0, 4.0, 9.0], [3.0, 3.5, 6.0]], [2.0, 1.0, 0.5]) == [5.0, 6.0, 9.5]
    assert bucket_ends([[1.0, 2.0]], 3.0) == [4.0, 7.0]
    assert bucket_ends([[], []], []) == []


@given(
    ready=st.integers(1, 4).flatmap(
        lambda buckets: st.lists(
            st.lists(SECONDS, min_size=buckets, max_size=buckets), min_size=1, max_size=4
        )
    ),
    data=st.data(),
)
def test_bucket_ends_are_the_longest_path(ready, data):
    buckets = len(ready[0])
    transfer = data.draw(st.lists(SECONDS, min_size=buckets, max_size=buckets))
    # A bucket ends after some rank was ready for bucket j <= k and all transfers from j to k.
    expected = [
        max(max(row[j] for row in ready) + sum(transfer[j : k + 1]) for j in range(k + 1))
        for k in range(buckets)
    ]
    assert bucket_ends(ready, transfer) == pytest.approx(expected)


@pytest.mark.parametrize(
    ("ready", "transfer", "message"),
    [
        ([[1.0], [1.0, 2.0]], [1.0], r"equally many buckets .* got \[1, 2\]"),
        ([], [], "one rank or more"),
        ([[1.0, 2.0]], [1.0], "expected 2 transfer times"),
        ([[float("nan")]], [1.0], "expected finite times of 0 s or more, got nan"),
        ([[1.0]], [-1.0], "got -1.0 s"),
    ],
)
def test_unlike_or_invalid_buckets_are_refused(ready, transfer, message):
    with pytest.raises(DataError, match=message):
        bucket_ends(ready, transfer)


def test_step_of_two_ranks_by_hand():
    replay = StepReplay(chain(2), GradientBuckets(ops=[["fc1"], ["fc0"]], transfer_s=[2.0, 1.0]), 2)
    fast = RankSeconds(forward_s=[1.0, 1.0], backward_s=[2.0, 2.0], rest_s=0.5)
    slow = RankSeconds(forward_s=[2.0, 2.0], backward_s=[3.0, 3.0], rest_s=0.0)
    step = replay.run([fast, slow])
    # The slow rank fills its buckets at 7 and 10: all-reduces end at 9 and 11.
    assert step.timeline.span_s(("all-reduce", 0)) == (7.0, 9.0)
    assert step.step_s == 11.0
    assert step.idle_s == (11.0 - 6.5, 1.0)
    names = [each.name for each in step.timeline.critical_path]
    assert names[0] == ("rest", 1)
    assert names[-2:] == [("backward", "fc0", 1), ("all-reduce", 1)]


@given(data=st.data(), num_ops=st.integers(1, 5), num_ranks=st.integers(1, 3))
def test_fast_form_equals_the_replay_to_the_bit(data, num_ops, num_ranks):
    cut = data.draw(st.integers(0, num_ops))
    names = [f"fc{i}" for i in reversed(range(num_ops))]
    ops = [part for part in (names[:cut], names[cut:]) if part]
    replay = StepReplay(
        chain(num_ops), GradientBuckets(ops=ops, transfer_s=[0.7] * len(ops)), num_ranks
    )
    times = st.lists(SECONDS, min_size=num_ops, max_size=num_ops)
    ranks = [
        RankSeconds(
            forward_s=data.draw(times), backward_s=data.draw(times), rest_s=data.draw(SECONDS)
        )
        for _ in range(num_ranks)
    ]
    step = replay.run(ranks)
    ready = [replay.ready_s(rank) for rank in ranks]
    assert replay.step_s(ready) == step.step_s
    assert [float(each[-1]) for each in ready] == [rank.compute_s for rank in ranks]
    for k, end in enumerate(bucket_ends([each[:-1] for each in ready], replay.buckets.transfer_s)):
        assert step.timeline.span_s(("all-reduce", k))[1] == end


def test_one_rank_computes_without_waiting():
    replay = StepReplay(chain(3), GradientBuckets())
    rank = RankSeconds(forward_s=[1.0, 2.0, 3.0], backward_s=[1.0, 1.0, 1.0], rest_s=0.5)
    step = replay.run([rank])
    assert (step.step_s, step.idle_s) == (9.5, (0.0,))


def test_bucket_is_filled_by_the_operator_that_runs_first_forward():
    """Gradients come in reverse order: the bucket of fc0 and fc2 waits for fc0's."""
    replay = StepReplay(
        chain(3), GradientBuckets(ops=[["fc1"], ["fc2", "fc0"]], transfer_s=[1.0, 1.0])
    )
    rank = RankSeconds(forward_s=[1.0, 1.0, 1.0], backward_s=[8.0, 4.0, 2.0])
    assert replay.ready_s(rank).tolist() == [9.0, 17.0, 17.0]
    step = replay.run([rank])
    assert step.timeline.span_s(("all-reduce", 0)) == (9.0, 10.0)
    assert step.timeline.span_s(("all-reduce", 1)) == (17.0, 18.0)


def test_all_reduces_overlap_with_computing():
    """A transfer shorter than the rest of the backward pass adds nothing but the last bucket's."""
    replay = StepReplay(chain(2), GradientBuckets(ops=[["fc1"], ["fc0"]], transfer_s=[2.9, 0.25]))
    rank = RankSeconds(forward_s=[1.0, 1.0], backward_s=[3.0, 3.0])
    assert replay.run([rank]).step_s == 8.25


def test_replay_is_built_for_its_ranks_and_operators():
    rank = RankSeconds(forward_s=[1.0], backward_s=[1.0])
    replay = StepReplay(chain(1), GradientBuckets(), 2)
    with pytest.raises(DataError, match="expected seconds of 2 ranks, got 1"):
        replay.run([rank])
    with pytest.raises(DataError, match="one duration for each"):
        replay.run([rank, RankSeconds(forward_s=np.ones(2), backward_s=np.ones(2))])
    with pytest.raises(DataError, match="got 'fc7'"):
        StepReplay(chain(1), GradientBuckets(ops=[["fc7"]], transfer_s=[1.0]))
    with pytest.raises(DataError, match="got 1 buckets and 0 times"):
        GradientBuckets(ops=[["fc0"]], transfer_s=[])
