"""Advantages against loops that write out their definitions, one token at a time."""

import math
import statistics
import time

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.utils._python_dispatch import TorchDispatchMode

from hybridflow.rl import advantages
from shared.errors import ConfigError, DataError


def some(seed: int, batch: int = 5, tokens: int = 9, dtype=torch.float64):
    """Rewards, values and a mask with holes and a right padding."""
    random = torch.Generator().manual_seed(seed)
    rewards, values = torch.randn(2, batch, tokens, generator=random, dtype=dtype)
    mask = torch.rand(batch, tokens, generator=random) < 0.7
    lengths = torch.randint(0, tokens + 1, (batch, 1), generator=random)
    return rewards, values, mask & (torch.arange(tokens) < lengths)


def looped_gae(rewards, values, mask, gamma, lam):
    """As on paper, over only the tokens that count."""
    found, returns = torch.zeros_like(rewards), torch.zeros_like(rewards)
    for row, (reward, value, counts) in enumerate(
        zip(rewards.tolist(), values.tolist(), mask.tolist(), strict=True)
    ):
        following = advantage = 0.0
        for t in reversed([t for t, c in enumerate(counts) if c]):
            delta = reward[t] + gamma * following - value[t]
            advantage = delta + gamma * lam * advantage
            following = value[t]
            found[row, t], returns[row, t] = advantage, advantage + value[t]
    return found, returns


@given(st.integers(0, 10**6), st.floats(0, 1), st.floats(0, 1), st.integers(1, 12))
def test_gae_is_its_definition(seed, gamma, lam, tokens):
    rewards, values, mask = some(seed, tokens=tokens)
    found = advantages.gae(rewards, values, mask, gamma, lam)
    for ours, defined in zip(found, looped_gae(rewards, values, mask, gamma, lam), strict=True):
        torch.testing.assert_close(ours, defined, rtol=1e-12, atol=1e-12)
        assert (ours[~mask] == 0).all()


def test_gae_by_hand():
    rewards = torch.tensor([[0.0, 9.0, 0.0, 1.0]])
    values = torch.tensor([[0.5, 9.0, 0.25, 0.5]])
    mask = torch.tensor([[1.0, 0.0, 1.0, 1.0]])
    found, returns = advantages.gae(rewards, values, mask, 0.5, 0.5)
    # 0.5; 0 + 0.25 - 0.25 + 0.25 * 0.5 = 0.125; 0 + 0.125 - 0.5 + 0.25 * 0.125 = -0.34375
    assert found.tolist() == [[-0.34375, 0.0, 0.125, 0.5]]
    assert returns.tolist() == [[0.15625, 0.0, 0.375, 1.0]]


def test_gae_with_lambda_1_returns_the_discounted_rewards_and_with_0_the_errors():
    rewards, values, mask = some(1)
    _, returns = advantages.gae(rewards, values, mask, 0.9, 1.0)
    torch.testing.assert_close(returns, advantages.reward_to_go(rewards, mask, 0.9))
    whole = torch.ones_like(mask)
    found, _ = advantages.gae(rewards, values, whole, 0.9, 0.0)
    following = torch.cat([values[:, 1:], torch.zeros(len(values), 1)], 1)
    torch.testing.assert_close(found, rewards + 0.9 * following - values)


def test_a_tools_tokens_are_as_though_they_were_not_there():
    rewards, values, _ = some(2)
    without = advantages.gae(rewards, values, torch.ones_like(rewards), 0.97, 0.9)
    places = torch.tensor([0, 1, 4, 5, 6, 9, 10, 11, 13])
    wide_rewards, wide_values = torch.full((2, 5, 15), math.nan, dtype=torch.float64)
    mask = torch.zeros(5, 15, dtype=torch.bool)
    wide_rewards[:, places], wide_values[:, places], mask[:, places] = rewards, values, True
    for wide, narrow in zip(
        advantages.gae(wide_rewards, wide_values, mask, 0.97, 0.9), without, strict=True
    ):
        assert torch.equal(wide[:, places], narrow)
        assert (wide[~mask] == 0).all()


def test_gae_neither_depends_on_other_rows_nor_on_what_pads():
    rewards, values, mask = some(3)
    order = torch.tensor([3, 0, 4, 2, 1])
    found = torch.stack(advantages.gae(rewards, values, mask, 0.9, 0.8))
    moved = advantages.gae(rewards[order], values[order], mask[order], 0.9, 0.8)
    assert torch.equal(found[:, order], torch.stack(moved))
    padded = torch.nn.functional.pad(torch.stack([rewards, values]), (0, 4), value=7.0)
    wide_mask = torch.nn.functional.pad(mask, (0, 4))
    wide = advantages.gae(padded[0], padded[1], wide_mask, 0.9, 0.8)
    assert torch.equal(torch.stack(wide)[..., :9], found)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_types_stay_and_masks_may_be_numbers(dtype):
    rewards, values, mask = some(4, dtype=dtype)
    found = advantages.gae(rewards, values, mask, 0.9, 0.8)
    as_numbers = advantages.gae(rewards, values, mask.to(dtype), 0.9, 0.8)
    for one, other in zip(found, as_numbers, strict=True):
        assert one.dtype == dtype
        assert torch.equal(one, other)
    assert advantages.reinforce_plus_plus(rewards, mask, 0.9).dtype == dtype


class Counted(TorchDispatchMode):
    """Counts the operations of torch."""

    num_operations = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.num_operations += 1
        return func(*args, **(kwargs or {}))


def test_gae_takes_as_many_operations_for_many_responses_as_for_one():
    counts = []
    for batch in (1, 128):
        rewards, values, mask = some(5, batch, 32, torch.float32)
        with Counted() as counted:
            advantages.gae(rewards, values, mask, 1.0, 0.95)
        counts.append(counted.num_operations)
    assert counts[0] == counts[1] <= 4 * 32


@pytest.mark.slow  # on a machine that does much else it is not
def test_gae_is_quick():
    rewards, values, mask = some(5, 128, 32, torch.float32)
    took = []
    for _ in range(20):
        start = time.perf_counter()
        advantages.gae(rewards, values, mask, 1.0, 0.95)
        took.append(time.perf_counter() - start)
    assert min(took) < 2e-3, f"128 x 32 took {min(took) * 1e3:.2f} ms"


@pytest.mark.parametrize(("gamma", "lam"), [(1.1, 0.9), (0.9, -0.1), (math.nan, 0.9)])
def test_discounts_out_of_range_are_refused(gamma, lam):
    rewards, values, mask = some(0)
    with pytest.raises(ConfigError, match=r"expected a number in \[0, 1\]"):
        advantages.gae(rewards, values, mask, gamma, lam)


@given(st.lists(st.tuples(st.integers(-3, 3), st.floats(-100, 100)), max_size=12))
def test_groups_are_their_definitions(pairs):
    pairs += [(group, score + 1) for group, score in pairs]  # at least two of each
    pairs = pairs[1::2] + pairs[::2]
    group = torch.tensor([g for g, _ in pairs], dtype=torch.int64)
    scores = torch.tensor([s for _, s in pairs], dtype=torch.float64)
    found = [
        advantages.grpo(scores, group),
        advantages.dr_grpo(scores, group),
        advantages.rloo(scores, group),
    ]
    for row, (own_group, score) in enumerate(pairs):
        members = [s for g, s in pairs if g == own_group]
        mean, std = statistics.fmean(members), statistics.stdev(members)
        others = (sum(members) - score) / (len(members) - 1)
        defined = (score - mean) / (std + 1e-6), score - mean, score - others
        for ours, theirs in zip(found, defined, strict=True):
            assert ours[row].item() == pytest.approx(theirs, abs=1e-7, rel=1e-6)


@pytest.mark.parametrize("of", [advantages.grpo, advantages.dr_grpo, advantages.rloo])
def test_groups_follow_their_rows_and_not_their_names(of):
    scores = torch.randn(12, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    group = torch.tensor([5, 5, 5, -2, -2, 9, 9, 9, 9, 0, 0, 0])
    found = of(scores, group)
    order = torch.randperm(12, generator=torch.Generator().manual_seed(1))
    torch.testing.assert_close(of(scores[order], group[order]), found[order])
    torch.testing.assert_close(of(scores, -7 * group + 3), found)
    torch.testing.assert_close(of(scores + 1000, group), found)
    sums = torch.zeros(20, dtype=torch.float64).index_add_(0, group + 2, found)
    torch.testing.assert_close(sums, torch.zeros(20, dtype=torch.float64))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@given(score=st.floats(-1e6, 1e6, width=32), size=st.integers(2, 33))
def test_a_group_of_equals_has_exactly_nothing_to_say(dtype, score, size):
    scores, group = torch.full((size,), score, dtype=dtype), torch.full((size,), 4)
    for of in (advantages.grpo, advantages.dr_grpo, advantages.rloo):
        found = of(scores, group)
        assert found.dtype == dtype
        assert (found == 0).all()


@pytest.mark.parametrize("of", [advantages.grpo, advantages.dr_grpo, advantages.rloo])
def test_bad_groups_and_scores_are_refused(of):
    with pytest.raises(ConfigError, match=r"group 7: .* got one; sample n >= 2"):
        of(torch.tensor([1.0, 2.0, 3.0]), torch.tensor([3, 7, 3]))
    with pytest.raises(DataError, match="got nan in row 2"):
        of(torch.tensor([1.0, 2.0, math.nan, 4.0]), torch.tensor([3, 3, 3, 3]))
    with pytest.raises(DataError, match="got inf in row 0"):
        of(torch.tensor([math.inf, 2.0]), torch.tensor([3, 3]))
    assert of(torch.zeros(0), torch.zeros(0, dtype=torch.int64)).shape == (0,)


@pytest.mark.parametrize("of", [advantages.grpo, advantages.dr_grpo, advantages.rloo])
@given(
    rows=st.lists(
        st.tuples(st.integers(0, 3), st.floats(-100, 100), st.booleans()), min_size=1, max_size=16
    )
)
def test_dropped_rows_are_as_if_they_were_not_there(of, rows):
    rows += [(group, score + 1, not dropped) for group, score, dropped in rows]
    group = torch.tensor([g for g, _, _ in rows])
    scores = torch.tensor([s for _, s, _ in rows], dtype=torch.float64)
    is_dropped = torch.tensor([d for _, _, d in rows])
    # What a row is worth that has no score is not looked at.
    found = of(torch.where(is_dropped, math.nan, scores), group, is_dropped=is_dropped)
    assert (found[is_dropped] == 0).all()
    left = [[k for k in range(len(rows)) if rows[k][0] == g and not rows[k][2]] for g in range(4)]
    assert all(found[k] == 0 for members in left if len(members) == 1 for k in members)
    kept = [k for members in left if len(members) > 1 for k in members]
    torch.testing.assert_close(found[kept], of(scores[kept], group[kept]))


@pytest.mark.parametrize("of", [advantages.grpo, advantages.dr_grpo, advantages.rloo])
def test_a_group_of_which_one_or_none_is_left_has_nothing_to_say(of):
    scores, group = torch.tensor([1.0, 5.0, 2.0, 4.0, 3.0, 9.0]), torch.tensor([0, 0, 1, 1, 2, 2])
    dropped = torch.tensor([True, False, True, True, False, False])
    found = of(scores, group, is_dropped=dropped)
    assert found[:4].tolist() == [0, 0, 0, 0]
    assert found[4] < 0 < found[5]
    with pytest.raises(ConfigError, match=r"group 2: .* got one"):
        of(scores[:5], group[:5], is_dropped=dropped[:5])


def test_remax_is_what_is_still_to_come_less_the_greedy_score():
    rewards, _, mask = some(6)
    greedy = torch.tensor([0.5, -1.0, 0.0, 2.0, 1.0], dtype=torch.float64)
    found = advantages.remax(rewards, mask, greedy)
    for row in range(5):
        for t in range(9):
            rest = sum(rewards[row, u].item() for u in range(t, 9) if mask[row, u])
            defined = rest - greedy[row].item() if mask[row, t] else 0.0
            assert found[row, t].item() == pytest.approx(defined, abs=1e-12)
    with pytest.raises(DataError, match="row 3"):
        advantages.remax(rewards, mask, torch.tensor([0, 0, 0, math.nan, 0], dtype=torch.float64))


@given(st.integers(0, 10**6), st.floats(0, 1))
def test_reward_to_go_is_its_definition(seed, gamma):
    rewards, _, mask = some(seed)
    found = advantages.reward_to_go(rewards, mask, gamma)
    for row in range(5):
        rest = 0.0
        for t in reversed(range(9)):
            if mask[row, t]:
                rest = rewards[row, t].item() + gamma * rest
            defined = rest if mask[row, t] else 0.0
            assert found[row, t].item() == pytest.approx(defined, abs=1e-12)


@given(st.integers(0, 10**6), st.booleans(), st.floats(-50, 50))
def test_whitening_is_its_definition(seed, shift_mean, offset):
    values, _, mask = some(seed)
    values = values + offset
    members = values[mask].tolist()
    found = advantages.whiten(values, mask, shift_mean=shift_mean)
    if len(members) < 2:
        assert torch.equal(found, values)
        return
    mean, scale = statistics.fmean(members), (statistics.variance(members) + 1e-8) ** -0.5
    for ours, value in zip(found[mask].tolist(), members, strict=True):
        defined = (value - mean) * scale + (0 if shift_mean else mean)
        assert ours == pytest.approx(defined, rel=1e-6, abs=1e-6)
    assert (found[~mask] == 0).all()


@settings(max_examples=30)
@given(st.integers(0, 10**6), st.integers(0, 5))
def test_ranks_whiten_by_the_moments_of_all(seed, cut):
    values, _, mask = some(seed)
    parts = [(values[:cut], mask[:cut]), (values[cut:], mask[cut:])]
    total = torch.stack([advantages.moments(*part) for part in parts]).sum(0)
    torch.testing.assert_close(total, advantages.moments(values, mask))
    found = torch.cat([advantages.whiten(*part, global_moments=total) for part in parts])
    torch.testing.assert_close(found, advantages.whiten(values, mask))


def test_whitening_survives_equals_masked_infinities_and_one_token():
    mask = torch.tensor([[True, True, False]])
    values = torch.tensor([[0.1, 0.1, math.inf]])
    assert advantages.whiten(values, mask).tolist() == [[0.0, 0.0, 0.0]]
    # The variance of these equals is rounded to less than 0.
    large = advantages.whiten(torch.full((1, 3), 100000.1, dtype=torch.float64), mask | True)
    assert large.abs().max() < 1e-6
    only = torch.tensor([[True, False, False]])
    assert torch.equal(advantages.whiten(values, only), values)
    far = torch.tensor([[1e4, 1e4 + 1, 0.0]])
    torch.testing.assert_close(
        advantages.whiten(far, mask), torch.tensor([[-(0.5**0.5), 0.5**0.5, 0.0]])
    )


def test_reinforce_plus_plus_is_whitened():
    rewards, _, mask = some(8, 20, 12)
    found = advantages.reinforce_plus_plus(rewards, mask, 0.9)
    assert found[mask].mean().item() == pytest.approx(0, abs=1e-12)
    assert found[mask].var().item() == pytest.approx(1, abs=1e-6)
    go = advantages.reward_to_go(rewards, mask, 0.9)
    assert torch.corrcoef(torch.stack([go[mask], found[mask]]))[0, 1].item() == pytest.approx(1)


def test_a_score_goes_to_the_last_token_that_counts():
    mask = torch.tensor([[1, 1, 0, 0], [1, 0, 1, 0], [0, 0, 0, 0], [1, 1, 1, 1]]).bool()
    scores = torch.tensor([1.0, 2.0, 3.0, 4.0])
    last = [[0, 1, 0, 0], [0, 0, 2, 0], [0, 0, 0, 0], [0, 0, 0, 4]]
    assert advantages.token_rewards(scores, mask).tolist() == last
    kl = torch.where(mask, 0.5, math.nan)
    found = advantages.token_rewards(scores, mask, kl, 0.1)
    torch.testing.assert_close(found, torch.tensor(last) - 0.05 * mask)
    torch.testing.assert_close(found.sum(1), mask.any(1) * scores - 0.05 * mask.sum(1))
    with pytest.raises(ConfigError, match="needs kl="):
        advantages.token_rewards(scores, mask, beta=0.1)
    with pytest.raises(DataError, match="row 1"):
        advantages.token_rewards(torch.tensor([0, math.nan, 0, 0]), mask)


def test_a_responses_number_goes_to_each_of_its_tokens():
    mask = torch.tensor([[1.0, 1.0, 0.0], [0.0, 0.0, 0.0]])
    found = advantages.expand(torch.tensor([2.0, math.nan], dtype=torch.float64), mask)
    assert found.dtype == torch.float64
    assert found.tolist() == [[2, 2, 0], [0, 0, 0]]


def test_advantages_are_constants():
    rewards, values, mask = some(9)
    values.requires_grad_()
    found, returns = advantages.gae(rewards, values, mask, 1.0, 0.95)
    assert not found.requires_grad
    assert not returns.requires_grad
    assert not advantages.whiten(values, mask).requires_grad
