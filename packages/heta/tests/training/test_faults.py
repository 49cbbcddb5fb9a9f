"""Ranks that die, differ or hold other parts, and what their errors say."""

import os
import signal

import pytest
import torch
from graphs import CITED_BY, CITES, HAS, WRITES, scholars
from running import MODELS, train
from torch import nn

import heta.training.exchange
from heta.graph.part import load
from heta.nn import HeteroModel
from heta.rows.optimizers import RowAdam
from heta.training.trainer import Trainer
from shared.comms import Group
from shared.errors import MeshyardError, RankFailure

TWO = [[WRITES, (CITES, 0, 2)], [CITED_BY, HAS, (CITES, 1, 2)]]


def killed_in_a_merge(folder):
    """Rank 1 dies in the exchange of the second step."""
    own = heta.training.exchange.merge_all_reduce
    calls = []

    def merge(*arguments, **options):
        calls.append(0)
        if Group.world().rank == 1 and len(calls) == 6:
            os.kill(os.getpid(), signal.SIGKILL)
        return own(*arguments, **options)

    heta.training.exchange.merge_all_reduce = merge
    train(folder, batches=[range(10)] * 3)


def test_a_killed_rank_ends_the_others_naming_it(open_pool, parts_of):
    with pytest.raises(RankFailure, match=r"(?s)SIGKILL.*CommError.*rank 1"):
        open_pool(2).run(killed_in_a_merge, parts_of(scholars(), TWO))


def damaged(folder, last):
    """The last rank has a wrong bit in its merged rows in step 1; returns the error."""
    own = heta.training.exchange.merge_all_reduce
    trainer = Trainer(load(folder), MODELS["rgcn"](load(folder)))

    def merge(*arguments, **options):
        merged = own(*arguments, **options)
        if Group.world().rank == last and trainer.step_number == 1:
            merged.view(torch.int32)[0, 0] ^= 1
        return merged

    heta.training.exchange.merge_all_reduce = merge
    before = {}
    try:
        for _ in range(3):
            before = {n: p.clone() for n, p in trainer.model.named_parameters()}
            trainer.step(range(10))
    except MeshyardError as error:
        same = all(torch.equal(before[n], p) for n, p in trainer.model.named_parameters())
        return str(error), same
    finally:
        trainer.close()
        heta.training.exchange.merge_all_reduce = own


def test_a_wrong_bit_in_merged_rows_stops_with_step_and_rank(open_pool, parts_of):
    three = [[WRITES], [CITES], [CITED_BY, HAS]]
    for assignment, who in ((TWO, "ranks [0, 1] differ"), (three, "rank 2 differ")):
        size = len(assignment)
        folder = parts_of(scholars(), assignment)
        for text, is_unchanged in open_pool(size).run(damaged, folder, size - 1).results:
            assert text.startswith("step 1, layer 1: expected the same merged rows")
            assert who in text
            assert is_unchanged


def collect_errors(folder, names):
    """What each named mistake raises on this rank, before any step."""
    return {name: _error(_MISTAKES[name], folder) for name in names}


def _error(make, folder):
    try:
        make(folder)
    except MeshyardError as error:
        return f"{type(error).__name__}: {error}"
    return "nothing"


def _other_seeds(folder):
    trainer = Trainer(load(folder), MODELS["rgcn"](load(folder)))
    first = Group.world().rank
    trainer.backward(range(first, first + 6))


def _fewer_seeds(folder):
    trainer = Trainer(load(folder), MODELS["rgcn"](load(folder)))
    list(trainer.steps([range(20 + Group.world().rank)]))


def _first_part(folder):
    part = load(folder, 0)
    Trainer(part, MODELS["rgcn"](part))


def _other_model(folder):
    Trainer(load(folder), MODELS["rgcn"](load(folder, 1 - Group.world().rank)))


def _other_width(folder):
    Trainer(load(folder), HeteroModel(
        load(folder), lambda *_: nn.Identity(), 8 + Group.world().rank, 2, 3))  # fmt: skip


_MISTAKES = {
    "seeds": _other_seeds,
    "fewer": _fewer_seeds,
    "part": _first_part,
    "model": _other_model,
    "width": _other_width,
}


def test_ranks_that_differ_are_named(open_pool, parts_of):
    folder = parts_of(scholars(), TWO)
    for errors in open_pool(2).run(collect_errors, folder, list(_MISTAKES)).results:
        for name in ("seeds", "fewer"):
            assert "DataError: step 0: expected the same seeds on every rank" in errors[name]
        assert "DataError: rank 1: expected part 1 of 2, got part 0" in errors["part"]
        assert "ConfigError: model: expected one over this part" in errors["model"]
        assert "ConfigError: parameter head.weight: expected one shape" in errors["width"]


def test_replicas_with_other_seeds_are_named(open_pool, parts_of):
    graph = scholars()
    folder = parts_of(graph, [graph.schema.roots], strategy="replicate", hosts=2)
    for errors in open_pool(2).run(collect_errors, folder, ["seeds"]).results:
        assert "DataError: step 0: expected the same seeds on every rank" in errors["seeds"]


def load_other(folders):
    """Each rank reads its part from a folder of its own; returns the error."""
    part = load(folders[Group.world().rank], Group.world().rank)
    return _error(lambda _: Trainer(part, MODELS["rgcn"](part)), None)


def test_folders_of_different_plans_and_wrong_numbers_of_ranks_are_refused(open_pool, parts_of):
    graph = scholars()
    folders = [parts_of(graph, TWO), parts_of(graph, TWO, fanouts=[3, 3])]
    for text in open_pool(2).run(load_other, folders).results:
        assert "rank 1: expected a part of the same plan as rank 0's" in text
    three = parts_of(graph, [[WRITES], [CITES], [CITED_BY, HAS]])
    whole = [graph.schema.roots]
    owners = {name: torch.zeros(n) for name, n in graph.num_nodes.items()}
    cut = parts_of(graph, whole, owners, strategy="edge-cut", hosts=3)
    for folder, text in ((three, "a multiple of the plan's 3 parts"), (cut, "one rank a host")):
        for errors in open_pool(2).run(collect_errors, folder, ["part"]).results:
            assert text in errors["part"]


class Dropped(nn.Module):
    """Drops activated rows, and keeps what it gave for seeds."""

    def __init__(self):
        super().__init__()
        self.drop, self.seen = nn.Dropout(0.5), []

    def forward(self, rows):
        rows = self.drop(rows.relu())
        self.seen.append(rows.detach().clone())
        return rows


def drop(folder):
    """Activated rows of the seeds in two steps of two epochs."""
    torch.manual_seed(Group.world().rank)
    part = load(folder)
    model = HeteroModel(
        part, _sage, 8, 2, nn.Sequential(nn.Dropout(0.5), nn.Linear(8, 3)), activation=Dropped()
    )
    trainer = Trainer(part, model)
    losses, rows = [], []
    for trainer.epoch in (0, 1):
        trainer.step_number = 0
        for _ in range(2):
            losses.append(trainer.backward(range(20)))
            rows.append(model.activation.seen[-1])
            trainer.step_number += 1
    trainer.close()
    return losses, rows


def _sage(layer, relation, src_dim, dst_dim, out_dim):
    from torch_geometric.nn import SAGEConv

    return SAGEConv((src_dim, dst_dim), out_dim)


def test_dropout_behind_a_merge_is_the_same_on_all_parts_and_other_in_each_step(
    open_pool, parts_of
):
    (losses, first), (others, second) = open_pool(2).run(drop, parts_of(scholars(), TWO)).results
    assert losses == others
    assert all(torch.equal(a, b) for a, b in zip(first, second, strict=True))
    masks = [rows == 0 for rows in first]
    assert all(not torch.equal(masks[i], masks[j]) for i in range(4) for j in range(i))


def freeze(folder, frozen):
    """One step with some parameters frozen; returns their names with gradients, and the loss."""
    torch.manual_seed(0)
    part = load(folder)
    model = MODELS["sage-sum"](part)
    for name, parameter in model.named_parameters():
        parameter.requires_grad_(not name.startswith(tuple(frozen)))
    trainer = Trainer(part, model, rows=RowAdam(lr=0.1))
    losses = [trainer.step(range(20)) for _ in range(2)]
    trainer.close()
    return losses, [n for n, p in model.named_parameters() if p.grad is not None]


@pytest.mark.unchecked
def test_frozen_parameters_keep_their_values_and_no_rank_waits_for_their_gradients(
    open_pool, parts_of
):
    # In the second case the second part trains nothing in the first layer, and the first part does.
    graph = scholars(learnable=False)
    two, one = parts_of(graph, TWO), parts_of(graph, [graph.schema.roots])
    for frozen in (
        ["convs.1.", "activation"],
        ["convs.1.paper|c", "convs.1.field", "activation"],
        ["convs.1.paper|c", "head"],
        ["convs", "activation"],
    ):
        wanted, _ = freeze(one, frozen)
        for losses, names in open_pool(2).run(freeze, two, frozen).results:
            assert losses == pytest.approx(wanted, rel=1e-5)
            assert not any(name.startswith(tuple(frozen)) for name in names)


def interleave(folder):
    """Rows after one step, with a prediction between its halves and without."""
    rows = []
    for predicts in (False, True):
        torch.manual_seed(0)
        part = load(folder)
        trainer = Trainer(part, MODELS["rgcn"](part), rows=RowAdam(lr=0.1))
        trainer.backward(range(10))
        if predicts:
            trainer.predict(range(30, 60))
        trainer.update()
        rows.append({n: t.rows.clone() for n, t in trainer.store.tables.items() if t.is_learnable})
        trainer.close()
    plain, with_prediction = rows
    return all(torch.equal(plain[name], with_prediction[name]) for name in plain)


def test_a_prediction_between_backward_and_update_changes_nothing(open_pool, parts_of):
    assert open_pool(2).run(interleave, parts_of(scholars(), TWO)).results == [True, True]
