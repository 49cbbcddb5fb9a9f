import json
import re
from pathlib import Path

import pytest
from planted_traces import PlantedJob, PlantedRun

from qsync.diagnosis.diagnose import diagnose
from shared.errors import DataError

US = 1e-6


def run(tmp_path, **settings):
    planted = PlantedRun(PlantedJob(**settings))
    return planted, diagnose(planted.write(tmp_path))


@pytest.mark.parametrize("num_ranks", [2, 3])
@pytest.mark.parametrize("is_nccl", [False, True])
def test_waits_and_transfers_are_those_planted(tmp_path, num_ranks, is_nccl):
    slow = num_ranks - 1
    planted, diagnosis = run(
        tmp_path, num_ranks=num_ranks, rank_factor={slow: 1.5}, is_nccl=is_nccl
    )
    assert diagnosis.slowest_rank == slow
    assert diagnosis.wait_s == pytest.approx(planted.wait_s, abs=5 * US)
    assert planted.wait_s[0] > 0.02
    assert planted.wait_s[slow] == 0
    assert diagnosis.transfer_s == pytest.approx([planted.transfer_s] * num_ranks, abs=5 * US)
    assert diagnosis.step_s == pytest.approx(planted.step_s, rel=1e-3)
    assert diagnosis.waits_for_s[0][slow] == pytest.approx(planted.wait_s[0], abs=5 * US)


CASES = [
    (kind, settings | more)
    for kind, settings in [
        ("slow rank", {"rank_factor": {1: 1.6}}),
        ("slow operator", {"operator_factor": {(1, "aten::gelu"): 6.0}}),
        ("late loader", {"late_loader_s": {1: 0.03}}),
        ("slow link", {"rate_bytes_per_s": 20e6}),
    ]
    for more in [
        {},
        {"offset_s": {0: 0.4, 1: -2.5}, "noise": 0.03},
        {"num_ranks": 3, "drift": {1: 1e-4, 2: -5e-5}, "noise": 0.05, "seed": 1},
        {"num_ranks": 3, "offset_s": {1: 30.0}, "has_loader_mark": False, "noise": 0.03},
        {"num_ranks": 4, "has_shapes": False, "noise": 0.03, "num_steps": 4},
    ]
]


@pytest.mark.parametrize(("kind", "settings"), CASES)
def test_cause_is_named(tmp_path, kind, settings):
    planted, diagnosis = run(tmp_path, **settings)
    cause = diagnosis.causes[0]
    assert cause.kind == kind
    assert cause.rank == (None if kind == "slow link" else 1)
    assert cause.operator == ("aten::gelu" if kind == "slow operator" else None)
    text = diagnosis.explain()
    if kind == "slow link":
        assert "All ranks wait for the link" in text
        return
    assert diagnosis.slowest_rank == 1
    assert re.search(r"Waiting for rank 1 in each step: rank 0 [0-9.]+ ms", text)
    # What the cause costs is what the step gains without it.
    cured = settings | {"rank_factor": {}, "operator_factor": {}, "late_loader_s": {}}
    cost_s = planted.step_s - PlantedRun(PlantedJob(**cured)).step_s
    assert cause.seconds == pytest.approx(cost_s, rel=0.15)


def test_equal_ranks_on_a_fast_link_have_no_cause(tmp_path):
    _, diagnosis = run(tmp_path, rate_bytes_per_s=10e9, alpha_s=1e-5)
    assert diagnosis.causes == ()
    assert "No rank waits noticeably" in diagnosis.explain()


def test_order_of_files_compression_and_missing_marks_change_nothing(tmp_path):
    planted = PlantedRun(PlantedJob(rank_factor={1: 1.5}))
    plain = diagnose(planted.write(tmp_path))
    packed = diagnose(planted.write(tmp_path, is_gz=True)[::-1])
    assert packed.wait_s == plain.wait_s
    assert packed.clock_offset_s == plain.clock_offset_s
    unmarked = diagnose(
        PlantedRun(PlantedJob(rank_factor={1: 1.5}, has_marks=False)).write(tmp_path)
    )
    assert unmarked.wait_s == pytest.approx(plain.wait_s, rel=1e-3)
    assert unmarked.steps == tuple("01234")


def event(name, start_s, end_s, cat="user_annotation", **arguments):
    return {"ph": "X", "cat": cat, "name": name, "pid": 1, "tid": 1, "ts": start_s * 1e6,
            "dur": (end_s - start_s) * 1e6, "args": arguments}  # fmt: skip


def write(tmp_path, by_rank, **more):
    paths = []
    for rank, events in enumerate(by_rank):
        about = {"distributedInfo": {"rank": rank, "world_size": len(by_rank)}} | more
        paths.append(tmp_path / f"r{rank}.json")
        paths[-1].write_text(json.dumps(about | {"traceEvents": events}))
    return paths


def test_overlapping_collectives_count_once(tmp_path):
    # Rank 0 joins A at 0 and B at 1, rank 1 at 5 and 6; A ends at 7, B at 8. One step of 10 s.
    spans = [[(0, 7), (1, 8)], [(5, 7), (6, 8)]]
    by_rank = [
        [event("ProfilerStep#1", 0, 10)]
        + [event("gloo:all_reduce", *span, **{"Input Dims": [[size]]}) for size, span in zip((8, 9), pair, strict=True)]
        for pair in spans
    ]  # fmt: skip
    diagnosis = diagnose(write(tmp_path, by_rank))
    # Transfers are [5, 7] and [6, 8]; rank 0 only waits in [0, 5].
    assert diagnosis.wait_s == pytest.approx((5.0, 0.0))
    assert diagnosis.transfer_s == pytest.approx((3.0, 3.0))
    assert diagnosis.slowest_rank == 1


def test_steps_that_only_one_rank_traced_are_left_out(tmp_path):
    planted = PlantedRun(PlantedJob(rank_factor={1: 1.5}))
    paths = planted.write(tmp_path)
    content = json.loads(Path(paths[0]).read_text())
    first = next(e for e in content["traceEvents"] if e["name"] == "ProfilerStep#3")
    end_us = first["ts"] + first["dur"]
    content["traceEvents"] = [e for e in content["traceEvents"] if e.get("ts", 1e18) >= end_us]
    Path(paths[0]).write_text(json.dumps(content))
    diagnosis = diagnose(paths)
    assert diagnosis.steps == ("4", "5", "6", "7", "8")
    assert diagnosis.wait_s[0] == pytest.approx(planted.wait_s[0], rel=0.01)


def test_time_between_the_marks_of_steps_counts(tmp_path):
    planted = PlantedRun(PlantedJob())
    for path in (paths := planted.write(tmp_path)):
        content = json.loads(Path(path).read_text())
        for each in content["traceEvents"]:
            if each["name"].startswith("ProfilerStep"):
                each["ts"] += 1500
                each["dur"] -= 1500
        Path(path).write_text(json.dumps(content))
    assert diagnose(paths).replayed_step_s == pytest.approx(planted.step_s, rel=1e-3)


@pytest.mark.parametrize(
    ("sums", "operators", "waiting"),
    [
        # Rank 1 notes one end late, long after its operators went on.
        ([(1.0, 2.0, 2.6)], {"a": (0.0, 1.0), "b": (2.001, 2.5), "c": (2.5, 2.9)}, ["b"]),
        # It waits for the first of two, and then goes on waiting for the second.
        (
            [(0.9, 2.0, 2.0), (0.9, 2.2, 2.2)],
            {"a": (0.0, 1.0), "b": (2.001, 2.002), "c": (2.201, 2.9)},
            ["b", "c"],
        ),
        # It computes while they run: what follows the last end waits for it, nothing before.
        ([(0.1, 0.95, 0.95)], {"a": (0.0, 0.9), "b": (0.9, 1.0), "c": (1.0, 2.9)}, ["c"]),
    ],
)
def test_operators_wait_where_the_rank_was_blocked(tmp_path, sums, operators, waiting):
    by_rank = []
    for rank in (0, 1):
        events = []
        for step in range(3):
            t = 3.0 * step
            events.append(event(f"ProfilerStep#{step}", t, t + 3.0))
            events += [
                event(name, t + start_s, t + end_s, "cpu_op")
                for name, (start_s, end_s) in operators.items()
            ]
            # In other steps ends are noted at once, which tells the clocks.
            events += [
                event("gloo:all_reduce", t + start_s, t + (late_s if rank and not step else end_s))
                for start_s, end_s, late_s in sums
            ]
        by_rank.append(events)
    lane = diagnose(write(tmp_path, by_rank)).job.lanes[1]
    assert [piece.name for piece in lane if piece.behind and piece.step == 0] == waiting


# Faults


def cut(path):
    data = Path(path).read_bytes()
    Path(path).write_bytes(data[: len(data) // 2])


def test_cut_trace_is_named(tmp_path):
    paths = PlantedRun(PlantedJob()).write(tmp_path)
    cut(paths[1])
    with pytest.raises(DataError, match=r"rank0.json: expected a complete trace as JSON.*cut"):
        diagnose(paths)
    packed = PlantedRun(PlantedJob()).write(tmp_path, is_gz=True)
    cut(packed[0])
    with pytest.raises(DataError, match=r"rank1.json.gz: expected a whole .gz file"):
        diagnose(packed)


def test_trace_without_collectives_is_named(tmp_path):
    paths = PlantedRun(PlantedJob()).write(tmp_path)
    content = json.loads(Path(paths[0]).read_text())
    content["traceEvents"] = [e for e in content["traceEvents"] if "gloo" not in e["name"]]
    Path(paths[0]).write_text(json.dumps(content))
    with pytest.raises(DataError, match=r"rank1.json: expected collectives.*got none"):
        diagnose(paths)


def test_missing_rank_and_repeated_rank_are_named(tmp_path):
    paths = PlantedRun(PlantedJob(num_ranks=3)).write(tmp_path)
    with pytest.raises(
        DataError, match=r"all 3 ranks, got ranks \[0, 2\]; add the trace of rank 1"
    ):
        diagnose([paths[0], paths[2]])
    with pytest.raises(DataError, match=r"got rank 0 here and in"):
        diagnose([paths[2], paths[2]])
    with pytest.raises(DataError, match=r"at least two files"):
        diagnose(paths[:1])


def test_lost_collective_names_rank_and_step(tmp_path):
    paths = PlantedRun(PlantedJob()).write(tmp_path)
    content = json.loads(Path(paths[0]).read_text())
    sums = [e for e in content["traceEvents"] if e["name"] == "gloo:all_reduce"]
    content["traceEvents"].remove(sums[-1])
    Path(paths[0]).write_text(json.dumps(content))
    with pytest.raises(
        DataError, match=r"rank1.json: expected 1 of allreduce in step 8.*got 0 on rank 1"
    ):
        diagnose(paths)


def test_unlike_steps_and_lone_broadcasts_are_refused(tmp_path):
    one = [event("ProfilerStep#1", 0, 1), event("gloo:all_reduce", 0, 1)]
    other = [event("ProfilerStep#2", 0, 1), event("gloo:all_reduce", 0, 1)]
    with pytest.raises(DataError, match="rank 0: 1 to 1; rank 1: 2 to 2"):
        diagnose(write(tmp_path, [one, other]))
    sent = [event("ProfilerStep#1", 0, 1), event("gloo:broadcast", 0, 1)]
    with pytest.raises(DataError, match="got only broadcast"):
        diagnose(write(tmp_path, [sent, sent]))


def test_what_is_no_trace_is_refused(tmp_path):
    path = tmp_path / "other.json"
    path.write_text("[1, 2]")
    with pytest.raises(DataError, match="expected an object with traceEvents, got list"):
        diagnose([path, path])
    with pytest.raises(DataError, match="there is nothing"):
        diagnose([tmp_path / "absent.json", path])
    path.write_text(
        json.dumps({"traceEvents": [{"ph": "X", "cat": "cpu_op", "name": "a", "ts": 1}]})
    )
    with pytest.raises(DataError, match=r"other.json: expected events of torch.profiler.*dur"):
        diagnose([path, path])
