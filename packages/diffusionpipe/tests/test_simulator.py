"""Simulated steps against the closed forms of equal stages, and against properties of any stages."""

import itertools

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from diffusionpipe import simulate, simulate_bidirectional
from shared.errors import ConfigError


def equal_stages(stages):
    """Forward and backward seconds of stages whose period is 1."""
    return [1 / 3] * stages, [2 / 3] * stages


@pytest.mark.parametrize("stages", [1, 2, 4, 8])
@pytest.mark.parametrize("micro_batches", [1, 2, 4, 8, 16])
def test_unfilled_step_is_the_closed_form(stages, micro_batches):
    step = simulate(*equal_stages(stages), micro_batches)
    assert step.makespan_s == pytest.approx(micro_batches + stages - 1)
    bubbles = (stages - 1) / (micro_batches + stages - 1)
    assert step.bubble_share == pytest.approx(bubbles, abs=1e-12)
    assert step.busy_s == pytest.approx([micro_batches] * stages)
    assert step.in_flight == [min(stages - s, micro_batches) for s in range(stages)]


@pytest.mark.parametrize("stages", [2, 4, 8])
@pytest.mark.parametrize("micro_batches", [2, 4, 8])
@pytest.mark.parametrize("ratio", [0.1, 0.4, 0.45, 0.85])
def test_filled_step_is_the_limit(stages, micro_batches, ratio):
    # Section 1 of the design: first (M + S - 1 + rho M) t, filled max(M + S - 1, (1 + rho) M) t.
    frozen_s = ratio * micro_batches * stages
    seconds = equal_stages(stages)
    first = simulate(*seconds, micro_batches, frozen_s=frozen_s, fill="first")
    assert first.makespan_s == pytest.approx(micro_batches + stages - 1 + ratio * micro_batches)
    limit = max(micro_batches + stages - 1, (1 + ratio) * micro_batches)
    filled = simulate(*seconds, micro_batches, frozen_s=frozen_s)
    assert filled.makespan_s == pytest.approx(limit)
    assert sum(filled.busy_s) == pytest.approx(stages * micro_batches + frozen_s)


@pytest.mark.parametrize(("ratio", "micro_batches", "gain"), [(0.45, 2, 1.30), (0.45, 4, 1.17)])
def test_gain_of_two_stages_is_that_of_the_issue(ratio, micro_batches, gain):
    seconds = equal_stages(2)
    frozen_s = ratio * micro_batches * 2
    first = simulate(*seconds, micro_batches, frozen_s=frozen_s, fill="first")
    filled = simulate(*seconds, micro_batches, frozen_s=frozen_s)
    assert first.makespan_s / filled.makespan_s == pytest.approx(gain, abs=0.01)


@pytest.mark.unchecked
@given(st.integers(2, 8), st.integers(1, 12), st.floats(0.05, 1.5))
def test_small_jobs_reach_the_limit_within_two_percent(stages, micro_batches, ratio):
    frozen_s = ratio * micro_batches * stages
    limit = max(micro_batches + stages - 1, (1 + ratio) * micro_batches)
    filled = simulate(*equal_stages(stages), micro_batches, frozen_s=frozen_s, job_s=1 / 60)
    assert filled.makespan_s <= 1.02 * limit
    assert sum(filled.busy_s) == pytest.approx(stages * micro_batches + frozen_s)


def test_frozen_seconds_that_are_next_to_nothing():
    assert simulate([1], [1], 1, frozen_s=5e-324).makespan_s == 2


def test_two_stages_by_hand():
    # Stage 1 waits 1 s for its first input; stage 0 waits 1 s between its forward passes and the
    # first gradient. F = 1, B = 2 on both:
    # device 0: F0 F1 . B0B0 . B1B1   device 1: . F0 B0B0 F1 B1B1 .. : idle 0-1 and 7-9.
    step = simulate([1, 1], [2, 2], 2)
    assert step.makespan_s == 9
    assert step.timeline.span_s(("backward", 0, 0)) == (4, 6)
    assert step.timeline.gaps_s("device 0").tolist() == [[2, 4], [6, 7]]
    assert step.timeline.gaps_s("device 1").tolist() == [[0, 1], [7, 9]]
    # Three jobs of 1 s fit into each device's idle time, in front of the passes that wait.
    filled = simulate([1, 1], [2, 2], 2, frozen_s=6, job_s=1)
    assert filled.makespan_s == 9
    assert filled.bubble_share == pytest.approx(0)
    # A job of 1.5 s does not fit into the gap of 1 s of device 1, but twice into the 3 s of device 0,
    # whose first backward pass can wait; the last job fits behind device 1's passes.
    larger = simulate([1, 1], [2, 2], 2, frozen_s=4.5, job_s=1.5)
    assert larger.makespan_s == 9
    first = simulate([1, 1], [2, 2], 2, frozen_s=6, job_s=1, fill="first")
    assert first.makespan_s == 12


def test_messages_delay_and_queue():
    # One micro-batch over two stages: two messages on its path.
    assert simulate([1, 1], [2, 2], 1, link_s=0.5).makespan_s == 7
    # The link is slower than the stages: messages leave one after another.
    slow = simulate([1, 1], [1, 1], 3, link_s=4)
    sends = [slow.timeline.span_s(("send", "forward", 0, m)) for m in range(3)]
    assert sends[0] == (1, 5)
    assert all(later[0] >= earlier[1] for earlier, later in itertools.pairwise(sends))


def test_published_form_needs_a_bubble_for_each_job():
    # Both devices' gaps overlap nowhere: no bubble of 2 s is as long as a job of 2.5 s.
    seconds = equal_stages(4)
    for job_s in (0.0, 1 / 60, 1 / 4):
        paper = simulate(*seconds, 4, frozen_s=8, job_s=job_s, fill="paper")
        owned = simulate(*seconds, 4, frozen_s=8, job_s=job_s)
        first = simulate(*seconds, 4, frozen_s=8, job_s=job_s, fill="first")
        assert sum(paper.busy_s) == pytest.approx(4 * 4 + 8)
        assert owned.makespan_s <= paper.makespan_s + 1e-9 <= first.makespan_s + 2e-9
    # Work that is divisible at will fills every bubble.
    fluid = simulate(*seconds, 4, frozen_s=8, fill="paper")
    assert fluid.makespan_s == pytest.approx(7)


durations = st.floats(0.05, 3).map(lambda value: round(value, 3))


@pytest.mark.unchecked
@settings(max_examples=50)
@given(
    st.integers(1, 6), st.integers(1, 8), st.sampled_from(["first", "owned", "paper"]), st.data()
)
def test_any_step_is_consistent(stages, micro_batches, fill, data):
    passes = st.lists(durations, min_size=stages, max_size=stages)
    forward, backward = data.draw(passes), data.draw(passes)
    frozen_s, job_s = data.draw(st.floats(0, 20)), data.draw(st.sampled_from([0.0, 0.1, 0.7]))
    link_s = data.draw(st.sampled_from([0.0, 0.3]))
    options = {"link_s": link_s, "frozen_s": frozen_s, "job_s": job_s}
    step = simulate(forward, backward, micro_batches, **options, fill=fill)
    work = micro_batches * (sum(forward) + sum(backward)) + frozen_s
    assert sum(step.busy_s) == pytest.approx(work)
    assert step.makespan_s >= work / stages - 1e-9
    spans = {
        operation.name: step.timeline.span_s(operation.name)
        for operation in step.timeline.graph.operations
    }
    for device in range(stages):
        own = sorted(
            spans[operation.name]
            for operation in step.timeline.graph.operations
            if operation.queue == f"device {device}"
        )
        assert all(a[1] <= b[0] + 1e-9 for a, b in itertools.pairwise(own))
    for m in range(micro_batches):
        for stage in range(1, stages):
            before, after = spans["forward", stage - 1, m], spans["forward", stage, m]
            assert before[1] + link_s <= after[0] + 1e-9
            before, after = spans["backward", stage, m], spans["backward", stage - 1, m]
            assert before[1] + link_s <= after[0] + 1e-9
        assert spans["forward", stages - 1, m][1] <= spans["backward", stages - 1, m][0] + 1e-9
    if fill == "owned":
        # Idle time is used without delay: never later than all frozen work at the end.
        unfilled = simulate(forward, backward, micro_batches, link_s=link_s)
        assert step.makespan_s >= unfilled.makespan_s - 1e-9
        assert step.makespan_s <= unfilled.makespan_s + frozen_s / stages + 2 * job_s + 1e-9


def test_one_device_of_two_opposite_chains_is_always_busy():
    step = simulate_bidirectional(([1.0], [2.0]), ([2.0], [4.0]), 3)
    assert step.makespan_s == pytest.approx(27)
    assert step.in_flight == [1, 1]


@pytest.mark.parametrize("stages", [2, 4])
@pytest.mark.parametrize("micro_batches", [1, 2, 4, 8])
def test_opposite_chains_fill_each_others_bubbles(stages, micro_batches):
    chain = equal_stages(stages)
    both = simulate_bidirectional(chain, chain, micro_batches)
    assert sum(both.busy_s) == pytest.approx(2 * micro_batches * stages)
    one = simulate(*chain, micro_batches)
    # Hardly longer than the work or one chain alone, and never shorter.
    least_s = max(2 * micro_batches, one.makespan_s)
    assert least_s - 1e-9 <= both.makespan_s <= 1.17 * least_s


@pytest.mark.unchecked
@given(st.integers(1, 5), st.integers(1, 6), st.data())
def test_opposite_chains_share_devices_without_overlap(stages, micro_batches, data):
    passes = st.lists(durations, min_size=stages, max_size=stages)
    down, up = [(data.draw(passes), data.draw(passes)) for _ in range(2)]
    step = simulate_bidirectional(down, up, micro_batches)
    total = micro_batches * sum(sum(each) for each in (*down, *up))
    assert sum(step.busy_s) == pytest.approx(total)
    for device in range(stages):
        own = sorted(
            step.timeline.span_s(operation.name)
            for operation in step.timeline.graph.operations
            if operation.queue == f"device {device}"
        )
        assert len(own) == 4 * micro_batches
        assert all(a[1] <= b[0] + 1e-9 for a, b in itertools.pairwise(own))
        busy = down[0][device] + down[1][device]
        busy += up[0][stages - 1 - device] + up[1][stages - 1 - device]
        assert step.busy_s[device] == pytest.approx(micro_batches * busy)


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        (([1.0], [1.0, 2.0], 2), "of the same stages and micro-batches, got 1, 2 and 2"),
        (([], [], 2), "got 0, 0 and 2"),
        (([1.0], [1.0], 0), "got 1, 1 and 0"),
        (([-1.0], [1.0], 1), "forward_s, backward_s: expected finite seconds of 0 or more"),
    ],
)
def test_bad_steps_are_refused(arguments, text):
    with pytest.raises(ConfigError, match=text):
        simulate(*arguments)


def test_an_unknown_fill_is_refused():
    with pytest.raises(ConfigError, match="fill: expected one of first, owned, paper, got 'last'"):
        simulate([1.0], [1.0], 1, fill="last")
    with pytest.raises(ConfigError, match="expected a pair"):
        simulate_bidirectional(([1.0], [1.0]), ([1.0, 2.0], [1.0, 2.0]), 1)
