"""Reports: seconds of a step over ranks and steps."""

from diffusionpipe.report import list_measured_bars
from diffusionpipe.runtime.records import ActionTime, RunReport, StepTimes


def make_report(*ranks):
    steps = tuple(
        tuple(StepTimes(step, 0.0, seconds) for step, seconds in enumerate(own)) for own in ranks
    )
    return RunReport(steps=steps, edges={}, predicted_s=1.0, predicted_edges={})


def test_a_step_ends_with_its_slowest_rank_and_the_first_one_warms_up():
    assert make_report([9.0, 1.0, 2.0, 3.0], [9.0, 4.0, 1.0, 1.0]).step_s == 3.0
    assert make_report([9.0], [8.0]).step_s == 9.0


def test_steps_of_two_hosts_are_drawn_on_one_clock():
    """Each host counts seconds from its own start; the update begins on both when they have agreed."""
    steps = []
    for zero_s, begin_s in ((0.0, 0.0), (5000.0, 0.25)):
        times = [("forward", begin_s, 1.0), ("wait", 1.0, 3.0), ("update", 3.0, 3.5)]
        actions = [ActionTime(kind, 0, 1, "", zero_s + a, zero_s + b) for kind, a, b in times]
        steps.append((StepTimes(0, zero_s + begin_s, actions=actions),))
    report = RunReport(steps=tuple(steps), edges={}, predicted_s=1.0, predicted_edges={})
    first, second = list_measured_bars(report)
    assert first == [("forward", 0.0, 1.0, "0 1"), ("step", 3.0, 3.5, "0 1")]
    assert second == [("forward", 0.25, 1.0, "0 1"), ("step", 3.0, 3.5, "0 1")]
