"""Aggregation: against loops, and the same however a batch is cut."""

import itertools
from typing import get_args

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from hybridflow.rl.aggregate import Mode, aggregate, denominator, masked
from shared.errors import ConfigError

MODES = get_args(Mode)


def some(seed: int, batch: int = 6, tokens: int = 7, share: float = 0.6):
    random = torch.Generator().manual_seed(seed)
    losses = torch.randn(batch, tokens, generator=random, dtype=torch.float64)
    return losses, torch.rand(batch, tokens, generator=random) < share


def looped(losses, mask, mode, norm):
    rows = [
        [x for x, counts in zip(*row, strict=True) if counts]
        for row in zip(losses.tolist(), mask.tolist(), strict=True)
    ]
    rows = [row for row in rows if row]
    if not rows:
        return 0.0
    total = sum(map(sum, rows))
    return {
        "token-mean": total / sum(map(len, rows)),
        "token-sum": total,
        "seq-mean-token-sum": total / len(rows),
        "seq-mean-token-sum-norm": total / len(rows) / norm,
        "seq-mean-token-mean": sum(sum(row) / len(row) for row in rows) / len(rows),
    }[mode]


@pytest.mark.parametrize("mode", MODES)
@given(seed=st.integers(0, 10**6), share=st.floats(0, 1))
def test_modes_are_their_definitions(mode, seed, share):
    losses, mask = some(seed, share=share)
    found = aggregate(losses, mask, mode)
    assert found.dtype == losses.dtype
    assert found.item() == pytest.approx(looped(losses, mask, mode, 7), abs=1e-12)
    own = aggregate(losses, mask, mode, denominator(mask, mode, 2.5))
    assert own.item() == pytest.approx(looped(losses, mask, mode, 2.5), abs=1e-12)


@pytest.mark.parametrize("mode", MODES)
@given(
    seed=st.integers(0, 10**6),
    cuts=st.lists(st.integers(0, 6), max_size=4),
    norm=st.sampled_from([None, 16]),
)
def test_micro_batches_with_the_global_denominator_add_up_to_the_whole(mode, seed, cuts, norm):
    losses, mask = some(seed, share=0.3)
    whole_losses, parts_losses = (losses.clone().requires_grad_() for _ in range(2))
    ends = [0, *sorted(cuts), 6]
    parts = [slice(*pair) for pair in itertools.pairwise(ends)]
    step = torch.stack([denominator(mask[part], mode, norm) for part in parts]).sum()
    assert step.item() == denominator(mask, mode, norm).item()
    found = [aggregate(parts_losses[part], mask[part], mode, step) for part in parts]
    for share in found:  # as accumulation does
        share.backward()
    whole = aggregate(whole_losses, mask, mode, step.item())
    whole.backward()
    torch.testing.assert_close(torch.stack(found).sum(), whole)
    torch.testing.assert_close(parts_losses.grad, whole_losses.grad)


@pytest.mark.parametrize("mode", MODES)
def test_rows_may_move_padding_may_grow_and_empty_rows_may_come(mode):
    losses, mask = some(3)
    divisor = denominator(mask, mode, 7)
    found = aggregate(losses, mask, mode, divisor)
    order = torch.tensor([5, 2, 0, 1, 4, 3])
    torch.testing.assert_close(aggregate(losses[order], mask[order], mode, divisor), found)
    wide = torch.nn.functional.pad(losses, (0, 3, 0, 2), value=torch.nan)
    wide_mask = torch.nn.functional.pad(mask, (0, 3, 0, 2))
    wide_divisor = denominator(wide_mask, mode, 7)
    torch.testing.assert_close(aggregate(wide, wide_mask, mode, wide_divisor), found)


@pytest.mark.parametrize("mode", MODES)
def test_gradients_are_those_of_the_value(mode):
    losses, mask = some(4, 3, 4)
    losses.requires_grad_()
    assert torch.autograd.gradcheck(lambda x: aggregate(x, mask, mode), losses)


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("shape", [(3, 4), (0, 4)])
def test_where_nothing_counts_there_is_0_and_no_gradient(mode, shape):
    losses = torch.full(shape, torch.nan, requires_grad=True)
    mask = torch.zeros(shape)
    found = aggregate(losses, mask, mode)
    found.backward()
    assert found.item() == 0
    assert torch.equal(losses.grad, torch.zeros(shape))
    assert denominator(mask, mode).item() == 0


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("bad", [torch.nan, torch.inf])
def test_what_is_masked_never_shows(mode, bad):
    losses, mask = some(5)
    clean = aggregate(losses, mask, mode)
    dirty = torch.where(mask, losses, bad).requires_grad_()
    found = aggregate(dirty, mask.double(), mode)
    found.backward()
    assert torch.equal(found, clean)
    assert (dirty.grad[~mask] == 0).all()
    assert dirty.grad.isfinite().all()


def test_half_precision_rounds_the_result_alone():
    losses = torch.ones(1, 1027, dtype=torch.bfloat16)
    found = aggregate(losses, torch.ones(1, 1027), "token-mean", 2054)
    assert found.dtype == torch.bfloat16
    assert found.item() == 0.5


def test_what_cannot_be_is_refused():
    losses, mask = some(0)
    for of in (lambda m: aggregate(losses, mask, m), lambda m: denominator(mask, m)):
        with pytest.raises(ConfigError, match=r"expected one of token-mean, .* got 'mean'"):
            of("mean")
    with pytest.raises(ConfigError, match="norm: expected a positive"):
        denominator(mask, "seq-mean-token-sum-norm", 0)


def test_masked_has_no_gradient_where_masked():
    values = torch.tensor([[1.0, -torch.inf]], requires_grad=True)
    kept = masked(values, torch.tensor([[True, False]]))
    kept.exp().square().sum().backward()
    assert kept.tolist() == [[1, 0]]
    assert values.grad[0, 1] == 0
