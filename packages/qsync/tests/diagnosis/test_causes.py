import numpy as np
import pytest
from planted_traces import PlantedJob, PlantedRun

from qsync.diagnosis.causes import find_rank_cause
from qsync.diagnosis.clocks import fit_clocks
from qsync.diagnosis.diagnose import diagnose
from qsync.diagnosis.job_graph import LanePiece
from qsync.diagnosis.traces.events import LOADER, collect_fields


def lane(seconds, **more):
    """One step of operators by name, each behind a gap if it has one in `more`."""
    return [
        LanePiece(0, name, 0.0, more.get(name, 0.0), busy_s) for name, busy_s in seconds.items()
    ]


FAST = {LOADER: 0.0, "mm": 0.04, "gelu": 0.02, "add": 0.02}


def name_cause(mine, others=FAST):
    cause = find_rank_cause([lane(others), lane(mine)], 1, 0.05, 1)
    return cause.kind, cause.operator


def test_a_rank_is_slow_whose_products_lag_behind_only_somewhat_more():
    slow = {LOADER: 0.0, "mm": 0.10, "gelu": 0.034, "add": 0.034}
    assert name_cause(slow) == ("slow rank", None)
    # A throttled core takes most of the longest operator, and all else takes twice as long.
    throttled = {LOADER: 0.0, "mm": 0.25, "gelu": 0.04, "add": 0.04}
    assert name_cause(throttled) == ("slow rank", None)


def test_an_operator_is_slow_that_lags_behind_far_more():
    assert name_cause(FAST | {"gelu": 0.08, "mm": 0.045}) == ("slow operator", "gelu")
    # Other operators are faster by chance and slower by chance.
    assert name_cause(FAST | {"gelu": 0.05, "mm": 0.055, "add": 0.005}) == ("slow operator", "gelu")


def test_an_operator_that_lags_in_few_steps_only_is_not_the_cause():
    def steps(gelu_s):
        return [
            piece._replace(step=step)
            for step, seconds in enumerate(gelu_s)
            for piece in lane(FAST | {"gelu": seconds})
        ]

    others = steps([0.02] * 8)
    for gelu_s, kind in (([0.04] * 8, "slow operator"), ([0.02] * 6 + [0.1] * 2, "slow rank")):
        assert find_rank_cause([others, steps(gelu_s)], 1, 0.02, 8).kind == kind


def test_a_loader_is_late_on_a_rank_that_is_also_somewhat_slower():
    late = {LOADER: 0.2, "mm": 0.065, "gelu": 0.032, "add": 0.032}
    assert name_cause(late, FAST | {LOADER: 0.002}) == ("late loader", None)


def test_a_rank_as_fast_as_the_others_is_late_in_single_steps_only():
    cause = find_rank_cause([lane(FAST), lane(FAST)], 1, 0.05, 1)
    assert cause.text == "rank 1 is late in single steps, and as fast as the others over all"


def test_waking_up_behind_a_collective_is_nobodys_slowness():
    mine = lane(FAST, add=0.05)
    asleep = [piece._replace(behind=(0,)) if piece.name == "add" else piece for piece in mine]
    assert find_rank_cause([lane(FAST), mine], 1, 0.05, 1).operator == "add"
    assert "as fast as the others" in find_rank_cause([lane(FAST), asleep], 1, 0.05, 1).text


def test_the_links_cost_what_a_step_gains_without_them(tmp_path):
    job = {"rate_bytes_per_s": 20e6, "rank_factor": {1: 1.5}}
    run = PlantedRun(PlantedJob(**job))
    diagnosis = diagnose(run.write(tmp_path))
    cost_s = run.step_s - PlantedRun(PlantedJob(**job | {"rate_bytes_per_s": 1e15})).step_s
    (link,) = [cause for cause in diagnosis.causes if cause.kind == "slow link"]
    assert link.seconds == pytest.approx(cost_s, rel=0.05)


@pytest.mark.parametrize(("shares", "limit_s"), [((0.2, 0.7), 2e-4), ((0.05, 0.95), 5e-4)])
def test_ends_that_busy_threads_note_late_do_not_move_a_clock(shares, limit_s):
    errors, medians = [], []
    for seed in range(20):
        random = np.random.default_rng(seed)
        ends = np.sort(random.uniform(0, 1, 40))
        # Rank 1 is throttled: most of its ends are noted late, and some of rank 0's.
        late = [
            random.exponential(1e-2, 40) * (random.random(40) < share) + random.normal(0, 1e-4, 40)
            for share in shares
        ]
        mine, other = ends + late[0], ends + late[1] + 0.5
        errors.append(abs(fit_clocks([mine, other], 0.0)[1].offset_s - 0.5))
        medians.append(abs(np.median(other - mine) - 0.5))
    assert np.median(errors) < limit_s
    assert np.median(medians) > 1e-3


def test_operators_of_two_threads_count_once():
    spans = {"a": (0, 2), "b": (1, 3), "inner": (1.2, 1.8)}
    events = [
        {"ph": "X", "cat": "cpu_op", "name": name, "ts": a * 1e6, "dur": (b - a) * 1e6}
        for name, (a, b) in spans.items()
    ]
    lane = collect_fields(events, 0.0)["lane"]
    assert [(s.name, s.start_s, s.end_s) for s in lane] == [("a", 0, 2), ("b", 2, 3)]
