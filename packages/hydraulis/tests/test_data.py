"""Documents, lengths and the sampler."""

import numpy as np
import pytest

import hydraulis as hy
from shared.errors import ConfigError, DataError

COST = hy.Cost(a=1e-6, b=1e-2, c=0.1)


def lengths(count=200, seed=0):
    draw = np.random.default_rng(seed)
    return np.clip(np.exp(draw.normal(5.95, 1.258, count)), 1, 8000).astype(int)


def samplers(num_ranks=3, **changed):
    given = {"tokens_per_step": 20_000, "cost": COST, "cap": 8192, "num_ranks": num_ranks} | changed
    return [hy.BalancedBatchSampler(lengths(), rank=rank, **given) for rank in range(num_ranks)]


@pytest.mark.parametrize("sync", ["step", "micro-batch"])
def test_ranks_share_an_epoch_without_overlap(sync):
    ranks = [list(sampler) for sampler in samplers(sync=sync)]
    assert len({len(mine) for mine in ranks}) == 1
    seen = [i for mine in ranks for part in mine for i in part]
    assert sorted(seen) == list(range(200))
    assert all(lengths()[part].sum() <= 8192 for mine in ranks for part in mine)


def test_an_epoch_is_a_shuffle_of_its_own_and_can_be_repeated():
    (one,) = samplers(1)
    first = list(one)
    assert list(one) == first
    one.set_epoch(1)
    assert list(one) != first
    one.set_epoch(0)
    assert list(one) == first
    assert list(samplers(1, seed=5)[0]) != first


@pytest.mark.parametrize("sync", ["step", "micro-batch"])
def test_its_length_is_that_of_the_epoch_on_every_rank(sync):
    ranks = samplers(sync=sync, tokens_per_step=9000)
    counts = set()
    for epoch in range(8):
        for sampler in ranks:
            sampler.set_epoch(epoch)
        counts.add(len(list(ranks[0])))
        assert {len(sampler) for sampler in ranks} == {len(list(ranks[0]))}
    assert len(counts) > 1, "a shuffle may take another number"


def test_a_loop_whose_ranks_would_not_meet_is_warned_of(caplog):
    given = {"tokens_per_step": 9000, "num_ranks": 2, "rank": 0, "cost": COST, "cap": 4096}
    sampler = hy.BalancedBatchSampler([3000] * 6, **given)
    assert len(list(sampler.steps())) == 2
    assert not caplog.messages
    for _ in range(2):
        assert sum(map(len, sampler)) in (2, 3, 4)
    (told,) = caplog.messages
    assert "ranks have 1 to 2 micro-batches in a step" in told
    assert list(hy.BalancedBatchSampler([2000] * 8, **given))
    assert list(hy.BalancedBatchSampler([3000] * 6, sync="micro-batch", **given))
    assert len(caplog.messages) == 1, "equal numbers need no warning"


def test_a_data_loader_takes_it():
    torch_data = pytest.importorskip("torch.utils.data")
    (sampler,) = samplers(1)
    loader = torch_data.DataLoader(list(range(200)), batch_sampler=sampler, collate_fn=list)
    assert len(loader) == len(list(sampler))
    assert list(loader) == list(sampler)


@pytest.mark.parametrize(
    ("changed", "told"),
    [
        ({"cap": 0}, "cap: expected at least 1"),
        ({"tokens_per_step": 0}, "tokens_per_step: expected at least 1"),
        ({"sync": "epoch"}, "expected one of step, micro-batch"),
        ({"cap": 50}, r"sequence \d+: expected at most 50 tokens"),
        ({"num_ranks": 300}, "a document for each of 300 ranks, got 200"),
    ],
)
def test_arguments_outside_their_range_are_refused(changed, told):
    with pytest.raises(ConfigError, match=told):
        samplers(**changed)


def test_a_rank_outside_the_ranks_is_refused():
    with pytest.raises(ConfigError, match="rank: expected 0 to 1, got 2"):
        hy.BalancedBatchSampler([5, 6], tokens_per_step=9, num_ranks=2, rank=2, cost=COST, cap=9)


@pytest.mark.unchecked
@pytest.mark.parametrize(
    ("changed", "told"),
    [
        ({"cap": "4k"}, "cap: expected a whole number, got '4k'"),
        ({"tokens_per_step": 9.5}, r"tokens_per_step: expected a whole number, got 9\.5"),
        ({"num_ranks": True}, "num_ranks: expected a whole number, got True"),
        ({"cost": "fast"}, "cost: expected a Cost, got 'fast'"),
        ({"cost": None}, "cost: expected a Cost, got None"),
        ({"lengths": ["a"]}, "lengths: expected a sequence of whole numbers"),
        ({"lengths": [5, 10**22]}, r"lengths\[1\]: expected a whole number .* at most"),
    ],
)
def test_arguments_of_other_kinds_are_refused_by_name(changed, told):
    given = {"lengths": [5, 6], "tokens_per_step": 9, "num_ranks": 1, "cost": COST, "cap": 9}
    with pytest.raises(ConfigError, match=told):
        hy.BalancedBatchSampler(rank=0, **(given | changed))


def test_the_standard_library_has_a_long_tail():
    sizes = np.array([len(text) for text in hy.data.python_source()])
    assert len(sizes) > 500
    assert sizes.max() > 20 * np.median(sizes)
    assert len(hy.data.python_source(limit=7)) == 7


def test_lengths_are_read_line_by_line(tmp_path):
    (tmp_path / "a.txt").write_text("5\n\n 70 \n")
    assert hy.data.read_lengths(tmp_path / "a.txt").tolist() == [5, 70]
    (tmp_path / "b.txt").write_text("tokens\n5\n")
    with pytest.raises(DataError, match=r"b\.txt:1: expected a whole .* got tokens; .* no header"):
        hy.data.read_lengths(tmp_path / "b.txt")
    (tmp_path / "c.txt").write_text("5\n" + "9" * 5000)
    with pytest.raises(DataError, match=r"c\.txt:2: expected a whole number .* at most \d+"):
        hy.data.read_lengths(tmp_path / "c.txt")
    with pytest.raises(DataError, match="expected lengths, a number on each line, got a folder"):
        hy.data.read_lengths(tmp_path)
