import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from planted_traces import PlantedJob, PlantedRun

from qsync.diagnosis.clocks import fit_clocks
from qsync.diagnosis.diagnose import diagnose


@given(
    offset_s=st.floats(-1e3, 1e3),
    drift=st.floats(-2e-4, 2e-4),
    num_ends=st.integers(4, 60),
    seed=st.integers(0, 99),
)
def test_offset_and_drift_without_noise_are_exact(offset_s, drift, num_ends, seed):
    ends = np.sort(np.random.default_rng(seed).uniform(5.0, 15.0, num_ends))
    clocks = fit_clocks([ends, ends + offset_s + drift * (ends - 5.0)], 5.0)
    assert clocks[0].offset_s == 0
    assert clocks[0].drift == 0
    assert clocks[1].offset_s == pytest.approx(offset_s, abs=1e-8)
    assert clocks[1].drift == pytest.approx(drift, abs=1e-9)
    for time_s in (5.0, 11.0):
        reading = time_s + offset_s + drift * (time_s - 5.0)
        assert clocks[1].to_common(reading) == pytest.approx(time_s, abs=1e-8)


def test_late_ends_do_not_move_the_fit():
    random = np.random.default_rng(0)
    ends = np.linspace(0, 10, 100)
    late = ends + 0.5 + 1e-4 * ends + random.exponential(1e-4, 100)
    late[::7] += 0.3
    clock = fit_clocks([ends, late], 0.0)[1]
    assert clock.offset_s == pytest.approx(0.5, abs=5e-4)
    assert clock.drift == pytest.approx(1e-4, abs=5e-5)


def test_scatter_alone_gives_no_drift():
    drifts = []
    for seed in range(40):
        random = np.random.default_rng(seed)
        ends = np.linspace(0, 1, 30)
        noisy = ends + 0.1 + random.normal(0, 1e-3, 30)
        drifts.append(fit_clocks([ends, noisy], 0.0)[1].drift)
    assert sum(drift == 0 for drift in drifts) >= 36


def test_a_slope_that_no_clock_has_is_no_drift():
    ends = np.linspace(0, 2, 24)
    scatter = np.random.default_rng(0).normal(0, 1e-5, 24)
    # A rank that is throttled more and more notes its last ends later and later.
    throttled = ends + 0.1 + scatter + np.maximum(0, 6e-3 * (ends - 1))
    clock = fit_clocks([ends, throttled], 0.0)[1]
    assert clock.drift == 0
    assert clock.offset_s == pytest.approx(0.1, abs=1e-4)


@pytest.mark.parametrize("is_shifted_base", [False, True])
def test_planted_clocks_are_found_within_a_millisecond(tmp_path, is_shifted_base):
    job = PlantedJob(
        num_ranks=3, num_steps=10, noise=0.05, offset_s={1: 0.25, 2: -7.0}, drift={1: 5e-4}
    )
    paths = PlantedRun(job).write(tmp_path)
    expected = [0.0, 0.25, -7.0]
    if is_shifted_base:
        # Bases of traces differ by hosts' clocks; times in the events count from them.
        text = (tmp_path / "rank2.json").read_text()
        (tmp_path / "rank2.json").write_text(
            text.replace("1760000000000000000", "1760000003000000000")
        )
        expected[2] += 3.0
    diagnosis = diagnose(paths)
    assert diagnosis.clock_offset_s == pytest.approx(expected, abs=1e-4)
    assert diagnosis.clock_drift[1] == pytest.approx(5e-4, abs=1e-4)
    assert diagnosis.wait_s[0] < 0.01
