"""Replays of schedules whose times are known in closed form."""

import itertools

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from shared.topology import Operation, Replay

STAGES, MICRO_BATCHES = st.integers(1, 6), st.integers(1, 12)


def five_stages(times, staleness: int, iterations: int) -> list[Operation]:
    """MSPipe's iteration (arXiv 2402.15113): sample, features, memory, train, write back.

    Fetching features and memory shares a link; memory is fetched as of `staleness` writes ago.
    """
    queues = ("sampler", "link", "link", "compute", "write")
    operations = []
    for i in range(iterations):
        for stage, queue in enumerate(queues):
            after = [(stage - 1, i)] if stage else []
            if stage == 2 and i >= staleness:
                after.append((4, i - staleness))
            operations.append(Operation((stage, i), queue, times[stage], after=after))
    return operations


@given(st.lists(st.floats(0, 10), min_size=5, max_size=5), st.integers(1, 5))
def test_five_stage_recurrences(times, staleness):
    iterations = 40
    begin, end = np.zeros((2, iterations + 1, 5))  # a row of zeros before the first iteration
    for i in range(1, iterations + 1):
        written = end[max(i - staleness, 0), 4]
        before = end[i - 1]
        for stage in range(5):
            also = (before[0], before[2], written, before[3], before[4])[stage]
            begin[i, stage] = max(end[i, stage - 1] if stage else 0.0, also)
            end[i, stage] = begin[i, stage] + times[stage]
    timeline = Replay(five_stages(times, staleness, iterations)).run()
    np.testing.assert_array_equal(timeline.start_s.reshape(-1, 5), begin[1:])


@given(st.lists(st.floats(0, 10), min_size=5, max_size=5), st.sampled_from([1, 2, 3, 4, 6]))
def test_period_of_five_stages(times, staleness):
    # The longest loop decides from the first iterations on; twelve hold whole turns of each.
    ends = Replay(five_stages(times, staleness, 48)).run().end_s.reshape(-1, 5)[:, 4]
    bound = max(times[0], times[1] + times[2], times[3], times[4])
    period = max(bound, sum(times[2:]) / staleness)
    assert (ends[-1] - ends[-13]) / 12 == pytest.approx(period, rel=1e-9, abs=1e-9)


def pipeline(num_stages, num_micro_batches, forward_s, backward_s, warm_up) -> list[Operation]:
    """Stages that run `warm_up(stage)` forwards, then a backward and a forward in turn."""
    operations = []
    for stage, m in itertools.product(range(num_stages), range(num_micro_batches)):
        queue = f"stage {stage}"
        ahead = [("F", stage - 1, m)] if stage else []
        behind = [("B", stage + 1, m)] if stage + 1 < num_stages else []
        depth = min(warm_up(stage), num_micro_batches)
        # Places on the stage: forwards of the warm-up, then by turns, then backwards.
        at = m if m < depth else 2 * m - depth + 1
        back = depth + 2 * m if m + depth < num_micro_batches else num_micro_batches + m
        operations.append((stage, at, Operation(("F", stage, m), queue, forward_s, ahead)))
        behind = behind or [("F", stage, m)]
        operations.append((stage, back, Operation(("B", stage, m), queue, backward_s, behind)))
    return [operation for *_, operation in sorted(operations)]


@given(STAGES, MICRO_BATCHES, st.floats(0.1, 10), st.floats(0.1, 10), st.booleans())
def test_bubbles_of_gpipe_and_1f1b(num_stages, num_micro_batches, forward_s, backward_s, is_1f1b):
    """Both leave (p - 1) / (m + p - 1) of the time idle (GPipe, arXiv 1811.06965, and PipeDream-
    Flush, arXiv 2006.09503); they differ in how many activations they keep."""

    def warm_up(stage):
        return num_stages - stage if is_1f1b else num_micro_batches

    plan = pipeline(num_stages, num_micro_batches, forward_s, backward_s, warm_up)
    timeline = Replay(plan).run()
    slots = num_micro_batches + num_stages - 1
    assert timeline.makespan_s == pytest.approx(slots * (forward_s + backward_s))
    for stage in range(num_stages):
        use = timeline.queues[f"stage {stage}"]
        assert use.idle_share == pytest.approx((num_stages - 1) / slots, abs=1e-12)
        # A stage is left alone at both ends only while the pipeline fills and empties.
        assert use.first_s == pytest.approx(stage * forward_s)


@given(st.lists(st.integers(1, 20), min_size=1, max_size=5), st.integers(1, 5))
def test_period_of_a_ring(stage_s, in_flight):
    """Tokens of `in_flight` micro-batches go around: token t + 1 enters after token t has left."""
    tokens, micro_batches = 60, range(in_flight)
    operations = [
        Operation(
            (token, m, stage),
            f"stage {stage}",
            float(time_s),
            after=[(token, m, stage - 1)] if stage else [(token - 1, m, len(stage_s) - 1)][:token],
        )
        for token, m in itertools.product(range(tokens), micro_batches)
        for stage, time_s in enumerate(stage_s)
    ]
    ends = Replay(operations).run().end_s.reshape(tokens, in_flight, -1)[:, -1, -1]
    period = max(in_flight * max(stage_s), sum(stage_s))
    assert ends[-1] - ends[-2] == period


@given(st.data(), st.integers(1, 4), st.integers(1, 6))
def test_collectives_start_with_the_last_rank(data, num_ranks, num_buckets):
    """Gradient buckets of data parallelism: all ranks enter each all-reduce, in one order."""
    seconds = st.lists(st.integers(0, 9), min_size=num_buckets, max_size=num_buckets)
    compute_s = data.draw(st.lists(seconds, min_size=num_ranks, max_size=num_ranks))
    reduce_s = data.draw(seconds)
    lanes = tuple(f"rank {rank} network" for rank in range(num_ranks))
    operations, expected, free_s = [], [], 0.0
    for bucket in range(num_buckets):
        for rank in range(num_ranks):
            took = float(compute_s[rank][bucket])
            operations.append(Operation(("grad", rank, bucket), f"rank {rank}", took))
        ready = max(sum(rank_s[: bucket + 1]) for rank_s in compute_s)
        expected.append(max(ready, free_s))
        free_s = expected[-1] + reduce_s[bucket]
        waits = [("grad", rank, bucket) for rank in range(num_ranks)]
        operations.append(Operation(bucket, lanes, float(reduce_s[bucket]), after=waits))
    for order in ("given", "readiness", "priority"):
        queues = {operation.queue: "given" for operation in operations if operation.queue != lanes}
        timeline = Replay(operations, queues | dict.fromkeys(lanes, order)).run()
        assert [timeline.span_s(bucket)[0] for bucket in range(num_buckets)] == expected
