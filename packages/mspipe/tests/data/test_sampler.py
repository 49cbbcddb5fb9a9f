"""A node's newest events before any time, each event once."""

import numpy as np
import pytest
import torch

from mspipe.data.events import Events
from mspipe.data.sampler import Sampler
from shared.errors import DataError

TIMES = np.array([5, 7, 7, 9, 12])


def samplers():
    src, dst = [0, 0, 1, 0, 2], [1, 2, 0, 3, 0]
    return [Sampler(Events(src, dst, times), [3]) for times in (TIMES, TIMES.astype(float))]


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
def test_times_between_whole_ones_see_the_events_before_them(dtype):
    nodes, times = torch.zeros(6, dtype=torch.int64), torch.tensor([5, 5.5, 7, 7.25, 9.5, 12.001])
    whole, floats = (sampler.sample(nodes, times.to(dtype)) for sampler in samplers())
    for name in ("nodes", "roots", "root_times", "neighbors", "dt", "eids", "starts"):
        assert torch.equal(getattr(whole, name), getattr(floats, name)), name
    assert whole.starts.diff().tolist() == [0, 1, 1, 3, 3, 3]
    assert whole.dt[0].item() == 0.5
    assert whole.begin == floats.begin == 5


@pytest.mark.parametrize("time", [float("nan"), float("inf"), -float("inf"), 1e19])
def test_times_that_are_not_finite_are_refused(time):
    for sampler in samplers():
        with pytest.raises(DataError, match="times: expected finite ones"):
            sampler.sample(torch.zeros(1, dtype=torch.int64), torch.tensor([time]))


@pytest.mark.parametrize("time", [-1e18, -0.5, 13.0, 1e18])
def test_times_far_from_the_stream_see_none_or_all_of_it(time):
    for sampler in samplers():
        sampled = sampler.sample(torch.zeros(1, dtype=torch.int64), torch.tensor([time]))
        assert sampled.eids.tolist() == ([4, 3, 2] if time > 0 else [])


def test_an_event_of_a_node_with_itself_counts_once():
    events = Events([3, 3, 1], [3, 3, 3], [1, 2, 3])
    sampled = Sampler(events, [4]).sample(torch.tensor([3, 1]), torch.tensor([9, 9]))
    assert sampled.eids.tolist() == [2, 1, 0, 2]
    assert sampled.nodes[sampled.neighbors].tolist() == [1, 3, 3, 3]
