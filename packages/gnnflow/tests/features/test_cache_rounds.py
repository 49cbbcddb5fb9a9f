"""What a cache finds out about rounds: whether restoring pays, and whether keeping rows does."""

import pytest
import torch

from gnnflow.features.cache import FeatureCache
from gnnflow.features.store import FeatureStore


def store_of(num_rows):
    return FeatureStore(edge=torch.arange(float(num_rows))[:, None])


def rounds_of(policy, restored, asked):
    """Rows that each of 12 rounds loads ahead, and moves in all, with 2,000 slots for 20,000 rows."""
    cache = FeatureCache(store_of(20_000), edge=0.1, policy=policy)
    moved = []
    for number in range(12):
        cache.reset_stats()
        cache.restore(restored(number))
        num_loaded = cache.stats()["edge"].bytes_from_store // 4
        for batch in asked(number).split(50):
            assert torch.equal(cache.fetch("edge", batch)[:, 0].long(), batch)
        moved.append((num_loaded, cache.stats()["edge"].bytes_from_store // 4))
    return moved


@pytest.mark.parametrize("policy", ["lru", "keep", "lfu"])
def test_restoring_what_nobody_asks_for_stops(policy):
    moved = rounds_of(
        policy,
        lambda number: torch.arange(500) + 500 * number,
        lambda number: torch.arange(10_000, 10_500) + 500 * number,
    )
    assert moved[0][0] == 500
    assert all(loaded == 16 for loaded, _ in moved[1:])


@pytest.mark.parametrize("policy", ["lru", "keep", "lfu"])
def test_restoring_what_is_asked_for_goes_on_and_moves_nothing_twice(policy):
    ids = torch.arange(500)
    moved = rounds_of(policy, lambda n: ids + 500 * n, lambda n: ids + 500 * n)
    assert moved == [(500, 500)] * 12


@pytest.mark.parametrize("policy", ["lru", "keep", "lfu"])
@pytest.mark.parametrize(
    ("num_asked", "num_loaded"),
    [(12, 16), (13, 16), (14, 17), (399, 498), (400, 600)],
)
def test_four_fifths_saved_lift_the_limit_and_less_gives_a_quarter_more(
    policy, num_asked, num_loaded
):
    """Of 500 rows that were restored, some are asked for; then 600 others are to be restored."""
    cache = FeatureCache(store_of(20_000), edge=0.1, policy=policy)
    cache.restore(torch.arange(500))
    cache.fetch("edge", torch.arange(num_asked))
    cache.reset_stats()
    cache.restore(torch.arange(1_000, 1_600))
    assert cache.stats()["edge"].bytes_from_store // 4 == num_loaded


@pytest.mark.parametrize(("num_asked", "num_loaded"), [(13, 16), (14, 34), (15, 34)])
def test_a_limit_is_doubled_where_four_fifths_were_saved(num_asked, num_loaded):
    cache = FeatureCache(store_of(20_000), edge=0.1, policy="lru")
    cache.restore(torch.arange(500))
    cache.fetch("edge", torch.arange(14))
    for begin, expected in ((1_000, 17), (2_000, num_loaded)):
        cache.reset_stats()
        cache.restore(torch.arange(begin, begin + 600))
        assert cache.stats()["edge"].bytes_from_store // 4 == expected
        cache.fetch("edge", torch.arange(begin, begin + num_asked))


def test_hits_of_the_rows_next_to_leave_count_against_restoring():
    """2,000 slots are full; the oldest are used again while 100 restored rows wait, and hit."""
    cache = FeatureCache(store_of(20_000), edge=0.1, policy="lru")
    cache.fetch("edge", torch.arange(2_000))
    cache.restore(torch.arange(5_000, 5_100))
    cache.fetch("edge", torch.cat([torch.arange(5_000, 5_100), torch.arange(100, 600)]))
    cache.reset_stats()
    cache.restore(torch.arange(6_000, 6_100))
    # The queue has had 2,600 entries since, so that its oldest quarter is taken for 651 slots, of
    # which 500 were hit: of the 100 rows that have left 76 would have been. 24 were saved.
    assert cache.stats()["edge"].bytes_from_store // 4 == 24 * 5 // 4


def test_restoring_stops_where_rows_that_wait_push_out_others_that_are_used():
    """2,000 slots: 1,950 rows are asked for each round, and then those restored."""
    hot, ids = torch.arange(1_950), torch.arange(500)
    draw = torch.Generator().manual_seed(0)
    new = [ids + 2_000 + 500 * number for number in range(12)]
    moved = rounds_of(
        "lru",
        lambda n: new[n],
        lambda n: torch.cat([hot[torch.randperm(1_950, generator=draw)], new[n]]),
    )
    assert moved[0][0] == 500
    assert max(loaded for loaded, _ in moved[6:]) < 500


def test_rows_are_kept_while_passes_over_more_than_fits_come_back():
    """A loop over three times the slots: LRU has always just lost what comes next."""
    store = store_of(600)
    caches = {name: FeatureCache(store, edge=1 / 3, policy=name) for name in ("lru", "keep")}
    for cache in caches.values():
        for number in range(40):
            if number == 30:
                cache.reset_stats()
            for batch in torch.arange(600).split(40):
                cache.fetch("edge", batch)
    stats = {name: cache.stats()["edge"] for name, cache in caches.items()}
    assert (stats["lru"].hits, stats["lru"].num_kept) == (0, 0)
    assert stats["keep"].num_kept == 180
    assert stats["keep"].hits == 10 * 180


def test_no_rows_are_kept_where_the_newest_are_asked_for_and_those_kept_leave():
    store = store_of(12_000)
    caches = {name: FeatureCache(store, edge=1 / 60, policy=name) for name in ("lru", "keep")}
    hits = {}
    for name, cache in caches.items():
        for _ in range(20):
            for batch in torch.arange(600).split(40):
                cache.fetch("edge", batch)
        assert (cache.stats()["edge"].num_kept >= 100) == (name == "keep")
        draw = torch.Generator().manual_seed(0)
        for end in range(800, 12_000, 10):
            cache.fetch("edge", end - torch.randint(1, 190, (20,), generator=draw))
            if end == 10_000:
                assert cache.stats()["edge"].num_kept == 0
                cache.reset_stats()
        hits[name] = cache.stats()["edge"].hits
    assert hits["keep"] == hits["lru"] > 1_500
