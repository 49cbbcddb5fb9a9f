"""Plans of the two modes that restore what autograd saved, and a model's loss."""

import pytest

from memo import Plan
from memo.planner.layer_plan import LayerPlan

from ..runtime.models import make_batch

HALF = Plan.fixed(alpha=0.5)
WHOLE = Plan(layers=(LayerPlan(mode="whole"),))
BOTH = pytest.mark.parametrize("plan", [HALF, WHOLE], ids=["restore", "whole"])


def loss_of(model, number=0, **settings):
    ids = make_batch(number, **settings)
    return model(input_ids=ids, labels=ids, use_cache=False).loss
