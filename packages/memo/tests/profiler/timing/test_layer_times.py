"""Which layers may be run again: those whose backward is then the same to the bit."""

import pytest
import torch
from torch import nn

from memo.profiler.timing.layer_times import are_as_close, measure_layer

from ...runtime.models import Block

pytestmark = pytest.mark.unchecked  # layers are trained


class Counting(nn.Module):
    """Computes something else each time, by no operation that a recording could see."""

    def __init__(self):
        super().__init__()
        self.up, self.calls = nn.Linear(32, 32), 0

    def forward(self, x):
        self.calls += 1
        return x + self.up(x) * self.calls


class Unwatched:
    """A stopwatch that takes no time."""

    def __init__(self):
        self.spent = {}

    def product(self, function, args, kwargs):
        return function(*args, **kwargs)


@pytest.mark.parametrize(("make", "wanted"), [(Block, True), (Counting, False)])
def test_layers_that_compute_something_else_each_time_are_not_run_again(make, wanted):
    x = torch.randn(1, 8, 32, requires_grad=True)
    assert measure_layer(make(), (x,), {}, [], repeats=1).can_replay == wanted


def test_measuring_ends_where_two_measurements_agree(monkeypatch):
    """Seconds of forward, backward and replay a round: the first round is left out, and the third's forward is late."""
    calls = []
    readings = iter([9.0, 9.0, 9.0, 1.0, 1.0, 1.0, 2.0, 1.0, 1.0, 1.04, 1.3, 1.0] + [5.0] * 30)

    class Clock:
        def __sub__(self, other):
            return next(readings)

    monkeypatch.setattr("memo.profiler.timing.layer_times.now", lambda _: Clock())
    monkeypatch.setattr(
        "memo.profiler.timing.layer_times.Stopwatch", lambda *_: calls.append(1) or Unwatched()
    )
    x = torch.randn(1, 8, 32, requires_grad=True)
    times = measure_layer(Block(), (x,), {}, [])
    assert len(calls) == 4
    assert (times.forward_s, times.backward_s, times.replay_s) == (1.0, 1.0, 1.0)


@pytest.mark.parametrize(
    ("noise", "error", "wanted"),
    [
        (1e-3, 2e-3, True),
        (1e-3, 2e-2, False),
        (0.0, 0.0, True),
        (0.0, 1e-6, False),
        (0.5, 0.5, False),
    ],
)
def test_sums_in_any_order_differ_by_rounding_and_nothing_else(noise, error, wanted):
    plain = torch.randn(64, 64)
    again, repeated = (plain + size * torch.randn(64, 64) for size in (error, noise))
    assert are_as_close(plain, again, repeated) == wanted
