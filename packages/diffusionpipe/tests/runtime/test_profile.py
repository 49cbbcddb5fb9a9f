from unittest import mock

import torch
from torch import nn

import diffusionpipe as dp
from diffusionpipe.profiler import measure


class _Clock:
    now = 0.0

    def perf_counter(self):
        return self.now


def _job(clock, seconds):
    """A job whose one layer takes so many seconds."""
    linear = nn.Linear(4, 4)

    def call(state):
        clock.now += seconds
        return {"output": linear(state["x"])}

    return dp.Job(
        dp.chain([dp.ChainLayer("only", call, ("x",), ("output",), (linear,))]),
        {"f": lambda b: b["x"] * 2},
        lambda b, f, d: {"x": f["f"], "target": b["x"]},
        lambda output, target: (output - target).square().mean(1),
    )


def profile_rank():
    clock = _Clock()
    job = _job(clock, 1.0 + torch.distributed.get_rank())
    # The pool goes on to the next test, so the clock is put back.
    with mock.patch.object(measure, "time", clock):
        return dp.profile(job, {"x": torch.zeros(4, 4)}, sizes=[4])


def test_all_ranks_get_the_same_figures(pair):
    first, second = pair.run(profile_rank).results
    assert first == second
    assert first.num_ranks == 2
    assert first.forward_s == ((1.5,),)
