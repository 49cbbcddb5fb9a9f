"""Models on a GPU: one that is pretended where there is none, and rows that lie there."""

import time

import pytest
import torch
from graphs import CITED_BY, CITES, HAS, WRITES, scholars
from pretended_gpu import GPU, RECORDED, OnGpu, pretended_gpu
from running import CLASSES, HIDDEN, MODELS
from torch import nn

from heta.graph.part import load
from heta.nn import HeteroModel
from heta.rows.cache import CACHE_POLICIES, Cache, fill_cache
from heta.rows.optimizers import RowAdagrad, RowAdam
from heta.training.cache_filling import count_reads, fill_device, time_host_misses
from heta.training.trainer import Trainer
from shared.errors import ConfigError

pytestmark = pytest.mark.unchecked
TWO = [[WRITES, (CITES, 0, 2)], [CITED_BY, HAS, (CITES, 1, 2)]]


def make(folder, **options):
    torch.manual_seed(0)
    part = load(folder)
    return Trainer(part, MODELS["rgcn"](part), [2, 2], 16, **options)


def train(folder, model="rgcn", device="cpu", **options):
    """Losses and logits of an epoch, and all learnable rows that this rank has at last."""
    torch.manual_seed(0)
    part = load(folder)
    net = (OWN_MODELS | MODELS)[model](part)
    if device == GPU:
        for module in net.modules():
            for values in (module._parameters, module._buffers):
                for name, value in values.items():
                    if value is not None:
                        moved = value.detach().to(device)
                        is_parameter = values is module._parameters
                        values[name] = nn.Parameter(moved) if is_parameter else moved
    else:
        net.to(device)
    trainer = Trainer(part, net, batch_size=16, **options)
    losses = [trainer.step(seeds) for seeds in trainer.batches()]
    logits = trainer.predict(range(60))
    for table in trainer.store.tables.values():
        if table.on_device is not None:
            table.on_device.write_back()
    trainer.close()
    rows = {n: t.rows.clone() for n, t in trainer.store.tables.items() if t.is_learnable}
    return losses, logits, rows


class Plain(nn.Module):
    """A module of a user's own, in plain torch."""

    def __init__(self, src_dim, out_dim):
        super().__init__()
        self.linear = nn.Linear(src_dim, out_dim)

    def forward(self, rows, edge_index):
        x_src, x_dst = rows
        total = x_src.new_zeros(len(x_dst), x_src.shape[1])
        return self.linear(total.index_add(0, edge_index[1], x_src[edge_index[0]]))


def plain(merge):
    return lambda part: HeteroModel(
        part, lambda layer, relation, src_dim, dst_dim, out_dim: Plain(src_dim, out_dim),
        HIDDEN, part.layers, CLASSES, combine=merge, uses_dst=part.uses_dst,
    )  # fmt: skip


OWN_MODELS = {name: MODELS[name] for name in ("rgcn", "rgat", "hgt", "bghgnn")}
OWN_MODELS |= {merge: plain(merge) for merge in ("mean", "max", "stack")}


@pytest.mark.parametrize(
    ("model", "cache"), [("rgcn", None), *((model, Cache(2000)) for model in OWN_MODELS)]
)
def test_all_of_a_step_lies_on_the_gpu(parts_of, monkeypatch, model, cache):
    folder = parts_of(scholars(), [scholars().schema.roots])
    losses, logits, rows = train(folder, model)
    with pretended_gpu(monkeypatch):
        own_losses, own_logits, own_rows = train(folder, model, GPU, cache=cache)
    assert not isinstance(own_logits, OnGpu)
    # Edges and features were made on the reader's stream.
    assert {tensor.dtype for tensor in RECORDED} == {torch.int64, torch.float32}
    assert_same((own_losses, own_logits, own_rows), (losses, logits, rows))


def train_on_pretended_gpu(folder, model, cache):
    with pytest.MonkeyPatch.context() as patch, pretended_gpu(patch):
        return train(folder, model, GPU, cache=cache)


@pytest.mark.parametrize(("model", "cache"), [("rgcn", None), ("hgt", Cache(2000))])
def test_ranks_move_what_they_exchange(open_pool, parts_of, model, cache):
    losses, logits, _ = train(parts_of(scholars(), [scholars().schema.roots]), model)
    run = open_pool(2).run(train_on_pretended_gpu, parts_of(scholars(), TWO), model, cache)
    for own_losses, own_logits, _ in run.results:
        assert own_losses == pytest.approx(losses, rel=1e-4)
        torch.testing.assert_close(own_logits, logits, rtol=1e-3, atol=1e-4)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
@pytest.mark.parametrize("cache", [None, Cache(2000)])
@pytest.mark.parametrize("model", [*OWN_MODELS, "sage-mean", "graph-max"])
def test_the_gpu_trains_as_the_cpu(parts_of, model, cache):
    folder = parts_of(scholars(), [scholars().schema.roots])
    assert_same(train(folder, model, "cuda", cache=cache), train(folder, model))


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
def test_ranks_with_models_on_a_gpu_train_as_one_process(open_pool, parts_of):
    whole = train(parts_of(scholars(), [scholars().schema.roots]))
    folder = parts_of(scholars(), TWO)
    for losses, logits, _ in open_pool(2).run(train, folder, "rgcn", "cuda").results:
        assert losses == pytest.approx(whole[0], rel=1e-4)
        torch.testing.assert_close(logits, whole[1], rtol=1e-3, atol=1e-4)


def assert_same(results, expected):
    (losses, logits, rows), (wanted_losses, wanted_logits, wanted_rows) = results, expected
    assert losses == pytest.approx(wanted_losses, rel=1e-4)
    torch.testing.assert_close(logits, wanted_logits, rtol=1e-3, atol=1e-4)
    assert rows
    for name, values in rows.items():
        torch.testing.assert_close(values, wanted_rows[name], rtol=1e-3, atol=1e-4)


def train_with_rows_elsewhere(folder, budget, rule=RowAdam, policy="knapsack"):
    """As `train`, with some rows in other memory of the host; also how many, by type."""
    trainer = make(folder, rows=rule(lr=0.1))
    if budget:
        fill_device(
            trainer.store, trainer.part, Cache(budget, policy), torch.arange(60), [2, 2], seed=0
        )
    losses = [trainer.step(seeds) for seeds in trainer.batches()]
    logits = trainer.predict(range(60))
    counts = {}
    for name, table in trainer.store.tables.items():
        if table.on_device is not None:
            counts[name] = len(table.on_device.rows)
            table.on_device.write_back()
    trainer.close()
    tables = {n: t for n, t in trainer.store.tables.items() if t.is_learnable}
    state = {
        n: (t.rows.clone(), {k: v.clone() for k, v in t.state.items()}) for n, t in tables.items()
    }
    return losses, logits, state, counts


@pytest.mark.parametrize("rule", [RowAdam, RowAdagrad])
@pytest.mark.parametrize("num_parts", [1, 2])
def test_where_rows_lie_changes_no_bit(open_pool, parts_of, num_parts, rule):
    graph = scholars()
    folder = parts_of(graph, TWO if num_parts == 2 else [graph.schema.roots])

    def results(budget):
        if num_parts == 1:
            return [train_with_rows_elsewhere(folder, budget, rule)]
        return open_pool(2).run(train_with_rows_elsewhere, folder, budget, rule).results

    for own, expected in zip(results(2000), results(0), strict=True):
        assert own[0] == expected[0]
        assert torch.equal(own[1], expected[1])
        assert own[2].keys() == expected[2].keys()
        for name, (rows, state) in own[2].items():
            assert torch.equal(rows, expected[2][name][0])
            for key, values in state.items():
                assert torch.equal(values, expected[2][name][1][key])
        assert sum(own[3].values()) > 0
        assert not expected[3]


@pytest.mark.parametrize("policy", list(CACHE_POLICIES))
def test_each_policy_keeps_its_budget(parts_of, policy):
    folder = parts_of(scholars(), [scholars().schema.roots])
    trainer = make(folder, rows=RowAdam())
    fill_device(trainer.store, trainer.part, Cache(3000, policy), torch.arange(60), [2, 2], seed=0)
    used = 0
    for table in trainer.store.tables.values():
        for values in (table.on_device.rows, *table.on_device.state.values()):
            used += values.numel() * values.element_size()
    trainer.close()
    assert 2000 < used <= 3000


def keep_the_hottest(folder):
    """Positions of the rows of authors that are kept, and how often each is read here."""
    trainer = make(folder, rows=RowAdagrad())
    seeds, store = torch.arange(60), trainer.store
    fill_device(store, trainer.part, Cache(800, "hotness"), seeds, [2, 2], seed=0)
    reads = count_reads(trainer.part, seeds, [2, 2], 0)
    trainer.close()
    kept = {}
    for name in store.learnable:
        table = store.tables[name]
        own = table.owners.owned_by(store.rank, table.num_nodes)
        kept[name] = table.on_device.slots(torch.arange(len(own))) >= 0, reads[name][own]
    return kept


def test_each_rank_keeps_those_of_its_own_rows_that_it_reads_most(open_pool, parts_of):
    folder = parts_of(scholars(), [scholars().schema.roots])
    for kept in open_pool(2).run(keep_the_hottest, folder).results:
        for is_kept, counts in kept.values():
            if is_kept.any() and not is_kept.all():
                assert counts[is_kept].min() >= counts[~is_kept].max()
        assert any(is_kept.any() and not is_kept.all() for is_kept, _ in kept.values())


class SlowRule(RowAdagrad):
    def step(self, weight, state, rows, grads):
        time.sleep(0.02 if len(rows) else 0)


def test_a_miss_of_a_learnable_row_counts_its_way_back(parts_of):
    trainer = make(parts_of(scholars(), [scholars().schema.roots]), rows=SlowRule())
    for name, table in trainer.store.tables.items():
        counts = torch.ones(len(table.rows))
        miss_s = time_host_misses(trainer.store, table, counts)
        assert (miss_s * len(counts) >= 0.02) == (name in trainer.store.learnable)
    trainer.close()


def test_all_edges_of_a_batch_move(parts_of, monkeypatch):
    part = load(parts_of(scholars(), TWO), 0)
    with pretended_gpu(monkeypatch):
        batch = part.sample(range(20), [2, 2]).to(GPU)
        moved = list(batch.edge_tensors())
        assert any(len(layer.seed_edges[CITES].rows) < 20 for layer in batch.layers)
        for layer in batch.layers:
            moved += [each.rows for each in layer.seed_edges.values()]
            moved += [each.csr.indices for each in layer.edges.values()]
    assert len(moved) > 10
    assert all(isinstance(tensor, OnGpu) for tensor in moved)


def test_checkpoints_hold_rows_wherever_they_lie(parts_of, tmp_path):
    folder = parts_of(scholars(), [scholars().schema.roots])

    def go_on(trainer):
        trainer.load(tmp_path / "state")
        losses = [trainer.step(seeds) for seeds in trainer.batches()]
        trainer.close()
        return losses

    first = make(folder)
    fill_device(first.store, first.part, Cache(2000), torch.arange(60), [2, 2], seed=0)
    for seeds in first.batches()[:2]:
        first.step(seeds)
    first.save(tmp_path / "state")
    expected = [first.step(seeds) for seeds in first.batches()]
    first.close()
    other = make(folder)
    fill_device(other.store, other.part, Cache(1500, "uniform"), torch.arange(60), [2, 2], seed=0)
    assert go_on(other) == expected
    assert go_on(make(folder)) == expected


def test_a_cache_needs_rows_that_lie_elsewhere(parts_of):
    folder = parts_of(scholars(), [scholars().schema.roots])
    with pytest.raises(ConfigError, match=r"a plan by edge-cut, .* or a model on a GPU"):
        make(folder, cache=Cache(1000))


def test_nothing_to_keep_is_kept():
    assert fill_cache({}, {}, {}, 100) == {}


def test_a_model_on_two_devices_is_refused(parts_of, monkeypatch):
    part = load(parts_of(scholars(), [scholars().schema.roots]))
    model = MODELS["rgcn"](part)
    with pretended_gpu(monkeypatch):
        weight = nn.Parameter(model.get_parameter("head.weight").detach().to(GPU))
        model.get_submodule("head").register_parameter("weight", weight)
        with pytest.raises(
            ConfigError, match=r"head\.weight: expected all .* on the CPU or on one"
        ):
            Trainer(part, model)
