from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from shared.errors import ConfigError, DataError
from shared.kernels import row_adam
from shared.kernels.row_adam import reference

DIMS = [1, 16, 50, 129]


def new_tables(num_rows=12, dim=5, seed=0):
    g = torch.Generator().manual_seed(seed)
    weight = torch.randn(num_rows, dim, generator=g)
    return weight, torch.zeros_like(weight), torch.zeros_like(weight)


def new_steps(num_rows=12):
    return torch.zeros(num_rows, dtype=torch.int32)


def test_steps_are_those_of_sparse_adam():
    weight, first, second = new_tables()
    theirs = torch.nn.Parameter(weight.clone())
    sparse = torch.optim.SparseAdam([theirs], lr=0.05, betas=(0.8, 0.95), eps=1e-6)
    steps, rows = new_steps(), torch.tensor([7, 0, 3])
    for _ in range(5):
        grads = torch.randn(3, 5)
        theirs.grad = torch.sparse_coo_tensor(
            rows[None], grads, weight.shape, check_invariants=True
        )
        sparse.step()
        row_adam.step(
            weight, first, second, steps, rows, grads, lr=0.05, betas=(0.8, 0.95), eps=1e-6
        )
        torch.testing.assert_close(weight, theirs.detach())
    assert steps.tolist() == [5, 0, 0, 5, 0, 0, 0, 5, 0, 0, 0, 0]


@pytest.mark.parametrize(
    ("weight_decay", "betas"), [(0.0, (0.9, 0.999)), (0.3, (0.9, 0.999)), (0.0, (0.0, 0.9))]
)
def test_steps_of_all_rows_are_those_of_adam(weight_decay, betas):
    """With torch's bias correction of the root, from which that of SparseAdam differs by its eps."""
    weight, first, second = new_tables()
    theirs = torch.nn.Parameter(weight.clone())
    adam = torch.optim.Adam([theirs], lr=0.05, betas=betas, eps=0.0, weight_decay=weight_decay)
    steps, rows = new_steps(), torch.randperm(12)
    for _ in range(6):
        grads = torch.randn(12, 5)
        theirs.grad = torch.empty(12, 5)
        theirs.grad[rows] = grads
        adam.step()
        row_adam.step(
            weight, first, second, steps, rows, grads,
            lr=0.05, betas=betas, eps=0.0, weight_decay=weight_decay,
        )  # fmt: skip
        torch.testing.assert_close(weight, theirs.detach())


def test_each_row_counts_its_own_steps():
    """A row's result depends on its own gradients only, not on when it is touched."""
    together, alone = new_tables(), new_tables()
    steps = new_steps()
    grads = torch.randn(6, 12, 5)
    touched = [torch.tensor(rows) for rows in ([0, 1], [0], [2, 0], [1], [0, 2, 1], [2])]
    for rows, grad in zip(touched, grads, strict=True):
        row_adam.step(*together, steps, rows, grad[rows], lr=0.1)
    for row in range(3):
        count = new_steps()
        for rows, grad in zip(touched, grads, strict=True):
            if row in rows:
                row_adam.step(*alone, count, torch.tensor([row]), grad[[row]], lr=0.1)
        assert count[row] == steps[row]
    assert all(map(torch.equal, together, alone))
    assert torch.equal(together[0][3:], new_tables()[0][3:])


def test_every_form_counts_steps(form):
    steps, rows = torch.tensor([4, 0, 7], dtype=torch.int32), torch.tensor([2, 0])
    there = steps.to(form.device, copy=True)
    counts = form.of("row_adam").count_steps(there, rows.to(form.device))
    assert (counts.tolist(), there.tolist()) == ([8, 5], [5, 0, 8])


def run(form, name, tensors, *scalars):
    there = [tensor.to(form.device, copy=True) for tensor in tensors]
    getattr(form.of("row_adam"), name)(*there, *scalars)
    return [tensor.cpu() for tensor in there]


@pytest.mark.parametrize("dim", DIMS)
def test_every_form_updates_as_the_reference_does(form, dim):
    g = torch.Generator().manual_seed(1)
    tables = [torch.rand(20, dim, generator=g) for _ in range(3)]
    rows = torch.randperm(20, generator=g)[:9]
    grads, rates = torch.randn(9, dim, generator=g), torch.rand(9, generator=g)
    tensors, hyper = [*tables, rows, grads, rates], (0.1, 0.001, 1e-8, 0.2)
    came = run(form, "step", tensors, hyper)
    arguments: list[Any] = [*tensors, hyper]
    reference.step(*arguments)
    for ours, theirs in zip(came, tensors, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-5, atol=1e-6)
    table, totals = tables[0], torch.rand(20, generator=g)
    came = run(form, "adagrad_step", [table, totals, rows, grads], 0.1, 1e-10)
    reference.adagrad_step(table, totals, rows, grads, 0.1, 1e-10)
    torch.testing.assert_close(came[0], table, rtol=1e-5, atol=1e-6)
    torch.testing.assert_close(came[1], totals, rtol=1e-5, atol=1e-6)


def test_adagrad_of_one_column_is_torchs():
    weight = torch.randn(8, 1)
    theirs = torch.nn.Parameter(weight.clone())
    adagrad = torch.optim.Adagrad([theirs], lr=0.1, eps=1e-10)
    totals, rows = torch.zeros(8), torch.randperm(8)
    for _ in range(4):
        grads = torch.randn(8, 1)
        theirs.grad = torch.empty(8, 1)
        theirs.grad[rows] = grads
        adagrad.step()
        row_adam.adagrad_step(weight, totals, rows, grads, lr=0.1)
        torch.testing.assert_close(weight, theirs.detach())


def test_adagrad_keeps_the_mean_square_of_a_row():
    weight, totals = torch.ones(3, 4), torch.tensor([0.0, 5.0, 0.0])
    grads = torch.tensor([[1.0, -3.0, 0.0, 2.0]])
    row_adam.adagrad_step(weight, totals, torch.tensor([1]), grads, lr=0.5, eps=0.0)
    assert totals.tolist() == [0.0, 5 + 14 / 4, 0.0]
    torch.testing.assert_close(weight[1], 1 - 0.5 * grads[0] / 8.5**0.5)
    assert torch.equal(weight[[0, 2]], torch.ones(2, 4))


@settings(max_examples=20)
@given(st.permutations(range(9)), st.integers(0, 9))
def test_the_order_of_rows_is_of_no_account(order, count):
    rows, grads = torch.tensor(order, dtype=torch.int64)[:count], torch.randn(9, 5)
    outcomes = []
    for permuted in (rows, rows.sort().values):
        tables, steps, totals = new_tables(), new_steps(), torch.zeros(12)
        row_adam.step(*tables, steps, permuted, grads[permuted], lr=0.1)
        row_adam.adagrad_step(tables[0], totals, permuted, grads[permuted], lr=0.1)
        outcomes.append([*tables, steps, totals])
    assert all(map(torch.equal, *outcomes))


def test_several_threads_give_the_same_bits(two_threads):
    rows, grads = torch.randperm(20_000)[:9000], torch.randn(9000, 64)
    outcomes = []
    for _ in range(2):
        tables, steps, totals = new_tables(20_000, 64), new_steps(20_000), torch.zeros(20_000)
        row_adam.step(*tables, steps, rows, grads, lr=0.1)
        row_adam.adagrad_step(tables[0], totals, rows, grads, lr=0.1)
        outcomes.append([*tables, totals])
        torch.set_num_threads(1)
    assert all(map(torch.equal, *outcomes))


def test_gradients_of_other_types_and_strides_and_leaves_are_taken():
    grads = torch.randn(5, 3).t()
    outcomes = []
    for each in (grads, grads.contiguous(), grads.double()):
        weight, first, second = new_tables()
        weight.requires_grad_()
        row_adam.step(weight, first, second, new_steps(), torch.tensor([2, 0, 9]), each, lr=0.1)
        outcomes.append(weight.detach())
    assert torch.equal(outcomes[0], outcomes[1])
    torch.testing.assert_close(outcomes[0], outcomes[2])


def test_no_rows_change_nothing():
    weight, first, second = new_tables()
    nothing = torch.zeros(0, dtype=torch.int64)
    row_adam.step(weight, first, second, new_steps(), nothing, torch.zeros(0, 5), lr=0.1)
    row_adam.adagrad_step(weight, torch.zeros(12), nothing, torch.zeros(0, 5), lr=0.1)
    assert torch.equal(weight, new_tables()[0])


@pytest.mark.parametrize(
    ("rows", "text"),
    [
        ([3, 12], r"rows in \[0, 12\), got 3 to 12"),
        ([-1, 3], r"rows in \[0, 12\), got -1 to 3"),
        ([3, 1, 3, 1, 3], "each row once, got row 3 3 times"),
    ],
)
def test_bad_rows_are_refused_before_anything_is_written(rows, text):
    tables, steps, totals = new_tables(), new_steps() + 1, torch.zeros(12)
    rows = torch.tensor(rows)
    with pytest.raises(DataError, match=text):
        row_adam.step(*tables, steps, rows, torch.ones(len(rows), 5), lr=0.1)
    with pytest.raises(DataError, match=text):
        row_adam.adagrad_step(tables[0], totals, rows, torch.ones(len(rows), 5), lr=0.1)
    assert all(map(torch.equal, tables, new_tables()))
    assert torch.equal(steps, new_steps() + 1)
    assert not totals.any()


def test_bad_tables_and_hyperparameters_are_refused():
    weight, first, second = new_tables()
    step: Any = getattr(row_adam.step, "__wrapped__", row_adam.step)
    adagrad_step: Any = getattr(row_adam.adagrad_step, "__wrapped__", row_adam.adagrad_step)
    rest = (new_steps(), torch.tensor([1]), torch.ones(1, 5))
    with pytest.raises(DataError, match=r"exp_avg to be contiguous float32 \[12, 5\], got.*\[11"):
        step(weight, first[1:], second, *rest, lr=0.1)
    with pytest.raises(DataError, match=r"weight to be contiguous float32.*got torch.float64"):
        step(weight.double(), first, second, *rest, lr=0.1)
    with pytest.raises(DataError, match=r"exp_avg_sq to be contiguous.*strides \(1, 12\)"):
        step(weight, first, torch.zeros(5, 12).t(), *rest, lr=0.1)
    with pytest.raises(DataError, match=r"steps to be contiguous torch.int32 \[12\], got.*\[11"):
        step(weight, first, second, new_steps(11), *rest[1:], lr=0.1)
    with pytest.raises(DataError, match=r"totals to be contiguous torch.float32 \[12\]"):
        adagrad_step(weight, torch.zeros(12).double(), *rest[1:], lr=0.1)
    with pytest.raises(DataError, match=r"grads \[1, 5\], got \[1, 4\]"):
        step(weight, first, second, *rest[:2], torch.ones(1, 4), lr=0.1)
    for bad in ({"lr": -1.0}, {"lr": 0.1, "betas": (1.0, 0.9)}, {"lr": 0.1, "eps": -1e-9}):
        with pytest.raises(ConfigError, match=r"betas in \[0, 1\)"):
            step(weight, first, second, *rest, **bad)
    with pytest.raises(ConfigError, match="lr and eps of 0 or more, got lr -1"):
        adagrad_step(weight, torch.zeros(12), *rest[1:], lr=-1.0)
