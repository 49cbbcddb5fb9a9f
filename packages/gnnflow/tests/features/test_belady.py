"""Belady's bound against all choices there are, and policies against the bound."""

from functools import lru_cache
from itertools import combinations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from gnnflow.features.belady import count_belady_hits
from gnnflow.features.cache import FeatureCache
from gnnflow.features.store import FeatureStore
from shared.errors import ConfigError


@given(
    batches=st.lists(st.lists(st.integers(0, 30), max_size=12), max_size=25),
    fraction=st.sampled_from([0.0, 0.1, 0.3]),
)
def test_no_policy_hits_more_often_than_belady(batches, fraction):
    batches = [torch.tensor(batch, dtype=torch.int64) for batch in batches]
    bound = count_belady_hits(batches, round(31 * fraction))
    for policy in ("lru", "keep", "lfu"):
        cache = FeatureCache(FeatureStore(edge=torch.rand(31, 3)), edge=fraction, policy=policy)
        for batch in batches:
            cache.fetch("edge", batch)
        assert cache.stats()["edge"].hits <= bound


@given(
    batches=st.lists(st.frozensets(st.integers(0, 5), max_size=4), max_size=7),
    capacity=st.integers(0, 4),
)
def test_belady_is_the_best_of_all_choices(batches, capacity):
    @lru_cache(None)
    def best(at, held):
        if at == len(batches):
            return 0
        there = sorted(held | batches[at])
        kept = [frozenset(some) for some in combinations(there, min(capacity, len(there)))]
        return len(held & batches[at]) + max(best(at + 1, some) for some in kept)

    given_twice = [torch.tensor([*batch, *batch], dtype=torch.int64) for batch in batches]
    assert count_belady_hits(given_twice, capacity) == best(0, frozenset())


def test_belady_refuses_a_negative_capacity():
    with pytest.raises(ConfigError, match="got -1"):
        count_belady_hits([torch.tensor([1])], -1)
