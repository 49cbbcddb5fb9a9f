"""Which layers may be run again: those whose backward is then the same to the bit."""

import pytest
import torch
from torch import nn

from memo.profiler.layer_times import measure_layer

from ..runtime.models import Block

pytestmark = pytest.mark.unchecked  # layers are trained


class Counting(nn.Module):
    """Computes something else each time, by no operation that a recording could see."""

    def __init__(self):
        super().__init__()
        self.up, self.calls = nn.Linear(32, 32), 0

    def forward(self, x):
        self.calls += 1
        return x + self.up(x) * self.calls


@pytest.mark.parametrize(("make", "wanted"), [(Block, True), (Counting, False)])
def test_layers_that_compute_something_else_each_time_are_not_run_again(make, wanted):
    x = torch.randn(1, 8, 32, requires_grad=True)
    assert measure_layer(make(), (x,), {}, [], repeats=1).can_replay == wanted
