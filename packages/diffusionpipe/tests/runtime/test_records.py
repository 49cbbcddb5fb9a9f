"""Reports: seconds of a step over ranks and steps."""

from diffusionpipe.runtime.records import RunReport, StepTimes


def make_report(*ranks):
    steps = tuple(
        tuple(StepTimes(step, 0.0, seconds) for step, seconds in enumerate(own)) for own in ranks
    )
    return RunReport(steps=steps, edges={}, predicted_s=1.0, predicted_edges={})


def test_a_step_ends_with_its_slowest_rank_and_the_first_one_warms_up():
    assert make_report([9.0, 1.0, 2.0, 3.0], [9.0, 4.0, 1.0, 1.0]).step_s == 3.0
    assert make_report([9.0], [8.0]).step_s == 9.0
