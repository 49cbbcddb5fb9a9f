import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from shared.errors import DataError
from shared.kernels.edge_softmax import SoftmaxState, edge_softmax, reference, softmax_state

INF = float("inf")


def random_rows(num_rows=9, nnz=60, heads=3, seed=0, dtype=torch.float64):
    """Rows with skewed numbers of edges, some without any, and logits of which some are -inf."""
    g = torch.Generator().manual_seed(seed)
    rows = (torch.rand(nnz, generator=g) ** 2 * num_rows).long()
    counts = torch.bincount(rows, minlength=num_rows + 2)
    indptr = torch.cat([torch.zeros(1, dtype=torch.int64), counts.cumsum(0)])
    logits = torch.randn(nnz, heads, generator=g, dtype=torch.float64) * 3
    logits[torch.rand(nnz, heads, generator=g) < 0.1] = -INF
    logits[indptr[1] : indptr[2], 0] = -INF
    return indptr, logits.to(dtype)


def rows_of(indptr):
    return [slice(*pair) for pair in zip(indptr[:-1].tolist(), indptr[1:].tolist(), strict=True)]


def merge(a: SoftmaxState, b: SoftmaxState) -> SoftmaxState:
    maximum = torch.maximum(a.maximum, b.maximum)
    shift = maximum.masked_fill(maximum == -INF, 0)
    of_a, of_b = (a.maximum - shift).exp(), (b.maximum - shift).exp()
    return SoftmaxState(
        maximum,
        a.total * of_a + b.total * of_b,
        a.weighted * of_a[..., None] + b.weighted * of_b[..., None],
    )


def quotient(state: SoftmaxState) -> torch.Tensor:
    return state.weighted / state.total.masked_fill(state.total == 0, 1)[..., None]


def test_the_reference_is_torchs_softmax_of_each_row():
    indptr, logits = random_rows()
    weights = reference.edge_softmax(indptr, logits)
    for row in rows_of(indptr):
        # torch has NaN where all logits are -inf.
        torch.testing.assert_close(weights[row], logits[row].softmax(0).nan_to_num(0))


@pytest.mark.parametrize(("heads", "dtype"), [(1, torch.float64), (3, torch.float32)])
def test_every_form_has_the_references_weights_and_gradients(form, heads, dtype):
    indptr, logits = random_rows(heads=heads, dtype=dtype)
    grad = torch.randn(logits.shape, dtype=dtype)
    ours = form.of("edge_softmax")
    structure = indptr.to(form.device)
    weights = ours.edge_softmax(structure, logits.to(form.device))
    expected = reference.edge_softmax(indptr, logits)
    torch.testing.assert_close(weights.cpu(), expected)
    torch.testing.assert_close(
        ours.edge_softmax_backward(structure, weights, grad.to(form.device)).cpu(),
        reference.edge_softmax_backward(indptr, expected, grad),
    )


@pytest.mark.parametrize(
    ("dim", "dtype"), [(1, torch.float32), (5, torch.float64), (40, torch.float32)]
)
def test_every_form_has_the_references_state_and_gradients(form, dim, dtype):
    indptr, logits = random_rows(heads=2, dtype=dtype)
    values = torch.randn(*logits.shape, dim, dtype=dtype)
    ours, device = form.of("edge_softmax"), form.device
    inputs = [tensor.to(device) for tensor in (indptr, logits, values)]
    expected = reference.softmax_state(indptr, logits, values)
    state = ours.softmax_state(*inputs)
    for mine, theirs in zip(state, expected, strict=True):
        torch.testing.assert_close(mine.cpu(), theirs)
    grads = [torch.randn_like(expected[2]), torch.randn_like(expected[3])]
    came = ours.softmax_state_backward(
        inputs[0], state[1], inputs[2], *(grad.to(device) for grad in grads)
    )
    expected = reference.softmax_state_backward(indptr, expected[1], values, *grads)
    for mine, theirs in zip(came, expected, strict=True):
        torch.testing.assert_close(mine.cpu(), theirs)


@pytest.mark.filterwarnings("ignore:invalid value:RuntimeWarning")
def test_nan_and_infinity_are_not_hidden(form):
    indptr = torch.tensor([0, 2, 4, 5], device=form.device)
    logits = torch.tensor([[torch.nan], [1.0], [INF], [0.0], [2.0]], device=form.device)
    weights = form.of("edge_softmax").edge_softmax(indptr, logits).cpu()
    assert weights.isnan()[:, 0].tolist() == [True, True, True, True, False]
    maximum = form.of("edge_softmax").softmax_state(indptr, logits, logits[:, :, None])[0]
    assert str(maximum[:, 0].tolist()) == "[nan, inf, 2.0]"


def test_gradients_are_those_of_differences():
    indptr, logits = random_rows(nnz=25)
    logits.requires_grad_()
    values = torch.randn(*logits.shape, 4, dtype=torch.float64, requires_grad=True)
    finite = logits.detach().clamp(min=-5).requires_grad_()
    assert torch.autograd.gradcheck(lambda x: edge_softmax(indptr, x), finite)
    inputs = (finite, values)
    assert torch.autograd.gradcheck(lambda x, v: quotient(softmax_state(indptr, x, v)), inputs)
    quotient(softmax_state(indptr, logits, values)).sum().backward()
    assert bool(logits.grad.isfinite().all())
    assert bool((logits.grad[logits == -INF] == 0).all())


def test_merged_parts_have_the_whole_mean_and_its_gradients():
    """Edges dealt to three parts, one of which has no edge of some rows."""
    indptr, logits = random_rows(nnz=80, heads=2)
    values = torch.randn(*logits.shape, 3, dtype=torch.float64)
    row = torch.repeat_interleave(torch.arange(len(indptr) - 1), indptr.diff())
    part = torch.arange(80) % 3
    part[row == 0] = 1
    cotangent = torch.randn(len(indptr) - 1, 2, 3, dtype=torch.float64)

    def mean_of_parts(x, v):
        states = []
        for number in range(3):
            counts = torch.bincount(row[part == number], minlength=len(indptr) - 1)
            begins = torch.cat([torch.zeros(1, dtype=torch.int64), counts.cumsum(0)])
            states.append(softmax_state(begins, x[part == number], v[part == number]))
        return quotient(merge(states[0], merge(states[1], states[2])))

    def mean_of_all(x, v):
        weights = reference.edge_softmax(indptr, x)
        return torch.zeros_like(cotangent).index_add(0, row, weights[..., None] * v)

    outcomes = []
    for mean in (mean_of_parts, mean_of_all):
        inputs = logits.clamp(min=-6).requires_grad_(), values.clone().requires_grad_()
        out = mean(*inputs)
        outcomes.append([out, *torch.autograd.grad((out * cotangent).sum(), inputs)])
    for ours, theirs in zip(*outcomes, strict=True):
        torch.testing.assert_close(ours, theirs)
    torch.testing.assert_close(mean_of_parts(logits, values), mean_of_all(logits, values))


@settings(max_examples=25)
@given(st.integers(0, 2**31), st.floats(-1e4, 1e4), st.integers(0, 80))
def test_weights_sum_to_one_and_ignore_a_shift(seed, shift, nnz):
    indptr, logits = random_rows(nnz=nnz, seed=seed)
    weights = edge_softmax(indptr, logits)
    torch.testing.assert_close(edge_softmax(indptr, logits + shift), weights, rtol=1e-6, atol=1e-9)
    for row in rows_of(indptr):
        has_logit = (logits[row] > -INF).any(0)
        torch.testing.assert_close(weights[row].sum(0), has_logit.double())
    state = softmax_state(indptr, logits, logits.clamp(min=-9)[..., None])
    assert not any(bool(part.isnan().any()) for part in state)
    assert not state.weighted[state.maximum == -INF].any()


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_half_types_are_computed_wide(dtype):
    indptr, logits = random_rows(dtype=dtype)
    weights = edge_softmax(indptr, logits)
    assert weights.dtype == dtype
    torch.testing.assert_close(weights, edge_softmax(indptr, logits.float()).to(dtype))
    leaf = logits.clamp(min=-5).requires_grad_()
    values = torch.randn(*logits.shape, 2).to(dtype).requires_grad_()
    state = softmax_state(indptr, leaf, values)
    assert {part.dtype for part in state} == {torch.float32}
    (state.weighted.sum() + edge_softmax(indptr, leaf).square().sum()).backward()
    assert (leaf.grad.dtype, values.grad.dtype) == (dtype, dtype)


def test_non_contiguous_inputs_and_no_edges():
    indptr, logits = random_rows()
    assert torch.equal(
        edge_softmax(indptr, logits.t().contiguous().t()), edge_softmax(indptr, logits)
    )
    nothing = torch.zeros(4, dtype=torch.int64)
    assert edge_softmax(nothing, torch.zeros(0, 2)).shape == (0, 2)
    state = softmax_state(nothing, torch.zeros(0, 2), torch.zeros(0, 2, 5))
    assert bool((state.maximum == -INF).all())
    assert not state.total.any()
    assert state.weighted.shape == (3, 2, 5)
    assert not state.weighted.any()
    assert edge_softmax(nothing[:1], torch.zeros(0, 2)).shape == (0, 2)


def test_the_maximum_has_no_gradient():
    indptr, logits = random_rows()
    state = softmax_state(indptr, logits.requires_grad_(), torch.ones(*logits.shape, 1).double())
    assert not state.maximum.requires_grad
    assert state.total.requires_grad


def test_several_threads_give_the_same_bits(two_threads):
    indptr, logits = random_rows(num_rows=3000, nnz=60_000, heads=4, dtype=torch.float32)
    values = torch.randn(60_000, 4, 16)
    outcomes = []
    for _ in range(2):
        leaves = logits.clamp(min=-9).requires_grad_(), values.clone().requires_grad_()
        state = softmax_state(indptr, *leaves)
        weights = edge_softmax(indptr, leaves[0])
        loss = (state.weighted.sin()).sum() + weights.square().sum()
        outcomes.append([*state, weights, *torch.autograd.grad(loss, leaves)])
        torch.set_num_threads(1)
    # The loss itself is summed by torch, whose order depends on the threads; its gradient does not.
    assert all(map(torch.equal, *outcomes))


def test_edges_beyond_indptr_are_refused():
    with pytest.raises(DataError, match="end at the number of edges, 5, got 4"):
        edge_softmax(torch.tensor([0, 4]), torch.zeros(5, 1))
    with pytest.raises(DataError, match="end at the number of edges, 5, got 6"):
        softmax_state(torch.tensor([0, 6]), torch.zeros(5, 1), torch.zeros(5, 1, 1))
