import pytest
from hypothesis import given
from hypothesis import strategies as st
from planted_traces import PlantedJob, PlantedRun

from qsync.diagnosis.buckets import is_backward, rebucket
from qsync.diagnosis.collectives import MatchedCollective, merge, overlap_s, share_link, split_waits
from qsync.diagnosis.diagnose import diagnose
from qsync.diagnosis.job_graph import GraphCollective, LanePiece
from qsync.diagnosis.what_if import JobChange
from shared.errors import ConfigError, DataError
from shared.topology import Link

# Slow enough that the link matters, small gradients first as DDP has them.
LINKED = {
    "rate_bytes_per_s": 40e6,
    "alpha_s": 0.002,
    "backward_s": (0.006,) * 10,
    "gradient_bytes": (200_000, 400_000) * 5,
    "bucket_cap_bytes": 1_000_000,
}


def predict(tmp_path, settings, change=None):
    diagnosis = diagnose(PlantedRun(PlantedJob(**settings)).write(tmp_path))
    return diagnosis.job.predict(change).step_s


@pytest.mark.parametrize(
    "settings",
    [
        {},
        LINKED,
        {"num_ranks": 3, "rank_factor": {2: 1.7}, "noise": 0.1},
        LINKED | {"num_ranks": 3, "noise": 0.1, "offset_s": {1: 5.0}, "drift": {1: 1e-4}},
        {"is_nccl": True, "operator_factor": {(0, "aten::gelu"): 5.0}},
        {"has_marks": False, "has_shapes": False, "late_loader_s": {0: 0.05}},
    ],
)
def test_unchanged_replay_is_the_measured_step(tmp_path, settings):
    planted = PlantedRun(PlantedJob(**settings))
    diagnosis = diagnose(planted.write(tmp_path))
    assert diagnosis.job.predict().step_s == pytest.approx(planted.step_s, rel=0.01)
    assert diagnosis.step_s == pytest.approx(planted.step_s, rel=0.005)


SLOW = {"rank_factor": {1: 2.0}}
ONE_BUCKET = LINKED | {"bucket_cap_bytes": 10_000_000, "rate_bytes_per_s": 20e6}
CHANGES = [
    (LINKED, JobChange(link_speed=2.0), {"rate_bytes_per_s": 80e6}),
    (LINKED, JobChange(link_speed=0.5), {"rate_bytes_per_s": 20e6}),
    (LINKED, JobChange(gradient_share=0.5), {"gradient_share": 0.5}),
    (SLOW, JobChange(rank_speed={1: 2.0}), {"rank_factor": {}}),
    (SLOW, JobChange(rank_speed={0: 0.25}), {"rank_factor": {0: 4.0, 1: 2.0}}),
    (LINKED | SLOW, JobChange(rank_speed={1: 2.0}), {"rank_factor": {}}),
    (
        SLOW | {"gap_s": 0.002, "rate_bytes_per_s": 1e15, "alpha_s": 0.0},
        JobChange(rank_speed={1: 2.0}),
        {"rank_factor": {}},
    ),
    # On a fast link nothing is seen to wait for the last all-reduce of a step, and yet all does.
    (
        {"rate_bytes_per_s": 1e9, "alpha_s": 0.0, "gradient_bytes": (4000,) * 4},
        JobChange(link_speed=0.0005),
        {"rate_bytes_per_s": 5e5},
    ),
    (
        {"operator_factor": {(1, "aten::linear"): 3.0}},
        JobChange(operator_speed={(1, "aten::linear"): 3.0}),
        {"operator_factor": {}},
    ),
    (
        {},
        JobChange(operator_speed={(None, "aten::linear"): 0.5}),
        {"operator_factor": {(0, "aten::linear"): 2.0, (1, "aten::linear"): 2.0}},
    ),
    (LINKED, JobChange(bucket_bytes=600_000), {"bucket_cap_bytes": 600_000}),
    (LINKED, JobChange(bucket_bytes=10_000_000), {"bucket_cap_bytes": 10_000_000}),
    (LINKED | {"has_shapes": True}, JobChange(bucket_bytes=200_000), {"bucket_cap_bytes": 200_000}),
    # On a busy core the thread of a collective notes its end after operators have gone on.
    (LINKED | {"late_end_s": {1: 0.002}}, JobChange(link_speed=2.0), {"rate_bytes_per_s": 80e6}),
    (
        ONE_BUCKET | {"late_end_s": {0: 0.001, 1: 0.001}},
        JobChange(gradient_share=0.5),
        {"gradient_share": 0.5},
    ),
]


@pytest.mark.parametrize(("settings", "change", "done"), CHANGES)
def test_what_if_is_what_happens(tmp_path, settings, change, done):
    expected = PlantedRun(PlantedJob(**settings | done)).step_s
    unchanged = PlantedRun(PlantedJob(**settings)).step_s
    assert abs(expected / unchanged - 1) > 0.02
    assert predict(tmp_path, settings, change) == pytest.approx(expected, rel=0.02)


def test_accumulation_skips_every_other_sum(tmp_path):
    alone = {"rate_bytes_per_s": 1e15, "alpha_s": 0.0}
    free = PlantedRun(PlantedJob(**LINKED | alone)).step_s
    full = PlantedRun(PlantedJob(**LINKED)).step_s
    step_s = predict(tmp_path, LINKED, JobChange(accumulation=2))
    assert step_s == pytest.approx((free + full) / 2, rel=0.02)


def test_memory_changes_cost_computing(tmp_path):
    base = predict(tmp_path, {})
    # All of the forward pass (30 ms) runs again, but for nothing of the loader.
    assert predict(tmp_path, {}, JobChange(recompute_share=1.0)) == pytest.approx(
        base + 0.030, abs=1e-4
    )
    # The same work in halves, with the launches of seven operators (and their gradients) twice.
    halved = predict(tmp_path, {}, JobChange(micro_batches=2))
    assert base < halved < base + 0.011
    fast = {"rate_bytes_per_s": 1e15, "alpha_s": 0.0, "gap_s": 0.001}
    twice = predict(tmp_path, fast, JobChange(micro_batches=2))
    assert twice == pytest.approx(predict(tmp_path, fast) + 0.007, abs=1e-4)


def test_critical_path_adds_up_to_the_makespan(tmp_path):
    diagnosis = diagnose(PlantedRun(PlantedJob(**LINKED, rank_factor={1: 1.3})).write(tmp_path))
    forecast = diagnosis.job.predict()
    total = sum(forecast.critical_s.values()) * len(diagnosis.steps)
    first = forecast.timeline.critical_path[0].start_s
    lags = sum(step.lag_s for step in forecast.timeline.critical_path)
    assert total + first + lags == pytest.approx(forecast.timeline.makespan_s, rel=1e-6)
    assert all(rank in (1, None) for rank, _ in list(forecast.critical_s)[:5])


def test_one_bucket_of_one_size_still_tells_what_smaller_ones_gain(tmp_path):
    # DDP sends a small model in one bucket, whose seconds are the link's rate and latency in one.
    one = LINKED | {"bucket_cap_bytes": 10_000_000, "has_shapes": True}
    job = diagnose(PlantedRun(PlantedJob(**one)).write(tmp_path)).job
    seconds = 0.002 + 3_000_000 / 40e6
    assert job.link.alpha_s == 0
    assert job.link.beta_s_per_byte == pytest.approx(seconds / 3_000_000, rel=0.01)
    forecast = job.predict(JobChange(bucket_bytes=600_000))
    done = PlantedRun(PlantedJob(**one | {"bucket_cap_bytes": 600_000})).step_s
    # Each of four more buckets has a latency of 2 ms that the trace could not tell.
    assert forecast.step_s == pytest.approx(done, abs=4.5 * 0.002)
    assert forecast.step_s < job.predict().step_s - 0.02
    assert "one size" in forecast.note
    assert not job.predict().note


def test_a_piece_waits_for_the_new_buckets_that_are_ready_before_it():
    lane = [
        LanePiece(0, "Mm1Backward0", 0.0, 0.0, 1.0),
        LanePiece(0, "aten::item", 2.0, 0.0, 1.0, behind=(0,)),
        LanePiece(0, "Mm0Backward0", 3.0, 0.0, 1.0),
        LanePiece(0, "aten::add", 5.0, 0.0, 1.0, behind=(1,)),
    ]
    old = [GraphCollective("allreduce", 0, 100, 1.0, (ready_s,) * 2) for ready_s in (1.0, 4.0)]
    link = Link(alpha_s=0.0, beta_s_per_byte=0.01)
    lanes, new = rebucket([lane, lane], old, link, 50)
    assert [each.ready_s for each in new] == [pytest.approx((s, s)) for s in (0.5, 1.0, 2.5, 4.0)]
    assert [piece.behind for piece in lanes[1]] == [(), (0, 1), (), (0, 1, 2, 3)]


def test_changes_that_the_trace_cannot_answer_are_refused(tmp_path):
    job = diagnose(PlantedRun(PlantedJob(has_shapes=False)).write(tmp_path)).job
    with pytest.raises(DataError, match="the sizes of all all-reduces, got a trace without"):
        job.predict(JobChange(bucket_bytes=1000))
    with pytest.raises(ConfigError, match="a rank from 0 to 1, got 7"):
        job.predict(JobChange(rank_speed={7: 2.0}))
    with pytest.raises(ConfigError, match="an operator of the trace, got 'aten::no'"):
        job.predict(JobChange(operator_speed={(None, "aten::no"): 2.0}))


@pytest.mark.parametrize(
    ("field", "value"),
    [("link_speed", 0.0), ("gradient_share", -1.0), ("rank_speed", {0: 0.0}), ("accumulation", 0),
     ("micro_batches", 0), ("bucket_bytes", 0), ("recompute_share", 1.5)],
)  # fmt: skip
def test_changes_outside_their_range_are_refused(field, value):
    with pytest.raises(ConfigError, match=f"{field}.*expected"):
        JobChange(**{field: value})


def test_backward_operators_are_known_by_their_names():
    assert is_backward("AddmmBackward0")
    assert is_backward("torch::autograd::AccumulateGrad")
    assert not is_backward("aten::linear")


def test_a_transfer_lasts_from_the_last_start_to_the_median_end():
    ends_s = 5.0, 5.25, 9.0
    collective = MatchedCollective(
        kind="allreduce", step=0, num_bytes=1, start_s=(0.0, 2.0, 1.0), end_s=ends_s,
        enqueued_s=(0.0, 2.0, 1.0),
    )  # fmt: skip
    assert (collective.transfer, collective.last_rank) == ((2.0, 5.25), 1)


spans = st.lists(
    st.tuples(st.integers(0, 30), st.integers(0, 30), st.integers(1, 20)), min_size=1, max_size=8
)


@given(spans)
def test_waits_and_transfers_partition_a_ranks_time_in_collectives(drawn):
    collectives = [
        MatchedCollective(
            kind="allreduce", step=0, num_bytes=1, start_s=(float(a), float(b)),
            end_s=(float(max(a, b) + n),) * 2, enqueued_s=(float(a), float(b)),
        )
        for a, b, n in drawn
    ]  # fmt: skip
    # By instants: transfer where any transfers, else waiting where any waits.
    transfer, wait = 0, 0
    for instant in range(60):
        t = instant + 0.5
        is_moving = any(max(a, b) < t < max(a, b) + n for a, b, n in drawn)
        transfer += is_moving
        wait += not is_moving and any(a < t < b for a, b, _ in drawn)
    waits, transfers = split_waits(collectives, 0)
    assert sum(end - start for _, (start, end) in waits) == wait
    assert sum(end - start for start, end in transfers) == transfer
    assert all(last == 1 for last, _ in waits)
    # The link's seconds are all given out.
    assert sum(share_link(collectives)) == pytest.approx(transfer)


@given(spans, st.integers(0, 40), st.integers(0, 40))
def test_overlap_counts_covered_instants(drawn, start, length):
    union = merge((float(a), float(a + n)) for a, _, n in drawn)
    covered = sum(
        any(a < t + 0.5 < a + n for a, _, n in drawn) for t in range(start, start + length)
    )
    assert overlap_s(union, float(start), float(start + length)) == covered
