import random
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from shared.errors import ConfigError
from swift import StepData
from swift.training.data import reseed, step_positions


def test_every_pass_reads_each_sample_once_in_another_order():
    read = [at for step in range(7) for at in step_positions(14, 6, seed=3, step=step)]
    passes = [read[start : start + 14] for start in range(0, 42, 14)]
    assert all(sorted(one) == list(range(14)) for one in passes)
    assert passes[0] != passes[1]
    assert passes[0] != [at for step in range(3) for at in step_positions(14, 6, 4, step)][:14]


def test_a_batch_may_be_larger_than_the_dataset():
    assert sorted(step_positions(3, 9, seed=0, step=1)) == [0, 0, 0, 1, 1, 1, 2, 2, 2]


def test_ranks_share_a_step_and_a_repeated_step_is_the_same():
    dataset = torch.utils.data.TensorDataset(torch.arange(100))
    parts = [
        StepData(
            dataset,
            12,
            seed=1,
            run=SimpleNamespace(rank=rank, world_size=3, reads_whole_batches=False),
        )
        for rank in range(3)
    ]
    read = torch.cat([part[5][0] for part in parts])
    assert read.tolist() == step_positions(100, 12, 1, 5)
    assert torch.equal(parts[1][5][0], parts[1][5][0])
    assert not torch.equal(parts[1][5][0], parts[1][6][0])


def test_neighbours_may_share_samples():
    dataset = torch.utils.data.TensorDataset(torch.arange(100))

    def part(rank, world_size=4):
        run = SimpleNamespace(rank=rank, world_size=world_size, reads_whole_batches=False)
        return StepData(dataset, 6, seed=1, run=run, shared_by=2)

    read = [part(rank)[5][0].tolist() for rank in range(4)]
    assert read[0] == read[1] == step_positions(100, 6, 1, 5)[:3]
    assert read[2] == read[3] == step_positions(100, 6, 1, 5)[3:]
    for world_size, shared in ((3, "3 ranks, 2 of which share"), (8, "8 ranks, 2 of")):
        with pytest.raises(ConfigError, match=shared):
            part(0, world_size)[5]


def draw():
    return torch.rand(3).tolist(), np.random.rand(3).tolist(), random.random()


def test_generators_follow_from_seed_step_rank_and_micro_batch():
    def drawn(*key):
        reseed(*key)
        return draw()

    keys = [(0, 0, 0, 0), (1, 0, 0, 0), (0, 1, 0, 0), (0, 0, 1, 0), (0, 0, 0, 1)]
    found = [drawn(*key) for key in keys]
    assert found == [drawn(*key) for key in keys]
    for source in range(3):
        assert len({str(one[source]) for one in found}) == len(keys)


def test_a_dataset_smaller_than_a_batch_is_refused():
    with pytest.raises(ConfigError, match="at most the dataset's 3 samples, got 4"):
        StepData([1, 2, 3], 4)
    StepData([1, 2, 3], 3)


class Stream(torch.utils.data.IterableDataset):
    """One with a length: it inherits a `__getitem__` that raises."""

    def __iter__(self):
        return iter(range(8))

    def __len__(self):
        return 8


@pytest.mark.parametrize("stream", [iter([1]), Stream()], ids=["iterator", "IterableDataset"])
def test_a_stream_is_refused(stream):
    with pytest.raises(ConfigError, match="expected one with a length and samples by number"):
        StepData(stream, 4)


def test_a_batch_must_divide_among_the_ranks():
    data = StepData(
        [1, 2, 3, 4], 4, run=SimpleNamespace(rank=0, world_size=3, reads_whole_batches=False)
    )
    with pytest.raises(ConfigError, match="multiple of the 3 ranks"):
        data[0]


def test_a_spare_reads_nothing():
    data = StepData(
        [1, 2, 3, 4], 4, run=SimpleNamespace(rank=None, world_size=2, reads_whole_batches=False)
    )
    with pytest.raises(ConfigError, match="on rank None"):
        data[0]


def test_collate_makes_the_batch():
    data = StepData(
        ["a", "b"],
        2,
        run=SimpleNamespace(rank=0, world_size=1, reads_whole_batches=False),
        collate="".join,
    )
    assert sorted(data[0]) == ["a", "b"]
