"""Models and trainings that several tests run, in this process or on ranks."""

from dataclasses import dataclass

import torch
from torch import nn

from heta import combine
from heta.graph.part import load
from heta.nn import BGHGNN, HGT, RGAT, RGCN, HeteroModel
from heta.training.trainer import Trainer

HIDDEN, CLASSES = 8, 3


class Mixture(nn.Module):
    """Attention over relations, with parameters of its own, as in HAN."""

    def __init__(self):
        super().__init__()
        self.key, self.query = nn.Linear(HIDDEN, 4), nn.Parameter(torch.randn(4))

    def forward(self, rows):
        weights = (self.key(rows).tanh() @ self.query).softmax(1)
        return (weights[..., None] * rows).sum(1)


class Doubled(combine.Sum):
    """A user's own merge."""

    def finalize(self, state, num_slots=1):
        return 2 * state


def _conv(name):
    import torch_geometric.nn as pyg

    def make(layer, relation, src_dim, dst_dim, out_dim):
        dims = (src_dim, dst_dim)
        if name == "gat":
            return pyg.GATConv(dims, out_dim // 2, heads=2, add_self_loops=False)
        if name == "transformer":
            return pyg.TransformerConv(dims, out_dim // 2, heads=2)
        if name == "half":  # relations of one part read their destinations' rows, others' do not
            return pyg.SAGEConv(dims, out_dim, root_weight=relation[1] == "writes")
        return {"sage": pyg.SAGEConv, "graph": pyg.GraphConv}[name](dims, out_dim)

    return make


def _own_convs(name, merge, activation=torch.relu, head=CLASSES):
    return lambda part: HeteroModel(
        part, _conv(name), HIDDEN, part.layers, head() if callable(head) else head,
        combine=merge() if callable(merge) else merge,
        activation=activation() if isinstance(activation, type) else activation,
        uses_dst=part.uses_dst,
    )  # fmt: skip


MODELS = {
    "rgcn": lambda part: RGCN(part, HIDDEN, CLASSES),
    "rgat": lambda part: RGAT(part, HIDDEN, CLASSES, heads=2),
    "hgt": lambda part: HGT(part, HIDDEN, CLASSES, heads=2),
    "bghgnn": lambda part: BGHGNN(part, HIDDEN, CLASSES, heads=2),
    "sage-sum": _own_convs("sage", "sum", nn.PReLU),
    "half-sum": _own_convs("half", "sum"),
    "sage-mean": _own_convs("sage", "mean"),
    "gat-mean": _own_convs("gat", "mean", nn.Tanh),
    "graph-max": _own_convs("graph", "max"),
    "half-max": _own_convs("half", "max"),
    "transformer-stack": _own_convs("transformer", lambda: combine.Stack(Mixture()), nn.PReLU),
    "sage-concatenated": _own_convs("sage", "stack"),
    "sage-doubled": _own_convs("sage", Doubled),
}


@dataclass(frozen=True)
class RowSGD:
    """Plain descent, which keeps the last gradient of each row to be seen."""

    def new_state(self, weight):
        return {"grad": torch.zeros_like(weight)}

    def step(self, weight, state, rows, grads):
        state["grad"].zero_()[rows] = grads
        weight[rows] -= grads


def train_cases(cases):
    """Trains each case; (folder, options of `train`) in, what `train` returns out."""
    return [train(folder, **options) for folder, options in cases]


def train(
    folder,
    model="rgcn",
    batches=(range(40),),
    fanouts=None,
    rows="sgd",
    trainer=None,
    seed=0,
    state=None,
):
    """Trains on some batches, and returns what became of it on this rank."""
    torch.manual_seed(0)
    part = load(folder)
    net = MODELS[model](part)
    if state is not None:
        net.load_state_dict({name: state[name] for name in net.state_dict()})
    initial = {name: value.clone() for name, value in net.state_dict().items()}
    optimizer = {"sgd": RowSGD()}.get(rows, rows)
    settings = {"optimizer": lambda p: torch.optim.SGD(p, 0.1)} | (trainer or {})
    own = Trainer(part, net, fanouts, 40, rows=optimizer, seed=seed, **settings)
    losses = []
    logits = own.predict(torch.arange(part.schema.num_nodes[part.schema.target]))
    for batch in batches:
        losses.append(own.backward(torch.as_tensor(list(batch), dtype=torch.int64)))
        grads = {n: p.grad.clone() for n, p in net.named_parameters() if p.grad is not None}
        own.update()
    rank, owned, row_grads = (0 if own.group is None else own.group.rank), {}, {}
    for name, table in own.store.tables.items():
        if table.is_learnable:
            ids = table.owners.owned_by(rank, part.schema.num_nodes[name])
            owned[name] = (ids, table.rows.clone())
            if "grad" in table.state:
                row_grads[name] = (ids, table.state["grad"].clone())
    own.close()
    return {
        "losses": losses,
        "grads": grads,
        "logits": logits,
        "rows": owned,
        "row_grads": row_grads,
        "initial": initial,
        "state": {name: value.clone() for name, value in net.state_dict().items()},
        "after": own.predict(torch.arange(part.schema.num_nodes[part.schema.target])),
    }


def merge_rows(results, key="rows"):
    """Puts the rows of all owners together, by type."""
    whole = {}
    for name in results[0][key]:
        pieces = [result[key][name] for result in results]
        ids = torch.cat([ids for ids, _ in pieces])
        assert torch.equal(ids.sort()[0], torch.arange(len(ids))), "every row has one owner"
        whole[name] = torch.cat([rows for _, rows in pieces])[ids.argsort()]
    return whole


def distance(got, wanted):
    """The error of a tensor relative to its size; sums that cancel have their terms' rounding.

    GAT's gradients of `att_dst` have norms of 1e-3 and terms near 1, whose float32 rounding is 2e-8 to
    6e-8 from one processor to the next.
    """
    got, wanted = got.detach().double(), wanted.detach().double()
    return float((got - wanted).norm() / (wanted.norm() + 1e-3))


def assert_same_training(results, wanted, bound=1e-5):
    """Compares losses, logits, gradients, parameters and learnable rows of all ranks with one's."""
    (one,) = wanted
    seen = set()
    for result in results:
        assert result["losses"] == results[0]["losses"]
        for loss, other in zip(result["losses"], one["losses"], strict=True):
            assert abs(loss - other) <= bound * abs(other)
        for key in ("logits", "after"):
            assert distance(result[key], one[key]) <= bound, key
        for key in ("initial", "grads", "state"):
            for name, value in result[key].items():
                assert name in one[key], (key, name)
                assert distance(value, one[key][name]) <= bound, (key, name)
        seen |= result["grads"].keys()
    assert seen == one["grads"].keys()
    for key in ("rows", "row_grads"):
        whole, expected = merge_rows(results, key), merge_rows(wanted, key)
        for name, rows in expected.items():
            assert distance(whole[name], rows) <= bound, (key, name)
