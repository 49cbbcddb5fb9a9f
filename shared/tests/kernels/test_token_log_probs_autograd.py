"""Log-probabilities and entropies from hidden states: against torch, in blocks and in shards."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.utils._python_dispatch import TorchDispatchMode

from shared.comms import Group, RankPool
from shared.kernels.token_log_probs import cpu
from shared.kernels.token_log_probs.autograd import token_log_probs


def drawn(rows=7, vocabulary=12, dim=5, seed=0, dtype=torch.float64):
    draw = torch.Generator().manual_seed(seed)
    hidden = torch.randn(rows, dim, generator=draw, dtype=torch.float64).to(dtype)
    weight = torch.randn(vocabulary, dim, generator=draw, dtype=torch.float64).to(dtype)
    tokens = torch.randint(0, vocabulary, (rows,), generator=draw)
    return hidden.requires_grad_(), weight.requires_grad_(), tokens


def expected(hidden, weight, tokens, temperature=1.0):
    told = torch.distributions.Categorical(logits=hidden @ weight.t() / temperature)
    return told.log_prob(tokens), told.entropy()


def gradients(found, hidden, weight, seed=1):
    """Of a sum with different weights for each output, so that no row can stand in for another."""
    draw = torch.Generator().manual_seed(seed)
    weights = [torch.randn(len(part), generator=draw, dtype=torch.float64) for part in found]
    total = sum((part * w.to(part.dtype)).sum() for part, w in zip(found, weights, strict=True))
    return torch.autograd.grad(total, [hidden, weight])


@settings(max_examples=25)
@given(
    rows=st.integers(1, 9),
    vocabulary=st.integers(2, 17),
    temperature=st.sampled_from([0.3, 1.0, 2.5]),
    seed=st.integers(0, 99),
)
def test_values_and_gradients_are_those_of_torch_distributions(rows, vocabulary, temperature, seed):
    hidden, weight, tokens = drawn(rows, vocabulary, seed=seed)
    found = token_log_probs(hidden, weight, tokens, temperature=temperature)
    wanted = expected(hidden, weight, tokens, temperature)
    torch.testing.assert_close(found, wanted)
    torch.testing.assert_close(gradients(found, hidden, weight), gradients(wanted, hidden, weight))


@pytest.mark.parametrize("output", [0, 1, None], ids=["log-prob", "entropy", "both"])
@pytest.mark.parametrize("temperature", [1.0, 0.7])
def test_gradients_are_the_slopes_of_the_values(output, temperature):
    hidden, weight, tokens = drawn(4, 6, 3)

    def function(states, head):
        found = token_log_probs(states, head, tokens, temperature=temperature)
        return found if output is None else found[output]

    assert torch.autograd.gradcheck(function, (hidden, weight))


@pytest.mark.parametrize("most_logits", [1, 24, 36, 37, 1000])
def test_blocks_are_the_whole(monkeypatch, most_logits):
    hidden, weight, tokens = drawn(7, 12)
    wanted = token_log_probs(hidden, weight, tokens, temperature=0.5)
    wanted_grads = gradients(wanted, hidden, weight)
    monkeypatch.setattr(cpu, "MOST_LOGITS", most_logits)
    found = token_log_probs(hidden, weight, tokens, temperature=0.5)
    torch.testing.assert_close(found, wanted, rtol=1e-14, atol=1e-14)
    torch.testing.assert_close(gradients(found, hidden, weight), wanted_grads)


class Products(TorchDispatchMode):
    """Notes how many elements products of one width have, block by block."""

    def __init__(self, num_inner):
        super().__init__()
        self.num_inner, self.made = num_inner, []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        found = func(*args, **(kwargs or {}))
        if func is torch.ops.aten.mm.default and args[0].shape[1] == self.num_inner:
            self.made.append(found.numel())
        return found


def test_no_logits_are_kept_and_no_more_are_made_at_once_than_allowed(monkeypatch):
    monkeypatch.setattr(cpu, "MOST_LOGITS", 500)
    hidden, weight, tokens = drawn(64, 100, 4)
    kept = []
    with (
        Products(4) as products,
        torch.autograd.graph.saved_tensors_hooks(lambda t: kept.append(t) or t, lambda t: t),
    ):
        found = token_log_probs(hidden, weight, tokens)
    made = products.made
    assert max(made) <= 500
    assert sum(made) == 6400
    assert kept
    assert all(100 not in part.shape or part.data_ptr() == weight.data_ptr() for part in kept)
    assert sum(part.numel() for part in kept) <= hidden.numel() + weight.numel() + 4 * 64
    with Products(4) as products:
        gradients(found, hidden, weight)
    assert products.made == made


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("scale", [1e2, 1e4, 1e30])
def test_extreme_logits_give_finite_values_and_gradients(scale, dtype):
    hidden = torch.tensor([[scale], [-scale], [0.0]], dtype=dtype, requires_grad=True)
    weight = torch.tensor([[1.0], [-1.0], [0.5]], dtype=dtype, requires_grad=True)
    tokens = torch.tensor([0, 0, 2])
    found = token_log_probs(hidden, weight, tokens)
    wanted = expected(hidden.detach().double(), weight.detach().double(), tokens)
    torch.testing.assert_close(found[0].double(), wanted[0], rtol=1e-6, atol=1e-6)
    torch.testing.assert_close(found[1].double(), wanted[1], rtol=1e-6, atol=1e-6)
    grads = gradients(found, hidden, weight)
    assert all(part.isfinite().all() for part in (*found, *grads))
    assert found[0][1] <= -2 * scale * 0.999  # a token that is next to impossible stays finite


def test_no_rows_have_no_values_and_no_gradients():
    hidden, weight, tokens = drawn(0)
    found = token_log_probs(hidden, weight, tokens)
    assert [part.shape for part in found] == [(0,), (0,)]
    assert [part.dtype for part in found] == [torch.float64] * 2
    grads = gradients(found, hidden, weight)
    assert grads[0].shape == (0, 5)
    assert not grads[1].any()


def test_an_output_that_is_not_used_costs_nothing_of_the_other():
    hidden, weight, tokens = drawn()
    found, wanted = token_log_probs(hidden, weight, tokens), expected(hidden, weight, tokens)
    for mine, theirs in zip(found, wanted, strict=True):
        grads = torch.autograd.grad(mine.sum(), [hidden, weight], retain_graph=True)
        other = torch.autograd.grad(theirs.sum(), [hidden, weight], retain_graph=True)
        torch.testing.assert_close(grads, other)


def test_half_precision_answers_in_float32_as_near_as_torch_does():
    hidden, weight, tokens = drawn(64, 256, 32, dtype=torch.bfloat16)
    exact = expected(hidden.detach().double(), weight.detach().double(), tokens)
    found = token_log_probs(hidden, weight, tokens)
    assert [part.dtype for part in found] == [torch.float32] * 2
    plain = torch.distributions.Categorical(logits=(hidden @ weight.t()).float())
    plain = (plain.log_prob(tokens), plain.entropy())
    wide, heads = (part.detach().double().requires_grad_() for part in (hidden, weight))
    triples = [
        *zip(found, plain, exact, strict=True),
        *zip(
            gradients(found, hidden, weight),
            gradients(plain, hidden, weight),
            gradients(expected(wide, heads, tokens), wide, heads),
            strict=True,
        ),
    ]
    for mine, theirs, true in triples:
        assert (mine - true).abs().max() <= 2 * (theirs - true).abs().max()
    assert [mine.dtype for mine, _, _ in triples[2:]] == [torch.bfloat16] * 2


def on_a_shard(most_logits):
    """Runs on two ranks, which hold half of the vocabulary each."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(cpu, "MOST_LOGITS", most_logits)
        return answer_on(Group.world())


def answer_on(group):
    hidden, whole, tokens = drawn(9, 12, seed=4)
    start = 6 * group.rank
    weight = whole.detach()[start : start + 6].clone().requires_grad_()
    found = token_log_probs(hidden, weight, tokens, temperature=0.7, group=group)
    grads = gradients(found, hidden, weight)
    empty = token_log_probs(hidden[:0], weight, tokens[:0], group=group)
    assert [len(part) for part in empty] == [0, 0]
    return [*(part.detach() for part in found), *grads]


def test_shards_of_the_vocabulary_are_the_whole():
    hidden, weight, tokens = drawn(9, 12, seed=4)
    log_p = (hidden @ weight.t() / 0.7).log_softmax(1)
    wanted = log_p[torch.arange(9), tokens], -(log_p.exp() * log_p).sum(1)
    grads = gradients(wanted, hidden, weight)
    with RankPool(2) as pool:
        answers = [pool.run(on_a_shard, most_logits).results for most_logits in (1 << 20, 13)]
    for rank, answer in (pair for found in answers for pair in enumerate(found)):
        rows = grads[1][6 * rank : 6 * rank + 6]
        for found, true in zip(answer, [*wanted, grads[0], rows], strict=True):
            torch.testing.assert_close(found, true.detach(), rtol=1e-12, atol=1e-12)


def test_under_autocast_a_head_is_rounded_as_a_linear_layers():
    hidden, weight, tokens = drawn(dtype=torch.float32)
    with torch.autocast("cpu", torch.bfloat16):
        found = token_log_probs(hidden, weight, tokens)
        slopes = gradients(found, hidden, weight)
    assert [part.dtype for part in (*found, *slopes)] == [torch.float32] * 4
    narrow_hidden, narrow_weight = (
        one.detach().bfloat16().double().requires_grad_() for one in (hidden, weight)
    )
    wanted = expected(narrow_hidden, narrow_weight, tokens)
    torch.testing.assert_close(found, tuple(one.float() for one in wanted), rtol=1e-3, atol=1e-3)
    for one, other in zip(slopes, gradients(wanted, narrow_hidden, narrow_weight), strict=True):
        torch.testing.assert_close(one.double(), other, rtol=0.02, atol=0.02)
    assert all(one.dtype == torch.float64 for one in token_log_probs(*drawn()))
