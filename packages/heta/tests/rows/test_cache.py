"""What each policy keeps, against brute force and its own rule."""

from itertools import product

import pytest
import torch

from heta.rows.cache import CACHE_POLICIES, Cache, fill_cache
from shared.errors import ConfigError

COUNTS = {
    "a": torch.tensor([5.0, 0.0, 3.0, 3.0]),
    "b": torch.tensor([4, 1, 9]),
    "c": torch.empty(0),
}
MISS_S = {"a": 1e-6, "b": 3e-6, "c": 1.0}
ROW_BYTES = {"a": 8, "b": 8, "c": 4}


def saved_s(chosen, counts=COUNTS, miss_s=MISS_S):
    return sum(float(counts[name][ids].sum()) * miss_s[name] for name, ids in chosen.items())


def used_bytes(chosen, row_bytes=ROW_BYTES):
    return sum(len(ids) * row_bytes[name] for name, ids in chosen.items())


def best_saving(counts, miss_s, row_bytes, budget):
    rows = [(float(c) * miss_s[n], row_bytes[n]) for n in counts for c in counts[n]]
    best = 0.0
    for chosen in product([0, 1], repeat=len(rows)):
        pairs = [row for row, is_chosen in zip(rows, chosen, strict=True) if is_chosen]
        if sum(size for _, size in pairs) <= budget:
            best = max(best, sum(saving for saving, _ in pairs))
    return best


def fill(budget, policy="knapsack"):
    return fill_cache(COUNTS, MISS_S, ROW_BYTES, budget, policy)


@pytest.mark.parametrize("budget", [0, 7, 8, 20, 33, 48, 56, 1000])
def test_the_knapsack_saves_as_much_as_any_choice(budget):
    chosen = fill(budget)
    assert used_bytes(chosen) <= budget
    assert saved_s(chosen) == pytest.approx(best_saving(COUNTS, MISS_S, ROW_BYTES, budget))
    for policy in CACHE_POLICIES:
        assert saved_s(fill(budget, policy)) <= saved_s(chosen) * (1 + 1e-9)


def test_the_knapsack_of_unequal_rows_loses_at_most_the_row_that_does_not_fit():
    random = torch.Generator().manual_seed(0)
    for budget in range(0, 60, 7):
        counts = {n: torch.randint(0, 9, (5,), generator=random) for n in ("a", "b")}
        miss_s, row_bytes = {"a": 1e-6, "b": 5e-6}, {"a": 3, "b": 11}
        chosen = fill_cache(counts, miss_s, row_bytes, budget)
        best = best_saving(counts, miss_s, row_bytes, budget)
        largest = max(float(counts[n].max()) * miss_s[n] for n in counts)
        assert used_bytes(chosen, row_bytes) <= budget
        assert saved_s(chosen, counts, miss_s) >= best - largest - 1e-12


def test_the_knapsack_prefers_many_small_rows_to_one_that_saves_more():
    counts = {"wide": torch.tensor([5.0]), "narrow": torch.ones(10)}
    chosen = fill_cache(counts, {"wide": 1.0, "narrow": 1.0}, {"wide": 10, "narrow": 1}, 10)
    assert [len(ids) for ids in chosen.values()] == [0, 10]


@pytest.mark.parametrize("policy", list(CACHE_POLICIES))
def test_no_budget_keeps_nothing_and_a_huge_one_all_that_is_read(policy):
    assert used_bytes(fill(0, policy)) == 0
    chosen = fill(10**12, policy)
    is_all = policy == "uniform"
    assert chosen["a"].tolist() == ([0, 1, 2, 3] if is_all else [0, 2, 3])
    assert chosen["b"].tolist() == [0, 1, 2]
    assert chosen["c"].tolist() == []
    assert all(ids.dtype == torch.int64 for ids in chosen.values())


def test_each_policy_follows_its_rule():
    # A row a byte: 9 and 4 of b at three times the seconds, then 5 and the first 3 of a.
    assert {n: ids.tolist() for n, ids in fill(24).items()} == {"a": [0], "b": [0, 2], "c": []}
    # The hottest: 9, 5, 4.
    assert {n: ids.tolist() for n, ids in fill(24, "hotness").items()}["a"] == [0]
    assert {n: ids.tolist() for n, ids in fill(16, "hotness").items()} == {
        "a": [0],
        "b": [2],
        "c": [],
    }
    # Accesses times seconds are 11 to 42: of 53 bytes 11 go to a, whose rows have 8.
    assert {n: ids.tolist() for n, ids in fill(53, "heta").items()}["a"] == [0, 2, 3]
    few = fill_cache(
        {"a": torch.ones(9), "b": torch.ones(9)}, {"a": 1.0, "b": 3.0}, {"a": 1, "b": 1}, 8, "heta"
    )
    assert [len(ids) for ids in few.values()] == [2, 6]
    # The same share of each type's rows.
    half = fill_cache(
        {"a": torch.ones(8), "b": torch.ones(4)},
        {"a": 1.0, "b": 9.0},
        {"a": 2, "b": 4},
        16,
        "uniform",
    )
    assert {n: ids.tolist() for n, ids in half.items()} == {"a": [0, 1, 2, 3], "b": [0, 1]}


def test_what_a_type_cannot_use_goes_to_the_others():
    counts = {"a": torch.tensor([100.0]), "b": torch.ones(9)}
    chosen = fill_cache(counts, {"a": 1.0, "b": 1.0}, {"a": 1, "b": 1}, 6, "heta")
    assert [len(ids) for ids in chosen.values()] == [1, 5]


def test_invalid_caches_are_refused():
    for arguments, sentence in (
        ((COUNTS, {"a": 1.0}, ROW_BYTES, 8), "of the same types"),
        ((COUNTS, MISS_S, ROW_BYTES, -1), "a budget and seconds from 0"),
        ((COUNTS, MISS_S, {**ROW_BYTES, "a": 0}, 8), "bytes above 0"),
        ((COUNTS, {**MISS_S, "a": -1.0}, ROW_BYTES, 8), "seconds from 0"),
        ((COUNTS, MISS_S, ROW_BYTES, 8, "lru"), "lru"),
    ):
        with pytest.raises(ConfigError, match=sentence):
            fill_cache(*arguments)
    with pytest.raises(ConfigError, match="cache: expected 0 bytes or more, got -1"):
        Cache(-1)
    with pytest.raises(ConfigError, match="lru"):
        Cache(1, "lru")
    assert Cache("2MiB").bytes == 2 << 20
