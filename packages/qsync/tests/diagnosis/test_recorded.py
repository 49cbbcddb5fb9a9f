"""Traces of a real job: DDP over gloo, two ranks on one host, rank 1 on 0.3 of a core.

`bench/qsync/traced_job.py` recorded them, with two hidden layers and buckets of 1 MB.
"""

import gzip
import json
from pathlib import Path

import pytest

from qsync.diagnosis.chrome import write_comparison
from qsync.diagnosis.diagnose import diagnose
from qsync.diagnosis.what_if import JobChange

ASSETS = Path(__file__).parent / "assets"
PATHS = [ASSETS / "rank0.json.gz", ASSETS / "rank1.json.gz"]


@pytest.fixture(scope="module")
def diagnosis():
    return diagnose(PATHS)


def test_slow_rank_is_named(diagnosis):
    assert diagnosis.slowest_rank == 1
    first = diagnosis.causes[0]
    assert (first.kind, first.rank) == ("slow rank", 1)
    assert diagnosis.wait_s[0] > 0.2 * diagnosis.step_s > 50 * diagnosis.wait_s[1]
    assert "Waiting for rank 1 in each step: rank 0" in diagnosis.explain()
    assert len(diagnosis.steps) == 7


def test_clocks_of_one_host_agree(diagnosis):
    assert diagnosis.clock_offset_s == pytest.approx((0, 0), abs=1e-3)
    assert diagnosis.clock_drift == (0, 0)


def test_another_hosts_clock_changes_nothing_but_its_offset(diagnosis, tmp_path):
    content = json.loads(gzip.decompress(PATHS[1].read_bytes()))
    content["baseTimeNanoseconds"] += 3_000_000_000
    shifted = tmp_path / "rank1.json"
    shifted.write_text(json.dumps(content))
    other = diagnose([PATHS[0], shifted])
    expected_s = diagnosis.clock_offset_s[1] + 3
    assert other.clock_offset_s[1] == pytest.approx(expected_s, abs=1e-6)
    assert other.wait_s == pytest.approx(diagnosis.wait_s, abs=1e-6)


def test_replay_gives_the_measured_step_back(diagnosis):
    assert diagnosis.replayed_step_s == pytest.approx(diagnosis.step_s, rel=0.05)


def test_sizes_of_buckets_are_those_of_the_model(diagnosis):
    # Two layers of 512 x 512 weights with biases, and the head's, in float32.
    num_bytes = sum(c.num_bytes for c in diagnosis.collectives) / len(diagnosis.steps)
    assert num_bytes == 4 * (2 * (512 * 512 + 512) + 10 * 512 + 10)


def test_a_faster_rank_1_would_end_the_waiting(diagnosis):
    seconds = [sum(p.gap_s + p.busy_s for p in lane) for lane in diagnosis.job.lanes]
    change = JobChange(rank_speed={1: seconds[1] / seconds[0]})
    gain = diagnosis.replayed_step_s / diagnosis.job.predict(change).step_s
    assert 1.2 < gain < seconds[1] / seconds[0]


def test_replayed_operators_lie_beside_the_measured_ones(diagnosis, tmp_path):
    write_comparison(diagnosis, tmp_path / "both.json")
    events = json.loads((tmp_path / "both.json").read_text())["traceEvents"]
    for rank in (0, 1):
        measured, replayed = (
            sorted(e["ts"] for e in events if e.get("pid") == process and e["name"] == "aten::gelu")
            for process in (2 * rank, 2 * rank + 1)
        )
        assert len(measured) == len(replayed) == 14
        assert replayed == pytest.approx(measured, abs=0.2e6 * diagnosis.step_s)
