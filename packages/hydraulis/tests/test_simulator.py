"""Steps under every strategy: what they compute, and what that takes."""

from collections import Counter

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hydraulis.config import Cost, SequenceTooLong
from hydraulis.planner.degrees import DegreeCost
from hydraulis.report import draw_ranks, strategy_table
from hydraulis.simulator import STRATEGIES, PlacedMicroBatch, compare, simulate
from shared.errors import ConfigError

COST = DegreeCost(
    cost=Cost(a=1e-4, b=1e-2, c=0.1), cap=400, message_s=dict.fromkeys((2, 4, 8), 1e-3)
)
QUICK = [name for name in STRATEGIES if name != "FlexSP's program"]


def draw_lengths(count, seed=0):
    return np.clip(np.random.default_rng(seed).lognormal(3.5, 1, count).astype(int), 1, 1500)


def test_groups_wait_for_their_last_rank():
    work = [
        PlacedMicroBatch(first=0, degree=1, lengths=(10,)),
        PlacedMicroBatch(first=0, degree=2, lengths=(100, 100)),
        PlacedMicroBatch(first=2, degree=1, lengths=(10, 20)),
    ]
    one = 0.1 + 1e-4 * 100 + 0.1
    two = 0.1 + 2 * ((1e-4 * 10_000 + 1.0) / 2 + 0.1)
    three = 0.1 + 1e-4 * (100 + 400) + 0.3
    found = simulate(work, 4, COST)
    assert found.tolist() == pytest.approx([one + two, one + two, three, 0.0])


@pytest.mark.parametrize("name", STRATEGIES)
@settings(deadline=None, max_examples=12)
@given(
    lengths=st.lists(st.integers(1, 800), min_size=1, max_size=20),
    num_ranks=st.sampled_from([2, 4, 8]),
)
def test_every_document_is_computed_within_the_tokens_of_its_ranks(name, lengths, num_ranks):
    step = np.array(lengths)
    work = STRATEGIES[name](step, num_ranks, COST, np.random.default_rng(0))
    found = Counter(length for one in work for length in one.lengths)
    if name.startswith("padded"):
        assert sum(found.values()) == len(step)
        assert all(len(set(one.lengths)) == 1 for one in work)
        rows = np.sort([length for one in work for length in one.lengths])
        assert (rows >= np.sort(step)).all()
    else:
        assert found == Counter(step.tolist())
    for one in work:
        assert sum(one.lengths) <= one.degree * COST.cap
        assert 0 <= one.first <= num_ranks - one.degree


def test_balanced_ranks_end_first_and_none_below_the_bound():
    lengths = draw_lengths(2000)
    found = compare(lengths, 8, COST, tokens_per_step=12_000, num_steps=5, names=QUICK)
    by_name = {one.name: one for one in found}
    ours = by_name["hydraulis"]
    assert all(len(one.step_s) == 5 for one in found)
    for one in found:
        assert one.gap >= 0, "the bound holds for every strategy"
        assert one.median_s >= ours.median_s * (1 - 1e-9)
    # The control: were a random order as good, there would be nothing to balance.
    assert by_name["packed, random order"].median_s > 1.15 * ours.median_s
    assert by_name["padded, random order"].median_s > 1.5 * ours.median_s
    assert max(ours.idle_shares) < 0.03


def test_steps_depend_on_the_seed_alone():
    lengths = draw_lengths(300)
    settings_ = {"tokens_per_step": 3000, "num_steps": 2, "names": ["hydraulis"]}
    one, again, other = (
        compare(lengths, 4, COST, seed=seed, **settings_)[0].step_s for seed in (0, 0, 1)
    )
    assert one == again != other


def test_what_fits_nowhere_is_told(tmp_path):
    with pytest.raises(SequenceTooLong, match=r"sequence 1: expected at most 800 tokens, got 801"):
        compare([5, 801], 2, COST, tokens_per_step=10)
    with pytest.raises(ConfigError, match=r"some of padded, .* got 1, 1 and magic"):
        compare([5], 2, COST, tokens_per_step=10, num_steps=1, names=["magic"])
    with pytest.raises(ConfigError, match="got 0, 8"):
        compare([], 2, COST, tokens_per_step=10)
    # More documents than one micro-batch holds: planners of a single one take several.
    many = compare([400] * 9, 2, COST, tokens_per_step=3600, names=QUICK)
    assert all(np.isfinite(one.median_s) for one in many)
    draw_ranks(many, tmp_path / "a.svg")
    text = strategy_table(many)
    assert text.splitlines()[-1].startswith("hydraulis")
    assert "1.00x" in text.splitlines()[-1]
