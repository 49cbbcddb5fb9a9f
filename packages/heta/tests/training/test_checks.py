"""What users bring: modules, seeds, labels, options; each works or is refused in a sentence."""

import pytest
import torch
import torch_geometric.nn as pyg
from graphs import CITES, scholars
from torch import nn

from heta import combine
from heta.graph.hetero_graph import HeteroGraph
from heta.graph.part import load
from heta.nn import BGHGNN, HGT, RGAT, RGCN, HeteroModel
from heta.rows.cache import Cache
from heta.training.trainer import Trainer
from shared.errors import ConfigError, DataError

pytestmark = pytest.mark.unchecked


@pytest.fixture(scope="module")
def parts(parts_of):
    """A graph's only part, with and without rows of destinations."""
    graph = scholars()
    return {u: load(parts_of(graph, [graph.schema.roots], uses_dst=u), 0) for u in (True, False)}


def sage(layer, relation, src_dim, dst_dim, out_dim):
    return pyg.SAGEConv((src_dim, dst_dim), out_dim)


def after(norm):
    """SAGEConv, and what is called on its rows."""

    class Normed(nn.Module):
        def __init__(self, dims, out_dim):
            super().__init__()
            self.conv, self.norm = pyg.SAGEConv(dims, out_dim), norm(out_dim)

        def forward(self, x, edge_index):
            return self.norm(self.conv(x, edge_index))

    return lambda layer, relation, src_dim, dst_dim, out_dim: Normed((src_dim, dst_dim), out_dim)


def step(part, conv=sage, head=3, **options):
    model = HeteroModel(part, conv, 8, 2, head, uses_dst=part.uses_dst, **options)
    return Trainer(part, model).step(range(20))


class Center(nn.Module):
    def forward(self, rows):
        return rows - rows.mean(0)


@pytest.mark.parametrize(
    ("options", "sentence"),
    [
        ({"conv": after(nn.BatchNorm1d)}, "BatchNorm1d: .* batch normalisation takes its statistics"),
        ({"conv": after(pyg.BatchNorm)}, "batch normalisation takes its statistics"),
        ({"head": nn.Sequential(nn.BatchNorm1d(8), nn.Linear(8, 3))}, "batch normalisation"),
        ({"conv": after(pyg.GraphNorm)}, "layer 1, author -writes-> paper.*its own edges only"),
        ({"conv": after(lambda dim: pyg.LayerNorm(dim, mode="graph"))}, "its own edges only"),
        ({"conv": after(lambda dim: pyg.PairNorm())}, "its own edges only"),
        # It reads the last place of rows that are padded to the longest one's length.
        ({"conv": lambda n, r, s, d, out: pyg.SAGEConv((s, d), out, "lstm")}, "its own edges only"),
        ({"activation": Center()}, "activation: expected each row to depend on itself only"),
        ({"activation": lambda rows: rows / rows.norm()}, "activation: expected each row"),
        ({"head": nn.Sequential(Center(), nn.Linear(8, 3))}, "head: expected each row"),
        ({"combine": combine.Stack(lambda x: (x - x.mean(0)).sum(1))}, "function of Stack: expected"),
        ({"conv": lambda n, r, s, d, out: pyg.GATConv((s, d), out)}, "how nodes are numbered.*loops"),
        ({"conv": lambda n, r, s, d, out: pyg.GATConv((s, d), out, 2, add_self_loops=False)},
         r"author -writes-> paper to return a tensor \[\d+, 8\].*got a tensor \[\d+, 16\]"),
        ({"conv": lambda n, r, s, d, out: pyg.SAGEConv((s + 1, d), out)}, "failed on x_src"),
        ({"conv": lambda n, r, s, d, out: nn.Linear(s, out)}, "Linear: failed on x_src"),
        ({"combine": "softmax"}, r"return \(logits \[\d+, heads\], values \[\d+, heads, 8 / heads\]\)"),
        ({"head": nn.Linear(8, 2)}, r"head: expected logits \[20, 3 or more\].*got \[20, 2\]"),
        ({"head": nn.Sequential(nn.Linear(8, 1), nn.Flatten(0))}, r"got \[20\]"),
    ],
)  # fmt: skip
def test_modules_whose_rows_are_not_their_own_are_refused(parts, options, sentence):
    with pytest.raises((ConfigError, DataError), match=f"(?s){sentence}"):
        step(parts[True], **options)


class Attended(nn.Module):
    def __init__(self, src_dim, dst_dim, out_dim):
        super().__init__()
        self.conv = pyg.GATConv((src_dim, dst_dim), out_dim, add_self_loops=False)

    def forward(self, x, edge_index):
        return self.conv(x, edge_index, return_attention_weights=True)


def test_a_module_that_returns_more_than_rows_is_refused(parts):
    def conv(layer, relation, src_dim, dst_dim, out_dim):
        return Attended(src_dim, dst_dim, out_dim)

    with pytest.raises(DataError, match=r"author -writes-> paper.*got \(a tensor.*rows alone"):
        step(parts[True], conv)


def test_a_module_that_needs_rows_of_destinations_is_refused_without_them(parts):
    with pytest.raises(
        ConfigError, match=r"failed on x_src \[5, 8\] and x_dst \[4, 0\].*dst_dim is 0"
    ):
        step(parts[False], lambda n, r, s, d, out: pyg.SAGEConv((s, 7), out))


class Noisy(nn.Module):
    """Draws random numbers in evaluation too."""

    def forward(self, rows):
        return rows + torch.randn_like(rows)


class Hardcoded(nn.Module):
    """Drops by the function, with a number that no attribute shows."""

    def __init__(self, *dims):
        super().__init__()
        self.conv = pyg.SAGEConv(dims[:2], dims[2])

    def forward(self, x, edge_index):
        return nn.functional.dropout(self.conv(x, edge_index), 0.5, self.training)


@pytest.mark.parametrize(
    "options",
    [
        {"conv": after(nn.LayerNorm)},
        {"conv": after(lambda dim: nn.Dropout(0.5))},
        {"conv": after(lambda dim: Noisy())},
        {"conv": lambda n, r, s, d, out: Hardcoded(s, d, out)},
        {"conv": lambda n, r, s, d, out: pyg.GATConv((s, d), out, dropout=0.5, add_self_loops=False)},
        {"conv": lambda n, r, s, d, out: pyg.SAGEConv((-1, -1), out)},
        {"conv": lambda n, r, s, d, out: pyg.SAGEConv((s, d), out, aggr="max", normalize=True)},
        {"activation": nn.Sequential(nn.LayerNorm(8), nn.ReLU(), nn.Dropout(0.5))},
        {"activation": Noisy()},
        {"head": nn.Sequential(nn.Linear(8, 8), nn.Dropout(0.5), nn.Linear(8, 5))},
        {"combine": combine.Stack(lambda rows: rows.mean(1))},
        {"combine": combine.Stack(width=lambda dim, relations: dim * relations)},
    ],
)  # fmt: skip
def test_modules_whose_rows_are_their_own_are_taken(parts, options):
    assert step(parts[True], **options) > 0
    assert step(parts[False], **options) > 0


def test_checks_leave_modes_and_random_numbers_as_they_were(parts):
    model = HeteroModel(parts[True], after(lambda dim: nn.Dropout(0.5)), 8, 2, 3)
    model.convs["1"].eval()
    trainer = Trainer(parts[True], model)
    modes = [module.training for module in model.modules()]
    state = torch.get_rng_state()
    from heta.training.checks import check_modules

    check_modules(model)
    assert torch.equal(state, torch.get_rng_state())
    assert modes == [module.training for module in model.modules()]
    trainer.close()


def test_one_module_may_serve_relations_and_layers(parts):
    shared = {}

    def conv(layer, relation, src_dim, dst_dim, out_dim):
        return shared.setdefault((src_dim, dst_dim), pyg.SAGEConv((src_dim, dst_dim), out_dim))

    assert step(parts[True], conv) > 0


def tied(layer, relation, src_dim, dst_dim, out_dim, _made=[]):  # noqa: B006
    _made.append(pyg.SAGEConv((src_dim, dst_dim), out_dim))
    _made[-1].lin_l.bias = _made[0].lin_l.bias
    return _made[-1]


def shapeless(layer, relation, src_dim, dst_dim, out_dim):
    return nn.Bilinear(1, 1, 1) if layer > 9 else Unused(pyg.SAGEConv((src_dim, dst_dim), out_dim))


class Unused(nn.Module):
    def __init__(self, conv):
        super().__init__()
        self.conv, self.other = conv, nn.LazyLinear(3)

    def forward(self, x, edge_index):
        return self.conv(x, edge_index)


def test_what_a_model_cannot_be_made_of_is_refused(parts):
    part, act = parts[True], nn.PReLU()

    def make(conv=sage, hidden=8, layers=2, head=3, **options):
        return HeteroModel(part, conv, hidden, layers, head, **options)

    for make_it, sentence in (
        (lambda: make(tied), "author writes paper and .* share a parameter"),
        (
            lambda: make(lambda *_: "module"),
            "expected a torch.nn.Module for layer 1, author writes",
        ),
        (lambda: make(shapeless), "other.weight has no shape yet"),
        (lambda: make(layers=3), "the plan's 2 layers .*got 3 layers"),
        (lambda: make(uses_dst=False), "uses_dst=True, got 2 layers with uses_dst=False"),
        (lambda: make(hidden=0), "hidden: expected 1 or more"),
        (lambda: make(combine=lambda rows: rows[0]), r"pass heta.combine.Stack\(function\)"),
        (lambda: make(combine=combine.Sum), "an object of a class"),
        (lambda: make(combine="median"), "median"),
        (lambda: make(activation=act, head=nn.Sequential(act, nn.Linear(8, 3))), "head: .*its own"),
        (lambda: make(activation=lambda rows: act(rows)), "activation: .* that calls PReLU"),
        (lambda: make(activation=act.forward), "pass the module itself"),
        (
            lambda: make(combine=combine.Stack(lambda rows: act(rows.sum(1)))),
            "function of Stack: exp",
        ),
        (lambda: make(head=0), "head: expected a module or a number of classes from 1, got 0"),
        (lambda: make(head=torch.relu), "head: expected a module"),
        (lambda: HGT(part, 9, 3), "multiple of 4 heads, got 9"),
        (lambda: RGAT(part, 8, 3, heads=0), "multiple of 0 heads"),
        (lambda: BGHGNN(parts[False], 8, 3), "uses_dst=True"),
        (lambda: HGT(parts[False], 8, 3), "uses_dst"),
    ):
        with pytest.raises(ConfigError, match=f"(?s){sentence}"):
            make_it()


def test_widths_other_than_the_plans_are_taken(parts):
    for make in (RGCN, RGAT, HGT, BGHGNN):
        assert Trainer(parts[True], make(parts[True], 12, 3)).step(range(20)) > 0


@pytest.mark.parametrize(
    ("seeds", "sentence"),
    [
        (torch.tensor([True, False]), r"whole numbers \[n\], got torch.bool.*mask.nonzero"),
        (torch.tensor([1.0, 2.0]), r"whole numbers \[n\], got torch.float32"),
        (torch.tensor([[1, 2]]), r"got torch.int64 \[1, 2\]"),
        ([0, 60], r"ids of type 'paper' in \[0, 60\), got 0 to 60"),
        ([-1, 3], "got -1 to 3"),
    ],
)
def test_seeds_that_are_no_ids_of_the_target_are_refused(parts, seeds, sentence):
    trainer = Trainer(parts[True], RGCN(parts[True], 8, 3))
    for use in (trainer.backward, trainer.predict, parts[True].sample, trainer.step):
        with pytest.raises(DataError, match=sentence):
            use(seeds)
    with pytest.raises(DataError, match=sentence):
        next(trainer.steps([seeds]))


def test_seeds_of_any_whole_numbers_are_taken(parts):
    trainer = Trainer(parts[True], RGCN(parts[True], 8, 3))
    wanted = trainer.backward(torch.tensor([5, 9, 21]))
    for seeds in ([5, 9, 21], (5, 9, 21), torch.tensor([5, 9, 21], dtype=torch.int32),
                  torch.tensor([5, 9, 21]).numpy()):  # fmt: skip
        assert trainer.backward(seeds) == wanted
    # One that is named twice counts twice.
    one, other = trainer.backward([5]), trainer.backward([9])
    assert trainer.backward([5, 9, 5]) == pytest.approx((2 * one + other) / 3, rel=1e-6)
    assert trainer.predict([]).numel() == 0


def test_seeds_without_labels_count_for_nothing(parts_of):
    graph = scholars()
    label = graph.label.float()
    label[[3, 4]] = float("nan")
    known = HeteroGraph(graph.num_nodes, graph.edges, graph.feat, target="paper", label=label)
    assert known.num_unlabelled == 2
    part = load(parts_of(known, [graph.schema.roots]), 0)
    trainer = Trainer(part, RGCN(part, 8, 3))
    assert trainer.backward([3, 5, 4, 9]) == pytest.approx(trainer.backward([5, 9]), rel=1e-6)
    assert trainer.backward([3, 4]) == 0
    bare = HeteroGraph(graph.num_nodes, graph.edges, graph.feat, target="paper")
    part = load(parts_of(bare, [graph.schema.roots]), 0)
    with pytest.raises(DataError, match="expected a graph with labels, it has none"):
        Trainer(part, RGCN(part, 8, 3)).backward([3])


@pytest.mark.parametrize(
    ("fanouts", "sentence"),
    [([3], r"expected 2, one for each layer"), ([3, 3, 3], "expected 2"), ([3, 0], "got 0 in"),
     ([-2, 3], "got -2 in"), ([3, True], "got True"), ([3, 2.0], "got 2.0")],
)  # fmt: skip
def test_invalid_fan_outs_are_refused(parts, fanouts, sentence):
    trainer = Trainer(parts[True], RGCN(parts[True], 8, 3))
    for use in (
        lambda: Trainer(parts[True], trainer.model, fanouts),
        lambda: parts[True].sample([1], fanouts),
        lambda: trainer.predict([1], fanouts),
    ):
        with pytest.raises(ConfigError, match=sentence):
            use()


def test_invalid_options_of_the_trainer_are_refused(parts):
    part, model = parts[True], RGCN(parts[True], 8, 3)
    for options, sentence in (
        ({"batch_size": 0}, "batch_size: expected 1 or more"),
        ({"wire": "float16"}, "wire: expected one of float32, bfloat16, int8"),
        ({"check_every": -1}, "check_every: expected 0 or more"),
        ({"cache": Cache(100)}, "cache: expected a plan by edge-cut"),
        ({"model": nn.Linear(2, 2)}, "expected a heta.nn.HeteroModel over the part, got Linear"),
        ({"model": RGCN(part, 8, 3).double()}, "expected torch.float32.*got torch.float64"),
        ({"model": RGCN(part, 8, 3).bfloat16()}, "got torch.bfloat16"),
        ({"model": RGCN(parts[False], 8, 3)}, "model: expected one over this part"),
    ):
        with pytest.raises(ConfigError, match=sentence):
            Trainer(part, **{"model": model, **options})


def test_an_update_needs_gradients(parts):
    trainer = Trainer(parts[True], RGCN(parts[True], 8, 3))
    with pytest.raises(ConfigError, match="update: expected gradients of `backward`"):
        trainer.update()
    trainer.step([1, 2])
    with pytest.raises(ConfigError, match="there are none"):
        trainer.update()


def test_an_epoch_goes_on_after_steps_taken_one_by_one(parts):
    losses = []
    for count in (0, 1, 3):
        torch.manual_seed(0)
        trainer = Trainer(parts[True], RGCN(parts[True], 8, 3), batch_size=15)
        batches = trainer.batches()
        assert len(batches) == 3
        taken = [trainer.step(batch) * len(batch) for batch in batches[:count]]
        report = trainer.fit_epoch()
        assert report.num_steps == (3 - count or 3)
        assert (trainer.epoch, trainer.step_number) == (2 if count == 3 else 1, 0)
        rest = sum(map(len, batches[count:]))
        losses.append((sum(taken) + report.loss * rest) / sum(map(len, batches)))
    assert losses[1] == pytest.approx(losses[0], rel=1e-6)
    with pytest.raises(DataError, match="split 'nothing'"):
        trainer.fit_epoch("nothing")


def test_features_of_extreme_size_stop_training(parts_of):
    graph = scholars()
    feat = {**graph.feat, "paper": graph.feat["paper"] * 1e38}
    graph = HeteroGraph(graph.num_nodes, graph.edges, feat, target="paper", label=graph.label)
    part = load(parts_of(graph, [[CITES]]), 0)
    with pytest.raises(DataError, match="epoch 0, step 0: expected a finite loss"):
        Trainer(part, RGCN(part, 8, 3)).backward(range(40))
