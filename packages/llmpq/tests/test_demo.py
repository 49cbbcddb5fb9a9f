"""The demo's claims are computed from what ran, and one that is not correct makes it fail."""

from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM

from llmpq import demo
from llmpq.config import Quality
from llmpq.evaluation import Timing
from llmpq.planner.plan import Plan, Stage
from shared.claims import faults, read_demo

from .runtime.tiny_models import make

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


def claim(missed=0.01, nats=0.1, measured=0.1, rival=0.2, limit=0.2, predicted_s=0.9):
    plans = {"plan": plan_of(nats), "even": plan_of(0.2)}
    timings = [timing("plan", 1.0, TOKENS, predicted_s), timing("even", 1.5, TOKENS)]
    return demo.claim(
        plans, timings, missed, {"plan": measured, "even": rival}, Quality(max_kl=limit)
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
        ({"missed": 0.6}, [False, False, True]),  # another token
        ({"missed": float("inf")}, [False, False, True]),  # nothing was done
        ({"nats": 0.3, "measured": 0.3}, [False, True, False]),  # more loss than was allowed
        ({"measured": 0.21}, [True, True, False]),  # more loss than was expected
        ({"measured": 0.0}, [True, True, False]),  # nothing was rounded
        ({"rival": 0.01}, [True, True, False]),
        ({"predicted_s": 5.1}, [True, False, True]),
        ({"predicted_s": 0.15}, [True, False, True]),
        ({"predicted_s": None}, [True, False, True]),
    ],
)
def test_what_did_not_happen_is_not_claimed(changed, correct):
    assert [one.correct for one in claim(**changed)] == correct


def test_tokens_of_another_model_or_none_fall_short(tmp_path):
    model = AutoModelForCausalLM.from_pretrained(make("llama", tmp_path)).eval()
    ids = torch.tensor([[3, 4, 5], [6, 7, 8]])
    best = model.generate(ids, max_new_tokens=4, min_new_tokens=4, do_sample=False)[:, 3:]
    assert demo.shortfall(model, ids, best, 4) <= 1e-4
    for wrong in (torch.zeros_like(best), best.flip(0), (best + 1) % 131):
        assert demo.shortfall(model, ids, wrong, 4) > 0.5
    for missing in (None, best[:, :3], best[:0]):
        assert demo.shortfall(model, ids, missing, 4) == float("inf")
