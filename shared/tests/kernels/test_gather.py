import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from shared.errors import DataError
from shared.kernels.gather import gather, gather_rows, reference, scatter_add

DIMS = [1, 3, 64, 127, 513]
DTYPES = [torch.float32, torch.float64, torch.float16, torch.bfloat16]


def random_x(num_rows, dim, seed=0, dtype=torch.float32) -> torch.Tensor:
    return torch.randn(num_rows, dim, generator=torch.Generator().manual_seed(seed)).to(dtype)


def unhooked(function):
    """The function as users have it: without the suite's check of signatures, which comes first."""
    return getattr(function, "__wrapped__", function)


def run_scatter_add(form, out, index, src) -> torch.Tensor:
    out = out.to(form.device)
    form.of("gather").scatter_add(out, index.to(form.device), src.to(form.device))
    return out.cpu()


@pytest.mark.parametrize("dtype", [*DTYPES, torch.uint8, torch.int64])
@pytest.mark.parametrize("dim", DIMS)
def test_gather_takes_the_rows(form, dim, dtype):
    x = (random_x(9, dim) * 50).to(dtype)
    index = torch.tensor([8, 0, 0, 3, 7, 1, 2, 8, 8, 4, 5])
    out = torch.empty(11, dim, dtype=dtype, device=form.device)
    form.of("gather").gather(x.to(form.device), index.to(form.device), out)
    assert torch.equal(out.cpu(), x[index])


def test_gather_converts_to_the_type_of_out(form):
    x, index = random_x(5, 20), torch.tensor([4, 1])
    out = torch.empty(2, 20, dtype=torch.float64, device=form.device)
    form.of("gather").gather(x.to(form.device), index.to(form.device), out)
    assert torch.equal(out.cpu(), x[index].double())


def test_gather_of_non_contiguous_rows(form):
    x, index = random_x(20, 7).t(), torch.tensor([6, 0, 3])
    out = torch.empty(20, 3, device=form.device).t()
    form.of("gather").gather(x.to(form.device), index.to(form.device), out)
    assert torch.equal(out.cpu(), x[index])


def test_offsets_beyond_32_bits(form):
    storage = torch.empty(2**32 + 64, dtype=torch.uint8, device=form.device)
    x = storage.as_strided((2, 8), (2**32, 1))
    values = torch.arange(16, dtype=torch.uint8).view(2, 8)
    x.copy_(values)
    out = torch.empty(3, 8, dtype=torch.uint8, device=form.device)
    form.of("gather").gather(x, torch.tensor([1, 0, 1], device=form.device), out)
    assert torch.equal(out.cpu(), values[[1, 0, 1]])


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("dim", DIMS)
def test_scatter_add_adds_every_row(form, dim, dtype):
    out, src = random_x(6, dim, dtype=dtype), random_x(40, dim, seed=1, dtype=dtype)
    index = torch.randint(0, 6, (40,), generator=torch.Generator().manual_seed(2))
    exact = out.double().index_add(0, index, src.double())
    came = run_scatter_add(form, out.clone(), index, src)
    assert came.dtype == dtype
    eps = max(torch.finfo(dtype).eps, 1e-6 if dtype != torch.float64 else 1e-15)
    torch.testing.assert_close(came.double(), exact, rtol=eps, atol=20 * min(eps, 1e-6))


def test_scatter_add_to_non_contiguous_rows(form):
    src, index = random_x(5, 9, seed=3), torch.tensor([1, 1, 0, 3, 1])
    out = torch.zeros(9, 4, device=form.device).t()
    form.of("gather").scatter_add(out, index.to(form.device), src.to(form.device))
    torch.testing.assert_close(out.cpu(), torch.zeros(4, 9).index_add(0, index, src))


def test_half_types_are_summed_wide():
    # 4096 ones: float16 addition one by one would stop at 2048.
    out = torch.zeros(1, 3, dtype=torch.float16)
    scatter_add(out, torch.zeros(4096, dtype=torch.int64), torch.ones(4096, 3).half())
    assert out.tolist() == [[4096.0] * 3]


def test_mixed_types_are_added_in_float32():
    out = torch.zeros(2, 3)
    scatter_add(out, torch.tensor([1, 1]), torch.ones(2, 3, dtype=torch.bfloat16))
    assert out.tolist() == [[0.0] * 3, [2.0] * 3]


def test_the_reference_agrees():
    x, index = random_x(9, 5), torch.tensor([3, 3, 0])
    out = torch.empty(3, 5)
    reference.gather(x, index, out)
    assert torch.equal(out, gather(x, index))
    ours, theirs = torch.zeros(9, 5), torch.zeros(9, 5)
    scatter_add(ours, index, out)
    reference.scatter_add(theirs, index, out)
    torch.testing.assert_close(ours, theirs)


@given(st.lists(st.integers(0, 6), max_size=30), st.integers(1, 20))
def test_scatter_add_conserves_the_sum_and_repeats_to_the_bit(ids, dim):
    index, src = torch.tensor(ids, dtype=torch.int64), random_x(len(ids), dim)
    first = scatter_add(torch.zeros(7, dim), index, src)
    torch.testing.assert_close(first.sum(0), src.sum(0), rtol=1e-4, atol=1e-4)
    assert torch.equal(first, scatter_add(torch.zeros(7, dim), index, src))
    # Gathering what was scattered to distinct rows gives it back.
    distinct = torch.tensor(sorted(set(ids)), dtype=torch.int64)
    rows = random_x(len(distinct), dim, seed=5)
    spread = scatter_add(torch.zeros(7, dim), distinct, rows)
    assert torch.equal(gather(spread, distinct), rows)


@pytest.mark.parametrize("dim", [0, 4])
def test_empty_input(dim):
    none = torch.zeros(0, dtype=torch.int64)
    assert gather(torch.ones(3, dim), none).shape == (0, dim)
    assert gather(torch.ones(0, dim), none).shape == (0, dim)
    out = scatter_add(torch.ones(3, dim), none, torch.ones(0, dim))
    assert bool((out == 1).all())


def test_out_is_returned_and_its_shape_checked():
    out = torch.empty(2, 4)
    assert gather(torch.ones(3, 4), torch.tensor([0, 2]), out) is out
    with pytest.raises(DataError, match=r"out \[2, 4\], got \[2, 5\]"):
        unhooked(gather)(torch.ones(3, 4), torch.tensor([0, 2]), torch.empty(2, 5))
    with pytest.raises(DataError, match=r"src \[2, 4\], got \[2, 5\]"):
        unhooked(scatter_add)(torch.ones(3, 4), torch.tensor([0, 2]), torch.ones(2, 5))


@pytest.mark.parametrize("index", [[0, 3], [-1, 0]])
def test_an_index_outside_is_refused(index):
    index = torch.tensor(index)
    text = rf"index in \[0, 3\), got {int(index.min())} to {int(index.max())}"
    with pytest.raises(DataError, match=text):
        gather(torch.ones(3, 4), index)
    with pytest.raises(DataError, match=text):
        scatter_add(torch.ones(3, 4), index, torch.ones(2, 4))


def test_no_gradient_is_recorded():
    x = torch.ones(3, 4, requires_grad=True)
    assert not gather(x, torch.tensor([0])).requires_grad


def test_gather_rows_has_the_gradient_of_indexing():
    x = random_x(9, 5, dtype=torch.float64).requires_grad_()
    index = torch.tensor([3, 3, 0, 8])
    assert torch.equal(gather_rows(x, index), x[index])
    assert torch.autograd.gradcheck(lambda x: gather_rows(x, index), x)
    (grad,) = torch.autograd.grad(gather_rows(x, index[:0]).sum(), x)
    assert not grad.any()
