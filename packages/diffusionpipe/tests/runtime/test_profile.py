from unittest import mock

import pytest
import torch
from torch import nn

import diffusionpipe as dp
from diffusionpipe.profiler import measure
from shared.errors import ConfigError


class _Clock:
    now = 0.0

    def perf_counter(self):
        return self.now


def _job(clock, seconds, **options):
    """A job whose one layer takes so many seconds."""
    linear = nn.Linear(4, 4, **options)

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
    # Four floats a sample, whatever the number of samples.
    assert first.frozen_working_bytes == {"f": 16}
    assert first.forward_s == ((1.5,),)


def profile_unlike_jobs():
    """Ranks whose one layer has a bias, or none."""
    job = _job(_Clock(), 0.0, bias=torch.distributed.get_rank() == 0)
    with pytest.raises(ConfigError) as told:
        dp.profile(job, {"x": torch.zeros(4, 4)}, sizes=[4])
    return str(told.value)


def test_ranks_with_unlike_jobs_are_refused(pair):
    for text in pair.run(profile_unlike_jobs).results:
        assert "expected the same job and sizes on every rank, got different ones" in text
