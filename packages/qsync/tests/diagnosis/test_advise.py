import json

import pytest
from planted_traces import PlantedJob, PlantedRun

from qsync.diagnosis.advise import advise
from qsync.diagnosis.chrome import write_comparison
from qsync.diagnosis.diagnose import diagnose
from qsync.diagnosis.memory_peaks import find_peaks
from qsync.diagnosis.strategies import STRATEGIES, AdviceState
from qsync.diagnosis.traces.events import MemorySample, TraceSpan
from qsync.diagnosis.traces.reading import RankTrace
from qsync.diagnosis.what_if import JobChange
from shared.errors import ConfigError, DataError
from shared.units import MiB

SLOW_LINK = {
    "rate_bytes_per_s": 50e6,
    "alpha_s": 0.001,
    "backward_s": (0.006,) * 10,
    "gradient_bytes": (2 * MiB, MiB) * 5,
    "bucket_cap_bytes": 9 * MiB,
}
FULL = {"memory_bytes": (100 * MiB, 300 * MiB)}


def diagnosed(tmp_path, **settings):
    return diagnose(PlantedRun(PlantedJob(**settings)).write(tmp_path))


def test_first_advice_for_a_slow_link_is_about_the_link_and_comes_true(tmp_path):
    first, *others = advise(diagnosed(tmp_path, **SLOW_LINK))
    assert first.strategy == "bf16 gradients"
    done = PlantedRun(PlantedJob(**SLOW_LINK | {"gradient_share": 0.5})).step_s
    assert first.step_s == pytest.approx(done, rel=0.02)
    assert first.gain == pytest.approx(PlantedRun(PlantedJob(**SLOW_LINK)).step_s / done, rel=0.02)
    # Smaller buckets hide more of what is left.
    assert others[0].strategy == "buckets"
    assert first.gain >= others[0].gain


def test_buckets_are_advised_where_ddp_sends_one(tmp_path):
    one = SLOW_LINK | {"bucket_cap_bytes": 25 * MiB, "has_shapes": True}
    first = advise(diagnosed(tmp_path, **one), strategies=["buckets", "accumulation"])[0]
    assert first.strategy == "buckets"
    assert "one size" in first.text
    done = one | {"bucket_cap_bytes": first.change.bucket_bytes}
    gain = PlantedRun(PlantedJob(**one)).step_s / PlantedRun(PlantedJob(**done)).step_s
    assert first.gain == pytest.approx(gain, rel=0.05)


def test_the_largest_of_about_equal_buckets_is_advised(tmp_path):
    one = SLOW_LINK | {
        "rate_bytes_per_s": 800e6, "alpha_s": 0.0, "gradient_bytes": (MiB,) * 10,
        "bucket_cap_bytes": 25 * MiB,
    }  # fmt: skip
    diagnosis = diagnosed(tmp_path, **one)
    (first,) = advise(diagnosis, strategies=["buckets"])
    steps_s = [diagnosis.job.predict(JobChange(bucket_bytes=n * MiB)).step_s for n in (1, 2, 5)]
    assert steps_s[0] < steps_s[1] < 1.02 * steps_s[0] < steps_s[2]
    assert first.change.bucket_bytes == 2 * MiB


def test_other_sizes_of_a_single_bucket_are_no_advice(tmp_path):
    small = SLOW_LINK | {"gradient_bytes": (4000,) * 10, "rate_bytes_per_s": 1e6, "noise": 0.1}
    assert advise(diagnosed(tmp_path, **small), strategies=["buckets"]) == []


def test_another_global_batch_is_advised_last_and_says_so(tmp_path):
    # A link so slow that half of the all-reduces gain more than any size of buckets.
    diagnosis = diagnosed(tmp_path, **SLOW_LINK | {"rate_bytes_per_s": 15e6})
    alone = {
        name: [advice.gain for advice in advise(diagnosis, strategies=[name])]
        for name in ("buckets", "accumulation")
    }
    assert alone["accumulation"][0] > max([1.0, *alone["buckets"]])
    advices = advise(diagnosis)
    assert [advice.strategy for advice in advices][-1] == "accumulation"
    assert len(advices) > 1
    assert "doubles the global batch" in advices[-1].text
    with pytest.raises(ConfigError, match="strategy"):
        advise(diagnosis, strategies=["faster"])


def test_first_advice_for_a_slow_rank_lowers_its_products(tmp_path):
    diagnosis = diagnosed(tmp_path, rank_factor={1: 1.2})
    first = advise(diagnosis)[0]
    assert first.strategy == "precision"
    assert {rank for rank, _ in first.change.operator_speed} == {1}
    assert "aten::gelu" not in {name for _, name in first.change.operator_speed}
    # At the share that it asks for, the slow rank is as fast as the other.
    equal = PlantedRun(PlantedJob()).step_s
    assert first.step_s == pytest.approx(equal, rel=0.02)


def test_only_the_slower_rank_lowers_products_and_no_further_than_it_lags(tmp_path):
    for factor, share in ((1.1, 1 - 0.1 / 1.1 * 107 / 72), (3.0, 0.5)):
        diagnosis = diagnosed(tmp_path, rank_factor={1: factor}, rate_bytes_per_s=1e15, gap_s=1e-6)
        state = AdviceState(
            diagnosis=diagnosis, change=JobChange(), forecast=diagnosis.job.predict()
        )
        ((change, _),) = STRATEGIES.get("precision")(state)
        speeds = change.operator_speed
        assert {rank for rank, _ in speeds} == {1}
        assert list(speeds.values()) == pytest.approx([1 / share] * len(speeds), rel=0.05)


def test_equal_ranks_on_a_fast_link_need_no_advice(tmp_path):
    assert advise(diagnosed(tmp_path, rate_bytes_per_s=50e9, alpha_s=1e-6)) == []


def test_memory_comes_first_and_at_the_least_cost(tmp_path):
    diagnosis = diagnosed(tmp_path, **FULL)
    # 200 MiB are activations: a quarter of them has to go.
    first = advise(diagnosis, memory_limit_bytes=250 * MiB)[0]
    assert first.saved_bytes >= 50 * MiB
    options = [JobChange(recompute_share=0.25), JobChange(micro_batches=2)]
    assert first.step_s <= min(diagnosis.job.predict(change).step_s for change in options) + 1e-9
    hard = advise(diagnosis, memory_limit_bytes=120 * MiB)
    assert max(advice.saved_bytes for advice in hard) >= 180 * MiB
    assert all(advice.strategy in STRATEGIES for advice in hard)
    with pytest.raises(DataError, match="profile_memory=True"):
        advise(diagnosed(tmp_path), memory_limit_bytes=1)


def test_a_limit_out_of_reach_is_told(tmp_path, caplog):
    # 100 MiB are kept between steps: no change of activations saves them.
    (only,) = advise(diagnosed(tmp_path, **FULL), memory_limit_bytes=50 * MiB)
    assert only.saved_bytes == 200 * MiB
    assert "stays 50.0 MiB above the limit" in caplog.text


def test_what_is_kept_is_the_most_at_a_steps_start():
    counts = [(0.1, 100), (0.5, 300), (0.9, 120), (1.5, 310), (1.8, 130)]
    trace = RankTrace(
        path="rank0.json", rank=0, world_size=2, lane=(), collectives=(), enqueued_s=(),
        steps=(TraceSpan("0", 0.0, 1.0), TraceSpan("1", 1.0, 2.0)),
        memory=tuple(MemorySample(time_s, "cpu", count) for time_s, count in counts),
    )  # fmt: skip
    assert find_peaks(trace) == {"cpu": (310, 120, "none")}


def test_the_peak_of_memory_is_named(tmp_path):
    diagnosis = diagnosed(tmp_path, num_steps=3, **FULL)
    (peak,) = find_peaks(diagnosis.traces[0]).values()
    assert peak == (300 * MiB, 100 * MiB, "aten::embedding")
    expected = "cpu: 300 MiB at most, in aten::embedding; 100 MiB between steps"
    assert diagnosis.explain().count(expected) == 2


def test_chrome_trace_holds_both_sides_on_one_clock(tmp_path):
    settings = {"rank_factor": {1: 1.5}, "offset_s": {1: 9.0}, **FULL}
    diagnosis = diagnosed(tmp_path, **settings)

    def draw(change):
        write_comparison(diagnosis, tmp_path / "both.json", change)
        return json.loads((tmp_path / "both.json").read_text())["traceEvents"]

    events = draw(None)
    names = {e["args"]["name"] for e in events if e["name"] == "process_name"}
    assert names == {f"rank {r} {word}" for r in (0, 1) for word in ("measured", "replayed")}

    def starts(process, name):
        return sorted(e["ts"] for e in events if e["ph"] == "X" and e["pid"] == process and e["name"] == name)  # fmt: skip

    for rank in (0, 1):
        for name in ("aten::linear", "aten::_foreach_add_"):
            measured, replayed = starts(2 * rank, name), starts(2 * rank + 1, name)
            assert len(measured) == 6
            assert replayed == pytest.approx(measured, abs=50)
    assert max(e["ts"] for e in events if "ts" in e) < 1e6
    assert starts(0, "wait for rank 1")
    assert not starts(2, "wait for rank 0")
    # Memory over time: three samples in a step's forward pass lie above those around it.
    counts = [e["args"]["bytes"] for e in events if e["ph"] == "C" and e["pid"] == 2]
    assert counts == [100 * MiB, *[300 * MiB] * 3, 100 * MiB] * 6
    assert {e["pid"] for e in events if e["ph"] == "C"} == {0, 2}
    assert {e["pid"] for e in events if e.get("cat") == "critical"} >= {3}
    faster = draw(JobChange(rank_speed={1: 1.5}))
    ends = [max(e["ts"] for e in side if e["pid"] == 3 and e["ph"] == "X") for side in (events, faster)]  # fmt: skip
    assert ends[1] < 0.8 * ends[0]
