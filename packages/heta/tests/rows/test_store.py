"""Learnable rows: where they begin, who owns them, and what optimizers do to them."""

import pytest
import torch

from heta.rows.optimizers import RowAdagrad, RowAdam
from heta.rows.owners import MappedOwners, ModuloOwners
from heta.rows.store import InputRows
from heta.rows.tables import Table, initial_rows
from shared.errors import ConfigError


def test_initial_rows_do_not_depend_on_who_draws_them():
    ids = torch.tensor([0, 70_000, 3, 65_535, 65_536])
    rows = initial_rows(ids, 4, 1, 2)
    for i, one in enumerate(ids):
        assert torch.equal(initial_rows(one[None], 4, 1, 2)[0], rows[i])
    assert not torch.equal(initial_rows(ids, 4, 2, 2), rows)
    assert not torch.equal(initial_rows(ids, 4, 1, 3), rows)
    many = initial_rows(torch.arange(20_000), 16, 0, 0)
    assert float(many.std()) == pytest.approx(0.25, rel=0.02)
    assert abs(float(many.mean())) < 0.01


@pytest.mark.parametrize(
    ("owners", "num_ranks"),
    [(ModuloOwners(0, 1), 2), (ModuloOwners(1, 2), 4), (ModuloOwners(0, 3), 3),
     (MappedOwners(torch.tensor([2, 0, 0, 2, 2, 0, 2], dtype=torch.int16)), 3)],
)  # fmt: skip
def test_every_row_has_one_owner_and_position(owners, num_ranks):
    ids = torch.arange(7)
    ranks, positions = owners.rank_of(ids), owners.local(ids)
    for rank in range(num_ranks):
        owned = owners.owned_by(rank, 7)
        assert torch.equal(owned, ids[ranks == rank])
        assert torch.equal(positions[owned], torch.arange(len(owned)))


def make_store(optimizer, dim=3, rows=10):
    table = torch.randn(rows, dim)
    owners = ModuloOwners(0, 1)
    tables = {"a": Table(table.clone(), owners, True, rows, optimizer.new_state(table))}
    return table, InputRows(tables, optimizer, None)


def test_row_adam_is_adam_on_rows_that_are_always_touched():
    optimizer = RowAdam(lr=0.1, weight_decay=0.01)
    table, store = make_store(optimizer)
    weight = table.clone().requires_grad_()
    adam = torch.optim.Adam([weight], 0.1, weight_decay=0.01)
    for step in range(4):
        requests = store.read_learnable({"a": torch.arange(10)})
        (requests["a"].rows.sin() * (step + 1)).sum().backward()
        store.give_back(requests)
        adam.zero_grad()
        (weight.sin() * (step + 1)).sum().backward()
        adam.step()
    assert torch.allclose(store.tables["a"].rows, weight, atol=1e-6)


def test_row_adam_is_sparse_adam_on_rows_of_one_age():
    table, store = make_store(RowAdam(lr=0.1))
    weight = table.clone().requires_grad_()
    sparse = torch.optim.SparseAdam([weight], 0.1)
    ids = torch.tensor([7, 2, 5])
    for _ in range(3):
        requests = store.read_learnable({"a": ids})
        requests["a"].rows.square().sum().backward()
        store.give_back(requests)
        sparse.zero_grad()
        rows = weight.detach()[ids] * 2
        weight.grad = torch.sparse_coo_tensor(ids[None], rows, weight.shape)
        sparse.step()
    assert torch.allclose(store.tables["a"].rows, weight, atol=1e-6)
    untouched = [i for i in range(10) if i not in ids.tolist()]
    assert torch.equal(store.tables["a"].rows[untouched], table[untouched])
    assert store.tables["a"].state["steps"].tolist() == [0, 0, 3, 0, 0, 3, 0, 3, 0, 0]


def test_row_adagrad_divides_by_the_root_of_summed_mean_squares():
    table, store = make_store(RowAdagrad(lr=0.5))
    total = torch.zeros(10)
    for _ in range(2):
        requests = store.read_learnable({"a": torch.tensor([4, 1])})
        requests["a"].rows.square().sum().backward()
        grads = 2 * table[[4, 1]]
        total[[4, 1]] += grads.square().mean(1)
        table[[4, 1]] -= 0.5 * grads / (total[[4, 1], None].sqrt() + 1e-10)
        store.give_back(requests)
    assert torch.allclose(store.tables["a"].rows, table, atol=1e-6)


def test_a_row_that_was_read_without_a_gradient_counts_as_touched():
    _, store = make_store(RowAdam(lr=0.1))
    requests = store.read_learnable({"a": torch.tensor([3])})
    store.give_back(requests)
    assert store.tables["a"].state["steps"].tolist()[3] == 1


def test_rows_that_are_read_for_predictions_take_no_gradients():
    _, store = make_store(RowAdam())
    requests = store.read_learnable({"a": torch.tensor([3])}, with_gradients=False)
    assert not requests["a"].rows.requires_grad


@pytest.mark.parametrize("lr", [-0.1, float("inf"), float("nan")])
def test_rates_that_are_no_finite_number_from_0_are_refused(lr):
    for kind in (RowAdam, RowAdagrad):
        with pytest.raises(ConfigError, match="lr: expected a finite number from 0"):
            kind(lr=lr)


def test_memory_is_used_again_once_released_and_by_one_reader_at_a_time():
    _, store = make_store(RowAdam())
    first = store.read_learnable({"a": torch.arange(4)})["a"]
    store.give_back({"a": first})
    again, other = (store.read_learnable({"a": torch.tensor([5, 6])})["a"] for _ in range(2))
    assert again.rows.data_ptr() == first.rows.data_ptr()
    assert other.rows.data_ptr() != again.rows.data_ptr()
