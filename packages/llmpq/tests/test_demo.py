"""The demo's claims are computed from what ran, and one that is not correct makes it fail."""

from pathlib import Path

import pytest
import torch

from llmpq import demo
from llmpq.config import Quality
from llmpq.evaluation import Timing
from llmpq.planner.plan import Plan, Stage
from shared.claims import faults, read_demo

TOKENS = torch.tensor([[5, 7]])


@pytest.mark.slow
def test_the_demo_reports_acceptable_claims_and_a_picture(tmp_path):
    assert demo.run(tmp_path, is_full=False)
    result = read_demo(tmp_path)
    assert not faults(result)
    assert "<svg" in Path(result.pictures()[0]).read_text()


def plan_of(nats):
    stages = Stage(rank=0, layers=(0, 1)), Stage(rank=1, layers=(1, 2))
    return Plan(
        stages=stages, bits=(4, 4), group_size=64, prefill_size=1, decode_size=1,
        predicted={"nats": nats},
    )  # fmt: skip


def timing(name, seconds, tokens, predicted_s=None):
    return Timing(
        name=name, turns_s=(seconds,), num_tokens=2, predicted_s=predicted_s, stages=(),
        tokens=tokens,
    )  # fmt: skip


def claim(tokens=TOKENS, nats=0.1, measured=0.1, rival=0.2, limit=0.2, predicted_s=0.9):
    plans = {"plan": plan_of(nats), "even": plan_of(0.2)}
    timings = [timing("plan", 1.0, tokens, predicted_s), timing("even", 1.5, TOKENS)]
    return demo.claim(
        plans, timings, TOKENS, {"plan": measured, "even": rival}, Quality(max_kl=limit)
    )


def test_claims_say_what_was_measured():
    seconds, predicted, nats = claim()
    assert seconds.correct
    assert (seconds.ours, seconds.baseline) == (1.0, 1.5)
    assert predicted.correct
    assert (predicted.ours, predicted.baseline) == (0.9, 1.0)
    assert nats.correct
    assert (nats.ours, nats.baseline) == (0.1, 0.2)


@pytest.mark.parametrize(
    ("changed", "correct"),
    [
        ({"tokens": torch.tensor([[5, 8]])}, [False, False, True]),  # another token
        (
            {"tokens": torch.zeros(1, 0, dtype=torch.int64)},
            [False, False, True],
        ),  # nothing was done
        ({"tokens": None}, [False, False, True]),
        ({"nats": 0.3, "measured": 0.3}, [False, True, False]),  # more loss than was allowed
        ({"measured": 0.21}, [True, True, False]),  # more loss than was expected
        ({"measured": 0.0}, [True, True, False]),  # nothing was rounded
        ({"rival": 0.01}, [True, True, False]),
        ({"predicted_s": 2.1}, [True, False, True]),
        ({"predicted_s": 0.4}, [True, False, True]),
        ({"predicted_s": None}, [True, False, True]),
    ],
)
def test_what_did_not_happen_is_not_claimed(changed, correct):
    assert [one.correct for one in claim(**changed)] == correct
