import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from shared.comms import Group, RankPool
from swift.recovery.transfer import Fetch, list_fetches, move, plan_shares

SIZES = (300_000, 7, 20)
"""Elements of the parameters: of the first more than a message of its own has, of the others less."""


@given(st.integers(0, 10**6), st.integers(1, 8), st.sets(st.integers(0, 9), min_size=1), st.data())
def test_shares_cover_a_tensor_once(numel, itemsize, holders, data):
    order = data.draw(st.permutations(sorted(holders)))
    shares = plan_shares(Fetch(10, 0, tuple(order)), numel, itemsize)
    spans = sorted((share.start, share.start + share.length) for share in shares)
    ends = [0, *(end for _, end in spans)]
    assert [start for start, _ in spans] == ends[:-1]
    assert ends[-1] == numel
    assert {share.src for share in shares} <= holders


def test_a_large_tensor_is_divided_equally():
    shares = plan_shares(Fetch(3, 0, (0, 1, 2)), 300_000, 4)
    assert [share.length for share in shares] == [100_000] * 3
    assert [share.src for share in shares] == [0, 1, 2]


def test_holders_take_turns_with_small_tensors():
    shares = [
        plan_shares(Fetch(3, entry, (0, 1, 2)), 100, 4, number)
        for entry in range(2)
        for number in range(3)
    ]
    assert [[share.src for share in one] for one in shares] == [[0], [1], [2], [1], [2], [0]]


def test_all_that_have_an_entry_give_it_the_named_one_first():
    found = list_fetches({1: {0: 2, 1: 2}, 0: {1: 2}}, [[0, 1, 2, 3], [4, 5]])
    assert found == [Fetch(0, 1, (2, 3)), Fetch(1, 0, (2, 0, 3)), Fetch(1, 1, (2, 3))]


def test_fetches_stay_in_their_set():
    assert list_fetches({5: {0: 4}}, [[0, 1], [4, 5]]) == [Fetch(5, 0, (4,))]


class Entries:
    """Parameters with an average each, and a rest that has another length on each rank."""

    def __init__(self, rank, is_lost):
        self.taken = {}
        self._own = [
            {
                "param": torch.full((size,), -1.0 if is_lost else entry + 0.5),
                "average": torch.full((size,), -1.0 if is_lost else -float(entry)),
            }
            for entry, size in enumerate(SIZES)
        ]
        self._own.append({"rest": torch.full((5 + 3 * rank,), rank, dtype=torch.uint8)})

    def versions(self):
        return [4] * len(self._own)

    def state_of(self, entry):
        return self._own[entry]

    prepare = state_of

    def allocate(self, entry):
        return {name: torch.empty_like(one) for name, one in self._own[entry].items()}

    def fill(self, entry, tensors, version):
        assert version == 4
        self.taken[entry] = {name: one.clone() for name, one in tensors.items()}


def move_to(lost, named):
    """What each rank takes, and the bytes of it, as the lost ones are filled."""
    group = Group.world()
    entries = Entries(group.rank, group.rank in lost)
    last = len(SIZES)
    fetch = {rank: dict.fromkeys(range(last + 1), named) for rank in lost}
    num_bytes = move(
        group, entries, list_fetches(fetch, [[0, 1, 2, 3]]), 4,
        is_lost=group.rank in lost,
        rest_bytes=[5 + 3 * rank for rank in range(4)],
        num_tensors={rank: [2] * last + [1] for rank in range(4)},
    )  # fmt: skip
    return entries.taken, num_bytes


@pytest.fixture(scope="module")
def four_ranks():
    with RankPool(4) as pool:
        yield pool


@pytest.mark.parametrize(("lost", "named"), [((3,), 0), ((3,), 2), ((0, 2), 1), ((0, 1, 3), 2)])
def test_newcomers_take_every_value_from_all_and_the_rest_from_the_named_one(
    four_ranks, lost, named
):
    for rank, (taken, num_bytes) in enumerate(four_ranks.run(move_to, lost, named).results):
        if rank not in lost:
            assert (taken, num_bytes) == ({}, 0)
            continue
        for entry, size in enumerate(SIZES):
            assert torch.equal(taken[entry]["param"], torch.full((size,), entry + 0.5))
            assert torch.equal(taken[entry]["average"], torch.full((size,), -float(entry)))
        rest = torch.full((5 + 3 * named,), named, dtype=torch.uint8)
        assert torch.equal(taken[len(SIZES)]["rest"], rest)
        assert num_bytes == 8 * sum(SIZES) + len(rest)
