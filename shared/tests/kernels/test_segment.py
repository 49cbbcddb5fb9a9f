import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from shared.errors import ConfigError, DataError
from shared.kernels.segment import CSR, reference, spmm

DIMS = [1, 3, 15, 16, 17, 50, 127, 128, 129, 300]


def random_csr(num_rows, num_cols, nnz, seed=0, weighted=True, index_dtype=torch.int64) -> CSR:
    g = torch.Generator().manual_seed(seed)
    # Squared: skewed degrees, and rows without any entry.
    dst = (torch.rand(nnz, generator=g) ** 2 * num_rows).long()
    src = torch.randint(0, num_cols, (nnz,), generator=g)
    weight = torch.randn(nnz, generator=g) if weighted else None
    csr = CSR.from_coo(dst, src, num_rows, num_cols, weight)
    return CSR(csr.indptr, csr.indices.to(index_dtype), num_cols, csr.weight)


def dense(csr: CSR) -> torch.Tensor:
    rows = torch.repeat_interleave(torch.arange(csr.num_rows), csr.indptr.diff())
    values = torch.ones(csr.nnz) if csr.weight is None else csr.weight
    full = torch.zeros(csr.num_rows, csr.num_cols, dtype=torch.float64)
    return full.index_put_((rows, csr.indices.long()), values.double(), accumulate=True)


def run(form, csr: CSR, x, *, mean=False, out=None, accumulate=False) -> torch.Tensor:
    csr = csr.to(form.device)
    out = torch.empty(csr.num_rows, x.shape[1], dtype=x.dtype) if out is None else out
    out = out.to(form.device)
    form.of("segment").spmm(
        csr.indptr, csr.indices, csr.weight, x.to(form.device), mean, out, accumulate
    )
    return out.cpu()


def random_x(num_cols, dim, seed=1, dtype=torch.float32) -> torch.Tensor:
    return torch.randn(num_cols, dim, generator=torch.Generator().manual_seed(seed)).to(dtype)


@pytest.mark.parametrize("index_dtype", [torch.int32, torch.int64])
@pytest.mark.parametrize("weighted", [True, False])
@pytest.mark.parametrize("dim", DIMS)
def test_sum_and_mean_equal_the_dense_product(form, dim, weighted, index_dtype):
    csr = random_csr(13, 17, 120, weighted=weighted, index_dtype=index_dtype)
    x = random_x(17, dim)
    exact = dense(csr) @ x.double()
    torch.testing.assert_close(run(form, csr, x).double(), exact, rtol=1e-5, atol=1e-5)
    counts = csr.indptr.diff().clamp(min=1)[:, None]
    mean = run(form, csr, x, mean=True)
    torch.testing.assert_close(mean.double(), exact / counts, rtol=1e-5, atol=1e-5)


def test_the_reference_equals_the_dense_product():
    csr, x = random_csr(13, 17, 120), random_x(17, 20)
    out = torch.empty(13, 20)
    reference.spmm(csr.indptr, csr.indices, csr.weight, x, False, out, False)
    torch.testing.assert_close(out.double(), dense(csr) @ x.double(), rtol=1e-5, atol=1e-5)


def test_accumulate_adds_to_what_is_there(form):
    csr, x = random_csr(13, 17, 90), random_x(17, 33)
    start = random_x(13, 33, seed=2)
    for mean in (False, True):
        added = run(form, csr, x, mean=mean, out=start.clone(), accumulate=True)
        expected = start + run(form, csr, x, mean=mean)
        torch.testing.assert_close(added, expected, rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float64])
def test_error_of_other_types_is_that_of_the_type(form, dtype):
    csr = random_csr(7, 9, 60, weighted=False)
    csr = CSR(csr.indptr, csr.indices, 9, torch.rand(60).to(dtype))
    x = random_x(9, 20, dtype=dtype)
    exact = dense(csr) @ x.double()
    eps = torch.finfo(dtype).eps
    # Sums are wide and rounded once. The interpreter truncates to bfloat16: a whole unit.
    scale = float((dense(csr).abs() @ x.double().abs()).max())
    assert float((run(form, csr, x).double() - exact).abs().max()) <= max(eps, 1e-14) * scale
    torch.testing.assert_close(
        run(form, csr, x, out=torch.ones(7, 20, dtype=dtype), accumulate=True).double(),
        exact + 1,
        rtol=2 * eps,
        atol=2 * eps * scale,
    )


def test_empty_rows_and_an_empty_matrix(form):
    empty = CSR(torch.zeros(5, dtype=torch.int64), torch.zeros(0, dtype=torch.int64), 3)
    for mean in (False, True):
        assert bool((run(form, empty, torch.ones(3, 20), mean=mean) == 0).all())


def test_strided_structure_is_read_in_its_own_steps(form):
    draw = torch.Generator().manual_seed(0)
    pairs = torch.randint(0, 40, (200, 2), generator=draw)
    values = torch.rand(200, 3, generator=draw)
    indptr = torch.arange(0, 201, 10)
    x = torch.randn(40, 24, generator=draw)
    strided = CSR(indptr, pairs[:, 0], 40, values[:, 1])
    dense = CSR(indptr, pairs[:, 0].clone(), 40, values[:, 1].clone())
    assert torch.equal(run(form, strided, x), run(form, dense, x))
    expected = torch.zeros(20, 24).index_add_(
        0, torch.arange(200) // 10, x[pairs[:, 0]] * values[:, 1:2]
    )
    torch.testing.assert_close(run(form, strided, x), expected)


def test_no_rows_no_columns_no_dim():
    no_rows = CSR(torch.zeros(1, dtype=torch.int64), torch.zeros(0, dtype=torch.int64), 3)
    assert spmm(no_rows, torch.ones(3, 4)).shape == (0, 4)
    assert torch.equal(spmm(no_rows, torch.ones(0, 4), transpose=True), torch.zeros(3, 4))
    assert spmm(random_csr(4, 3, 5), torch.ones(3, 0)).shape == (4, 0)


def test_non_contiguous_input_and_output(form):
    csr = random_csr(13, 17, 90)
    x = random_x(40, 17).t()
    expected = run(form, csr, x.contiguous())
    assert torch.equal(run(form, csr, x), expected)
    out = torch.zeros(40, 13).t()
    if form.device == "cpu":
        run(form, csr, x, out=out)
        assert torch.equal(out, expected)


def test_a_row_slice_as_output_leaves_its_neighbours():
    csr, x = random_csr(5, 6, 30), random_x(6, 18)
    big = torch.full((9, 18), 4.0)
    spmm(csr, x, out=big[2:7])
    assert torch.equal(big[2:7], spmm(csr, x))
    assert bool((big[[0, 1, 7, 8]] == 4.0).all())


def test_offsets_beyond_32_bits(form):
    storage = torch.empty(2**31 + 64, dtype=torch.float16, device=form.device)
    x = storage.as_strided((2, 16), (2**31, 1))
    values = torch.arange(32, dtype=torch.float16).view(2, 16)
    x.copy_(values)
    csr = CSR(torch.tensor([0, 2]), torch.tensor([0, 1]), 2)
    assert torch.equal(run(form, csr, x)[0], values.sum(0))


def test_several_threads_give_the_same_bits(two_threads):
    csr, x = random_csr(3000, 2000, 40_000), random_x(2000, 70)
    parallel = spmm(csr, x)
    torch.set_num_threads(1)
    assert torch.equal(parallel, spmm(csr, x))


def test_transpose_is_the_transpose_and_is_kept():
    csr, x = random_csr(13, 17, 120), random_x(13, 20)
    exact = dense(csr).t() @ x.double()
    torch.testing.assert_close(spmm(csr, x, transpose=True).double(), exact, rtol=1e-5, atol=1e-5)
    assert csr.t() is csr.t()
    assert csr.t().t() is csr
    assert (csr.t().num_rows, csr.t().num_cols) == (17, 13)


def test_every_form_transposes_alike(form):
    csr = random_csr(13, 17, 120)
    expected = reference.transpose(csr.indptr, csr.indices, 17)
    device = csr.to(form.device)
    came = form.of("segment").transpose(device.indptr, device.indices, 17)
    for ours, theirs in zip(came, expected, strict=True):
        assert ours.dtype == theirs.dtype
        assert torch.equal(ours.cpu(), theirs)


@given(st.data())
def test_from_coo_keeps_every_entry_sorted_within_rows(data):
    num_rows, num_cols = data.draw(st.integers(1, 6)), data.draw(st.integers(1, 6))
    entries = data.draw(
        st.lists(st.tuples(st.integers(0, num_rows - 1), st.integers(0, num_cols - 1)), max_size=30)
    )
    dst = torch.tensor([d for d, _ in entries], dtype=torch.int64)
    src = torch.tensor([s for _, s in entries], dtype=torch.int64)
    weight = torch.arange(len(entries)).float()
    csr = CSR.from_coo(dst, src, num_rows, num_cols, weight)
    rows = torch.repeat_interleave(torch.arange(num_rows), csr.indptr.diff())
    assert list(zip(rows.tolist(), csr.indices.tolist(), strict=True)) == sorted(entries)
    # Each weight still stands with its entry, duplicates in the order they came.
    stable = sorted(range(len(entries)), key=lambda i: entries[i])
    assert csr.weight.tolist() == stable
    back = csr.t().t()
    assert torch.equal(back.indices, csr.indices)


@settings(max_examples=25)
@given(st.integers(0, 2**31), st.integers(1, 40), st.floats(-3, 3))
def test_the_product_is_linear(seed, dim, factor):
    csr = random_csr(8, 9, 40, seed=seed)
    a, b = random_x(9, dim, seed=seed + 1), random_x(9, dim, seed=seed + 2)
    combined = spmm(csr, a + factor * b)
    torch.testing.assert_close(combined, spmm(csr, a) + factor * spmm(csr, b), rtol=1e-4, atol=1e-4)


def test_a_csr_on_its_own_device_is_itself():
    csr = random_csr(3, 3, 4)
    assert csr.to("cpu") is csr


@pytest.mark.parametrize(
    ("indptr", "indices", "text"),
    [
        ([0, 2, 1], [0], "falling in between"),
        ([0, 1], [0, 1], "nnz = 2, got 0 to 1"),
        ([1, 2], [0, 1], "got 1 to 2"),
        ([0, 2], [0, 3], r"\[0, num_cols = 3\), got 0 to 3"),
        ([0, 2], [-1, 1], "got -1 to 1"),
    ],
)
def test_a_broken_structure_is_refused(indptr, indices, text):
    with pytest.raises(DataError, match=text):
        CSR(torch.tensor(indptr), torch.tensor(indices), 3)


def test_types_and_lengths_are_checked():
    with pytest.raises(DataError, match="for each of 2 entries"):
        CSR(torch.tensor([0, 2]), torch.tensor([0, 1]), 3, torch.ones(3))
    with pytest.raises(DataError, match=r"x \[3, dim\].*got \[4, 2\]"):
        spmm(random_csr(2, 3, 4), torch.ones(4, 2))
    with pytest.raises(DataError, match=r"out \[2, 5\].*got \[3, 5\]"):
        spmm(random_csr(2, 3, 4), torch.ones(3, 5), out=torch.ones(3, 5))
    with pytest.raises(ConfigError, match="expected `out`"):
        spmm(random_csr(2, 3, 4), torch.ones(3, 5), accumulate=True)


def test_ids_outside_are_refused_by_from_coo():
    with pytest.raises(DataError, match="got 0 to 3"):
        CSR.from_coo(torch.tensor([0, 1]), torch.tensor([3, 0]), 2, 3)
    with pytest.raises(DataError, match="got 0 to 2"):
        CSR.from_coo(torch.tensor([0, 2]), torch.tensor([2, 0]), 2, 3)
