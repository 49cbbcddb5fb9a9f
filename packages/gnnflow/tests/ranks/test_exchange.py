"""Who is asked what, and what moves when training edges are evened out, against plain Python."""

import numpy as np
import torch
from hypothesis import given
from hypothesis import strategies as st

from gnnflow.ranks.exchange import SendPlan
from gnnflow.ranks.sampler import rebalance


@given(
    owners=st.lists(st.integers(-1, 4), max_size=40),
)
def test_routes_keep_the_order_of_items(owners):
    send_plan = SendPlan.to(torch.tensor(owners, dtype=torch.int64), 5)
    expected = [[at for at, owner in enumerate(owners) if owner == rank] for rank in range(5)]
    assert [part.tolist() for part in send_plan.order.split(send_plan.sends)] == expected


@given(
    owners=st.lists(st.integers(-1, 2), min_size=1, max_size=9),
    seed=st.integers(0, 99),
    num_askers=st.integers(0, 12),
)
def test_answers_come_to_all_who_asked(owners, seed, num_askers):
    noise = np.random.default_rng(seed)
    send_plan = SendPlan.to(torch.tensor(owners, dtype=torch.int64), 3)
    num_came = torch.from_numpy(noise.integers(0, 4, len(send_plan.order)))
    which = torch.from_numpy(noise.integers(0, len(owners), num_askers))
    # An answer tells its question and its number.
    came = [
        (item, number)
        for item, count in zip(send_plan.order.tolist(), num_came.tolist(), strict=True)
        for number in range(count)
    ]
    counts = dict(zip(send_plan.order.tolist(), num_came.tolist(), strict=True))
    row, place = send_plan.answers(num_came, which)
    assert [(asker, *came[at]) for asker, at in zip(row.tolist(), place.tolist(), strict=True)] == [
        (asker, item, number)
        for asker, item in enumerate(which.tolist())
        for number in range(counts.get(item, 0))
    ]


@given(counts=st.lists(st.integers(0, 30), min_size=1, max_size=6), seed=st.integers(0, 99))
def test_rebalancing_loses_nothing_and_moves_the_least(counts, seed):
    places = torch.from_numpy(np.random.default_rng(seed).permutation(sum(counts)))
    given_edges = places.split(counts)
    found = rebalance(given_edges)
    sizes = [len(own) for own in found]
    assert max(sizes) - min(sizes) <= 1
    assert torch.cat(found).sort().values.tolist() == list(range(sum(counts)))
    assert all(own.tolist() == sorted(own.tolist()) for own in found)
    num_moved = sum(
        len(set(own.tolist()) - set(before.tolist()))
        for own, before in zip(found, given_edges, strict=True)
    )
    # What any even split has to move: the excess of the largest over what they may keep.
    share, more = divmod(sum(counts), len(counts))
    ordered = sorted(counts, reverse=True)
    least = sum(max(0, n - share - (at < more)) for at, n in enumerate(ordered))
    assert num_moved == least


def test_rebalancing_no_ranks():
    assert rebalance([]) == []
