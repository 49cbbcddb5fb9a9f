"""The demo's claims are computed from what ran, and one that is not correct makes it fail."""

from pathlib import Path

import pytest

from adaqp import demo
from shared.claims import faults, read_demo


@pytest.mark.slow
def test_the_demo_reports_acceptable_claims_and_a_picture(tmp_path):
    assert demo.run(tmp_path, is_full=False)
    result = read_demo(tmp_path)
    assert not faults(result)
    assert len(result.claims) >= 3
    assert "<svg" in Path(result.pictures()[0]).read_text()


def test_an_accuracy_that_falls_is_not_correct():
    exact = demo.Score(policy="exact", accuracy=0.7, num_bytes=10)
    worse = demo.Score(policy="adaptive", accuracy=0.6, num_bytes=1)
    assert not any(c.correct for c in demo.claim_flights([exact, worse], demo.SHORT))
    equal = demo.Score(policy="adaptive", accuracy=0.7, num_bytes=1)
    assert all(c.correct for c in demo.claim_flights([exact, equal], demo.SHORT))
