from hypothesis import given
from hypothesis import strategies as st

from swift.recovery.transfer import Fetch, list_fetches, plan_shares


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
