"""Maxima over segments, and the aggregations that autograd differentiates."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from shared.errors import ConfigError, DataError
from shared.kernels.segment import CSR, aggregate, reference, segment_max, spmm

REDUCTIONS = ["sum", "mean", "max"]


def random_csr(num_rows=13, num_cols=17, nnz=120, weighted=True, index_dtype=torch.int64) -> CSR:
    g = torch.Generator().manual_seed(0)
    # Squared: skewed degrees, and rows without any entry.
    dst = (torch.rand(nnz, generator=g) ** 2 * num_rows).long()
    src = torch.randint(0, num_cols, (nnz,), generator=g)
    weight = torch.randn(nnz, generator=g, dtype=torch.float64) if weighted else None
    csr = CSR.from_coo(dst, src, num_rows + 1, num_cols, weight)
    return CSR(csr.indptr, csr.indices.to(index_dtype), num_cols, csr.weight)


def random_x(num_rows, dim, seed=1, dtype=torch.float64) -> torch.Tensor:
    g = torch.Generator().manual_seed(seed)
    # Few distinct values, so that maxima tie.
    return torch.randint(-4, 5, (num_rows, dim), generator=g).to(dtype)


def brute_force_max(csr: CSR, x):
    """Maximum and first entry of each row and column, by Python's own `max`."""
    out = torch.zeros(csr.num_rows, x.shape[1], dtype=torch.float64)
    argmax = torch.full(out.shape, -1)
    for row in range(csr.num_rows):
        entries = range(int(csr.indptr[row]), int(csr.indptr[row + 1]))
        for col in range(x.shape[1] if entries else 0):
            terms = {
                entry: float(x[csr.indices[entry], col])
                * (1.0 if csr.weight is None else float(csr.weight[entry]))
                for entry in entries
            }
            argmax[row, col] = max(entries, key=terms.__getitem__)
            out[row, col] = terms[int(argmax[row, col])]
    return out, argmax


def run_max(form, csr: CSR, x, empty=0.0):
    csr = csr.to(form.device)
    found = form.of("segment").segment_max(
        csr.indptr, csr.indices, csr.weight, x.to(form.device), empty
    )
    return [part.cpu() for part in found]


@pytest.mark.parametrize("weighted", [True, False])
@pytest.mark.parametrize("dim", [1, 3, 17])
def test_the_reference_takes_the_first_of_the_largest(dim, weighted):
    csr, x = random_csr(weighted=weighted), random_x(17, dim)
    found = reference.segment_max(csr.indptr, csr.indices, csr.weight, x, 0.0)
    assert all(map(torch.equal, found, brute_force_max(csr, x)))


@pytest.mark.parametrize(
    ("dim", "weighted", "index_dtype", "dtype"),
    [
        (1, True, torch.int64, torch.float32),
        (3, False, torch.int32, torch.float64),
        (16, False, torch.int64, torch.bfloat16),
        (50, True, torch.int32, torch.float16),
        (300, True, torch.int64, torch.float32),
        (300, False, torch.int64, torch.float32),
    ],
)
def test_every_form_has_the_references_maxima(form, dim, weighted, index_dtype, dtype):
    csr = random_csr(weighted=weighted, index_dtype=index_dtype)
    # Products that every type has exactly: the interpreter truncates those of bfloat16.
    weight = None if csr.weight is None else csr.weight.sign()
    csr = CSR(csr.indptr, csr.indices, 17, weight)
    x = random_x(17, dim, dtype=dtype)
    expected = reference.segment_max(csr.indptr, csr.indices, csr.weight, x, -3.5)
    assert all(map(torch.equal, run_max(form, csr, x, -3.5), expected))


def test_nan_and_infinities_stand_where_torch_has_them(form):
    csr = CSR(torch.tensor([0, 3, 5, 6, 6]), torch.tensor([0, 1, 2, 3, 3, 4]), 5)
    values = [1.0, torch.nan, torch.nan, -torch.inf, torch.inf]
    x = torch.tensor(values)[:, None].expand(5, 2).contiguous()
    out, argmax = run_max(form, csr, x, -torch.inf)
    assert str(out[:, 0].tolist()) == "[nan, -inf, inf, -inf]"
    assert argmax[:, 1].tolist() == [1, 3, 5, -1]


def test_spmm_by_max_is_zero_in_empty_rows_and_writes_to_out():
    csr, x = random_csr(), random_x(17, 4)
    out = torch.full((14, 4), 9.0, dtype=torch.float64)
    assert spmm(csr, x, reduce="max", out=out) is out
    assert torch.equal(out, brute_force_max(csr, x)[0])
    back = spmm(csr, random_x(14, 4), reduce="max", transpose=True)
    assert torch.equal(back, segment_max(csr.t(), random_x(14, 4)).out)
    found = segment_max(csr, x, empty=-torch.inf)
    assert bool((found.out[found.argmax < 0] == -torch.inf).all())
    assert bool((found.argmax[-1] == -1).all())


@pytest.mark.parametrize("weighted", [True, False])
@pytest.mark.parametrize("reduce", REDUCTIONS)
def test_gradients_are_those_of_differences(reduce, weighted):
    csr = random_csr(weighted=weighted)
    x = torch.randn(17, 3, dtype=torch.float64, requires_grad=True)
    assert torch.equal(aggregate(csr, x, reduce), spmm(csr, x.detach(), reduce=reduce))
    assert torch.autograd.gradcheck(lambda x: aggregate(csr, x, reduce), x)


@pytest.mark.parametrize(
    ("dim", "dtype"),
    [
        (1, torch.float32),
        (17, torch.float64),
        (50, torch.float16),
        (50, torch.bfloat16),
    ],
)
@pytest.mark.parametrize("mean", [False, True])
def test_every_form_has_the_references_gradients(form, mean, dim, dtype):
    csr = random_csr(index_dtype=torch.int32)
    grad = torch.randn(14, dim).to(dtype)
    _, argmax = segment_max(csr, random_x(17, dim))
    came, expected = [], []
    for module, device, outs in (
        (form.of("segment"), form.device, came),
        (reference, "cpu", expected),
    ):
        there, grads = csr.to(device), grad.to(device)
        for _ in range(2):
            outs.append(torch.full((17, dim), 7.0, dtype=dtype, device=device))
        structure = there.indptr, there.indices, there.weight
        module.spmm_backward(*structure, grads, mean, outs[0])
        module.segment_max_backward(*structure[1:], argmax.to(device), grads, outs[1])
    eps = max(1e-5, 2 * torch.finfo(dtype).eps)
    for ours, theirs in zip(came, expected, strict=True):
        torch.testing.assert_close(ours.cpu().double(), theirs.double(), rtol=eps, atol=4 * eps)


def test_backward_equals_the_transposed_product_to_the_bit():
    csr = random_csr(num_rows=200, num_cols=300, nnz=4000)
    csr = CSR(csr.indptr, csr.indices, 300, csr.weight.float())
    x, grad = torch.randn(300, 33, requires_grad=True), torch.randn(201, 33)
    (came,) = torch.autograd.grad(aggregate(csr, x), x, grad)
    assert torch.equal(came, spmm(csr, grad, transpose=True))


def test_several_threads_give_the_same_bits(two_threads):
    csr = random_csr(num_rows=2000, num_cols=3000, nnz=60_000)
    x = torch.randn(3000, 70, requires_grad=True)
    outcomes = []
    for _ in range(2):
        outs = [aggregate(csr, x, reduce) for reduce in REDUCTIONS]
        grads = [torch.autograd.grad(out, x, out.detach())[0] for out in outs]
        outcomes.append([*outs, *grads])
        torch.set_num_threads(1)
    assert all(map(torch.equal, *outcomes))


@settings(max_examples=25)
@given(st.integers(1, 6), st.lists(st.tuples(st.integers(0, 3), st.integers(0, 5)), max_size=20))
def test_a_maximum_is_one_of_its_terms_and_above_the_mean(dim, entries):
    dst, src = torch.tensor([*entries, (0, 0)]).T
    csr, x = CSR.from_coo(dst, src, 4, 6), torch.randn(6, dim, dtype=torch.float64)
    out, argmax = segment_max(csr, x, empty=-torch.inf)
    has_entry = csr.indptr.diff() > 0
    picked = x.gather(0, csr.indices[argmax.clamp(min=0)])
    assert torch.equal(out[has_entry], picked[has_entry])
    assert bool((out >= spmm(csr, x, reduce="mean") - 1e-12)[has_entry].all())
    assert bool((argmax[has_entry] >= csr.indptr[:-1, None][has_entry]).all())


@pytest.mark.parametrize("reduce", REDUCTIONS)
def test_empty_shapes(reduce):
    nothing = torch.zeros(0, dtype=torch.int64)
    for rows, cols, dim in ((0, 3, 4), (3, 0, 4), (3, 4, 0), (3, 4, 2)):
        csr = CSR(torch.zeros(rows + 1, dtype=torch.int64), nothing, cols)
        x = torch.ones(cols, dim, requires_grad=True)
        out = aggregate(csr, x, reduce)
        assert out.shape == (rows, dim)
        assert not out.any()
        (grad,) = torch.autograd.grad(out.sum(), x)
        assert grad.shape == x.shape
        assert not grad.any()


def test_non_contiguous_input_and_gradient():
    csr = random_csr()
    x = torch.randn(40, 17, dtype=torch.float64).t()
    for reduce in REDUCTIONS:
        leaf, plain = x.detach().requires_grad_(), x.contiguous().requires_grad_()
        cotangent = torch.randn(40, 14, dtype=torch.float64).t()
        grads = [
            torch.autograd.grad(aggregate(csr, each, reduce), each, grad)[0]
            for each, grad in ((leaf, cotangent), (plain, cotangent.contiguous()))
        ]
        assert torch.equal(*grads)


def test_bad_calls_are_refused():
    csr = random_csr()
    check = getattr(aggregate, "__wrapped__", aggregate)
    with pytest.raises(ConfigError, match="'sum', 'mean' or 'max', got 'min'"):
        check(csr, torch.ones(17, 2), "min")
    with pytest.raises(ConfigError, match="'sum' or 'mean' with accumulate=True, got 'max'"):
        spmm(csr, torch.ones(17, 2), reduce="max", out=torch.ones(14, 2), accumulate=True)
    for function in (aggregate, segment_max):
        with pytest.raises(DataError, match=r"x \[17, dim\].*got \[16, 2\]"):
            function(csr, torch.ones(16, 2))


def test_a_mean_of_one_entry_passes_its_whole_gradient_on():
    # Rows of one entry, of none and of two; column 1 is read twice.
    csr = CSR(torch.tensor([0, 1, 1, 3]), torch.tensor([1, 0, 1]), 3)
    x = torch.ones(3, 2, dtype=torch.float64, requires_grad=True)
    aggregate(csr, x, reduce="mean").backward(torch.tensor([[4.0, 8.0]] * 3, dtype=torch.float64))
    assert x.grad.tolist() == [[2.0, 4.0], [6.0, 12.0], [0.0, 0.0]]
